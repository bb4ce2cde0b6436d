//! Taking one SCSI device down.

use super::device::ScsiDevice;
use super::lanes::Lanes;
use crate::crash::point;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::sysfs;
use crate::uevent::Watch;

/// Deletes the device and waits until sysfs shows it no more. Only this life of
/// it: what somebody has scanned at the address since stands.
///
/// The kernel does not ask whether it is in use, and dirty pages that were not
/// flushed are lost (`scsi_sysfs.c`, `__scsi_remove_device`): the caller holds
/// an exclusive claim and has flushed. That the node is gone would prove
/// nothing, since the kernel takes it away before it writes the device's cache
/// back; the write's return comes after both.
///
/// After a timeout the kernel may still be deleting; the device then goes away
/// by itself, or stays in state `cancel` until its I/O ends.
///
/// # Errors
/// `NotPermitted`; `Quarantined` where an earlier call on the host hangs;
/// `TimedOut` at stage `queue`, and then nothing was deleted, `delete` or
/// `confirm`.
pub(crate) fn delete(
    device: &ScsiDevice,
    lanes: &Lanes,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<()> {
    let attribute = device.dir().join("delete");
    let ours = device.clone();
    let hctl = device.hctl();
    point!(DeleteToWrite);
    let written = lanes.on_host(
        hctl,
        Stage::Delete,
        &format!("the kernel to delete {hctl}"),
        deadline,
        || device.describe(),
        move || sysfs::write_if(&attribute, "1", || ours.is_there()),
    );
    match written {
        // Somebody else deletes it, or has done so: the look below decides.
        Err(error) if error.kind() == ErrorKind::Vanished => {}
        result => result?,
    }
    point!(DeleteWritten);
    while device.is_there() {
        if watch.next(deadline).is_none() {
            let what = format!("{hctl} to be gone from sysfs");
            let error = Error::timed_out(Stage::Confirm, deadline.elapsed(), &what);
            return Err(error.with_last_seen(device.describe()));
        }
    }
    Ok(())
}
