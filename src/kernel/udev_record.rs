//! udevd's record of a device.

use std::collections::BTreeMap;

use super::{Roots, sysfs};
use crate::error::Result;
use crate::id::DevNo;

/// The links below `/dev` in udev's record of a block device, as of the last event that
/// udevd handled; none if there is no record (`/run/udev/data/bMAJ:MIN`, lines that
/// begin with `S:`).
pub(crate) fn read_links(roots: &Roots, devno: DevNo) -> Result<Vec<String>> {
    let text = read(roots, devno)?.unwrap_or_default();
    let links = text.lines().filter_map(|line| line.strip_prefix("S:"));
    Ok(links.map(str::to_owned).collect())
}

/// The properties in the same record (`E:KEY=VALUE`); `None` if udevd has handled no
/// event of the device (the record then lacks `I:`).
pub(crate) fn read_properties(
    roots: &Roots,
    devno: DevNo,
) -> Result<Option<BTreeMap<String, String>>> {
    let text = read(roots, devno)?.unwrap_or_default();
    if !text.lines().any(|line| line.starts_with("I:")) {
        return Ok(None);
    }
    let properties = text.lines().filter_map(|line| line.strip_prefix("E:"));
    let properties = properties.filter_map(|property| property.split_once('='));
    let owned = properties.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Ok(Some(owned.collect()))
}

fn read(roots: &Roots, devno: DevNo) -> Result<Option<String>> {
    sysfs::read_if_there(&roots.run.join(format!("udev/data/b{devno}")))
}
