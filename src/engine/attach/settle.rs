//! The wait for udev's record of an attached disk.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::error::{ErrorKind, Result};
use crate::kernel::blockdev::BlockDevice;
use crate::uevent::{self, SettledDevice, Watch};

/// Waits until udev has handled the disk and its partitions.
pub(super) fn settle_disk(
    engine: &Engine,
    disk: &BlockDevice,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<SettledDevice> {
    let (roots, mode) = (engine.roots(), engine.hub().mode());
    let proof = uevent::settle(watch, mode, roots, disk.dir(), deadline)?;
    for partition in disk.partitions()? {
        match uevent::settle(watch, mode, roots, partition.dir(), deadline) {
            // Another process rereads the partition table. That is no failure of the
            // attach.
            Err(error) if error.kind() == ErrorKind::Vanished => {}
            result => drop(result?),
        }
    }
    Ok(proof)
}
