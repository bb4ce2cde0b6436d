//! Gives a map the new size of its paths.

use super::map::Map;
use super::status::the_target;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::dm::{self, Target};
use crate::kernel::{Roots, worker};

/// The unit in which the kernel counts lengths, in bytes.
const SECTOR: u64 = 512;

/// Gives the map a size of `bytes`, which each of its paths must already have. This is for
/// a machine without multipathd. A running multipathd keeps its own record of the size: use
/// [`Daemon::resize_map`](super::Daemon::resize_map) there. A map that has the size is left
/// unchanged.
///
/// The current table is loaded again with the new length, and one ioctl swaps it in while
/// it holds I/O back. I/O may run at any time, and no I/O that waits for a path is lost.
/// The block device has the new size when this returns. Needs `CAP_SYS_ADMIN`.
///
/// After a timeout the kernel may still do it, when the I/O in progress ends.
///
/// # Errors
/// `InvalidInput` if `bytes` is less than the map's size, or no whole number of sectors;
/// `NotReady` if a path is smaller, naming it; `Vanished`; `NotPermitted`; `TimedOut` at
/// stage `resize`.
pub fn grow(roots: &Roots, map: &Map, bytes: u64, deadline: Deadline) -> Result<()> {
    let (own_map, roots) = (map.clone(), roots.clone());
    worker::run(
        Stage::Resize,
        &format!("{map} to have {bytes} bytes"),
        deadline,
        || map.describe(),
        move || reload(&roots, &own_map, bytes),
    )
}

fn reload(roots: &Roots, map: &Map, bytes: u64) -> Result<()> {
    map.require()?;
    let size = map.disk().size()?;
    if size == bytes {
        return Ok(());
    }
    if bytes < size || !bytes.is_multiple_of(SECTOR) {
        let message = format!("{map} has {size} bytes and cannot be made to have {bytes}");
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    for path in map.paths()? {
        let (name, size) = (path.name(), path.size()?);
        if size < bytes {
            let message = format!("{name}, a path of {map}, has {size} bytes and not {bytes}");
            return Err(Error::new(ErrorKind::NotReady, message).with_path(path.dir()));
        }
    }
    let table = Target {
        length: bytes / SECTOR,
        ..the_target(map, dm::table(roots, map.uuid())?)?
    };
    let read_only = dm::status(roots, map.uuid())?.read_only;
    dm::load(roots, map.uuid(), read_only, &[table])?;
    if let Err(error) = dm::swap_table(roots, map.uuid()) {
        // The kernel has dropped the new table and may have left the map suspended. A
        // second swap resumes the old table.
        if let Err(again) = dm::swap_table(roots, map.uuid()) {
            tracing::warn!(%again, %map, "the map may be suspended");
        }
        return Err(error);
    }
    let size = map.disk().size()?;
    if size != bytes {
        let message = format!("{map} was given {bytes} bytes and has {size}");
        return Err(Error::new(ErrorKind::Io, message).with_path(map.disk().dir()));
    }
    Ok(())
}
