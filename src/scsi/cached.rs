//! Reads the kernel's copies of a device's pages, with three system calls for each.

use std::path::Path;

use super::identity::{Identity, Pages};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{Hctl, Wwid};
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::sysfs;

/// The copies of the device whose directory is `below` this one; `below` is empty or ends
/// with a slash.
pub(super) struct Cached<'a> {
    pub(super) dir: &'a DeviceDir<'a>,
    pub(super) below: &'a str,
}

impl Pages for Cached<'_> {
    fn vpd(&self, code: u8) -> Result<Option<Vec<u8>>> {
        let Self { dir, below } = self;
        match dir.read(&format!("{below}vpd_pg{code:x}")) {
            // The kernel returns EINVAL if the device has lost the page since it was added.
            Err(error) if error.kind() == ErrorKind::Refused => Ok(None),
            result => result,
        }
    }

    fn product(&self) -> Result<String> {
        let Self { dir, below } = self;
        let text = |name| {
            let text = dir.text(&format!("{below}{name}"))?;
            Ok::<_, Error>(text.unwrap_or_default())
        };
        Ok(format!("{:<8}{:<16}", text("vendor")?, text("model")?))
    }
}

/// Whether a unit with these names, the strongest first, may be one that has a wanted name: it
/// has no name, or its strongest name or a unique one is wanted.
pub(super) fn may_be_wanted(names: &[Wwid], is_wanted: impl Fn(&Wwid) -> bool) -> bool {
    let mut wanted = names.iter().filter(|name| is_wanted(name));
    names.is_empty() || wanted.any(|name| name.is_unique() || Some(name) == names.first())
}

/// The addresses in `folder`, of the bus or of a target, where a unit with a wanted name
/// [may be](may_be_wanted), by the names in the kernel's copy of page 83h. A target may have a
/// thousand addresses, so this look is cheap and proves nothing: a moment later another instance of
/// the device may have the address.
///
/// # Errors
/// If the folder cannot be listed.
pub(super) fn candidate_addresses(
    folder: &Path,
    is_wanted: impl Fn(&Wwid) -> bool,
) -> Result<Vec<Hctl>> {
    let Some(dir) = DeviceDir::open(folder)? else {
        return Ok(Vec::new());
    };
    let mut addresses = Vec::new();
    for name in sysfs::names(folder)? {
        // The bus lists hosts and targets too.
        let Ok(hctl) = name.parse() else {
            continue;
        };
        let (dir, below) = (&dir, &format!("{name}/"));
        let names = Identity::of_page_83(&Cached { dir, below });
        // A device that cannot be read here gets a closer look later.
        if names.is_ok_and(|names| !may_be_wanted(&names, &is_wanted)) {
            continue;
        }
        addresses.push(hctl);
    }
    addresses.sort_unstable();
    Ok(addresses)
}
