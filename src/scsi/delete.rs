//! Taking one SCSI device down.

use std::time::Duration;

use super::call_scheduler::CallScheduler;
use super::device::ScsiDevice;
use crate::crash::point;
use crate::deadline::{Backoff, Deadline};
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
/// The kernel refuses it (`ENODEV`, `scsi_sysfs.c`, `sdev_store_delete`) also while
/// the driver of the host is being unloaded, which may fail; and the attribute is
/// gone a moment before somebody else's delete begins. So it is written again for
/// as long as the device stands and is not seen to be deleted.
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
    scheduler: &CallScheduler,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<()> {
    let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
    let mut refusal = write(device, scheduler, deadline)?;
    while device.is_there() {
        if deadline.has_passed() {
            return Err(stands(device, refusal.as_ref(), deadline));
        }
        let is_under_way = refusal.is_none() || device.is_being_deleted()?;
        // Also where it is: the removal's event comes before the directory goes.
        watch.next(deadline.at_most(pauses.pause()));
        if !is_under_way && device.is_there() && !deadline.has_passed() {
            refusal = write(device, scheduler, deadline)?;
        }
    }
    Ok(())
}

/// Has the kernel delete it. What it says where it has not done so because
/// somebody else does or has done, or because it could not get hold of it.
fn write(
    device: &ScsiDevice,
    scheduler: &CallScheduler,
    deadline: Deadline,
) -> Result<Option<Error>> {
    let attribute = device.dir().join("delete");
    let (ours, devices) = (device.clone(), scheduler.devices().clone());
    let hctl = device.hctl();
    point!(DeleteToWrite);
    let written = scheduler.on_host(
        hctl,
        Stage::Delete,
        &format!("the kernel to delete {hctl}"),
        deadline,
        || device.describe(),
        move || sysfs::write_if(&devices, &attribute, "1", &|| ours.is_there()),
    );
    let refusal = match written {
        Err(error) if error.kind() == ErrorKind::Vanished => {
            tracing::debug!(%hctl, %error, "not deleted");
            Some(error)
        }
        result => {
            result?;
            None
        }
    };
    point!(DeleteWritten);
    Ok(refusal)
}

fn stands(device: &ScsiDevice, refusal: Option<&Error>, deadline: Deadline) -> Error {
    let what = format!("{} to be gone from sysfs", device.hctl());
    let error = Error::timed_out(Stage::Confirm, deadline, &what);
    let refusal = refusal.map_or_else(String::new, |refusal| format!("; {refusal}"));
    error.with_last_seen(device.describe() + &refusal)
}
