//! What udevd wrote down of a device when it handled it.

use super::{Roots, sysfs};
use crate::error::Result;
use crate::id::DevNo;

/// The links below `/dev` in udev's record of a block device, as of the last
/// event that udevd handled; none where it has no record
/// (`/run/udev/data/bMAJ:MIN`, lines that begin with `S:`).
pub(crate) fn read_links(roots: &Roots, devno: DevNo) -> Result<Vec<String>> {
    let record = roots.run.join(format!("udev/data/b{devno}"));
    let text = sysfs::read_if_there(&record)?.unwrap_or_default();
    let links = text.lines().filter_map(|line| line.strip_prefix("S:"));
    Ok(links.map(str::to_owned).collect())
}
