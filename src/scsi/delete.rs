//! Removes one SCSI device.

use super::call_scheduler::CallScheduler;
use super::device::ScsiDevice;
use crate::crash::crash_point;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::sysfs;
use crate::uevent::Watch;

/// Deletes the device and waits until sysfs no longer shows it. It deletes only this instance:
/// a device that was scanned at the address since stays.
///
/// The kernel does not check whether the device is in use, and dirty pages that were not
/// flushed are lost (`scsi_sysfs.c`, `__scsi_remove_device`). The caller must hold an
/// exclusive claim and have flushed. A missing node proves nothing, because the kernel
/// removes it before it writes the device's cache back. The write to `delete` returns after
/// both.
///
/// The kernel also refuses the write (`ENODEV`, `scsi_sysfs.c`, `sdev_store_delete`) while
/// the driver of the host is being unloaded, which may fail. And the attribute disappears a
/// moment before another process's delete begins. So this writes again while the device
/// exists and shows no sign of a delete.
///
/// After a timeout the kernel may still delete the device. It then goes away by itself, or
/// stays in state `cancel` until its I/O ends.
///
/// # Errors
/// `NotPermitted`; `Quarantined` if an earlier call on the host hangs; `TimedOut` at stage
/// `queue`, without a delete, or at stage `delete` or `confirm`.
pub(crate) fn delete(
    device: &ScsiDevice,
    scheduler: &CallScheduler,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<()> {
    let mut pauses = Backoff::for_other_process();
    let mut refusal = write_delete(device, scheduler, deadline)?;
    while device.is_there() {
        if deadline.has_passed() {
            return Err(not_gone(device, refusal.as_ref(), deadline));
        }
        let is_under_way = refusal.is_none() || device.is_being_deleted()?;
        // This also paces a delete in progress: its uevent comes before the directory goes.
        watch.next(deadline.at_most(pauses.pause()));
        if !is_under_way && device.is_there() && !deadline.has_passed() {
            refusal = write_delete(device, scheduler, deadline)?;
        }
    }
    Ok(())
}

/// Makes the kernel delete the device. Returns the kernel's refusal if another process
/// deletes it or has done so, or if the kernel could not get a reference to it.
fn write_delete(
    device: &ScsiDevice,
    scheduler: &CallScheduler,
    deadline: Deadline,
) -> Result<Option<Error>> {
    let attribute = device.dir().join("delete");
    let (ours, devices) = (device.clone(), scheduler.devices().clone());
    let hctl = device.hctl();
    crash_point!(DeleteToWrite);
    let what = format!("the kernel to delete {hctl}");
    let slot = scheduler.on_host(hctl, Stage::Delete, &what, deadline)?;
    let write = move || sysfs::write_if(&devices, &attribute, "1", &|| ours.is_there());
    let refusal = match slot.run(deadline, || device.describe(), write) {
        Err(error) if error.kind() == ErrorKind::Vanished => {
            tracing::debug!(%hctl, %error, "not deleted");
            Some(error)
        }
        result => {
            result?;
            None
        }
    };
    crash_point!(DeleteWritten);
    Ok(refusal)
}

fn not_gone(device: &ScsiDevice, refusal: Option<&Error>, deadline: Deadline) -> Error {
    let what = format!("{} to be gone from sysfs", device.hctl());
    let error = Error::timed_out(Stage::Confirm, deadline, &what);
    let refusal = refusal.map_or_else(String::new, |refusal| format!("; {refusal}"));
    error.with_last_seen(device.describe() + &refusal)
}
