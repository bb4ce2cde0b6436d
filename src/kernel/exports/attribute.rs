//! An attribute of a directory of configfs, which also has files.

use std::path::Path;

use nix::libc;

use crate::error::Result;
use crate::kernel::sysfs;

/// The text of an attribute; `None` if there is no such attribute, also below a file.
pub(super) fn read_if_there(attribute: &Path) -> Result<Option<String>> {
    match sysfs::read(attribute) {
        Err(error) if matches!(error.errno(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
        text => text.map(Some),
    }
}
