//! The kernel's copies of a device's pages, by three system calls each.

use std::path::Path;

use super::identity::{Identity, Pages};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{Hctl, Wwid};
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::sysfs;

/// The copies of the device whose directory is `below` (empty, or ending with a
/// slash) this one.
pub(super) struct Cached<'a> {
    pub(super) dir: &'a DeviceDir<'a>,
    pub(super) below: &'a str,
}

impl Pages for Cached<'_> {
    fn vpd(&self, code: u8) -> Result<Option<Vec<u8>>> {
        let Self { dir, below } = self;
        match dir.read(&format!("{below}vpd_pg{code:x}")) {
            // EINVAL where the device has lost the page since it was added.
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

/// The addresses in `folder`, the bus's or a target's, at which a unit with one
/// of the wanted names may be: not those whose strongest name, in the kernel's
/// copy of page 83h, is another. A target may have a thousand, so this is a look
/// from afar: what is found may be of another life of the device a moment later.
///
/// # Errors
/// Where the folder cannot be listed.
pub(super) fn addresses_that_may_be(
    folder: &Path,
    is_wanted: impl Fn(&Wwid) -> bool,
) -> Result<Vec<Hctl>> {
    let Some(dir) = DeviceDir::open(folder)? else {
        return Ok(Vec::new());
    };
    let mut addresses = Vec::new();
    for name in sysfs::names(folder)? {
        // Hosts and targets are on the bus too.
        let Ok(hctl) = name.parse() else {
            continue;
        };
        let (dir, below) = (&dir, &format!("{name}/"));
        let names = Identity::of_page_83(&Cached { dir, below });
        // What cannot be read from here is for a closer look.
        if names.is_ok_and(|names| names.first().is_some_and(|name| !is_wanted(name))) {
            continue;
        }
        addresses.push(hctl);
    }
    addresses.sort_unstable();
    Ok(addresses)
}
