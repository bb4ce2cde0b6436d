//! Makes the kernel read a device again.

use super::call_scheduler::CallScheduler;
use super::device::ScsiDevice;
use super::state::State;
use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::sysfs;

/// Makes the kernel read the device's identity pages and its size again, and returns when
/// it has.
///
/// The write also succeeds if the kernel did nothing because the device was not running
/// (`scsi_scan.c`, `scsi_rescan_device`), so this checks the state before and after. The
/// caller must still read the unit's size back: see `read_capacity`.
///
/// After a timeout the kernel may still read.
///
/// # Errors
/// `NotReady`, naming the state; `Vanished`; `Quarantined`; `NotPermitted`;
/// `TimedOut` at stage `rescan`.
pub(crate) fn rescan(
    device: &ScsiDevice,
    scheduler: &CallScheduler,
    deadline: Deadline,
) -> Result<()> {
    require_running(device)?;
    let attribute = device.dir().join("rescan");
    let (hctl, devices) = (device.hctl(), scheduler.devices().clone());
    crash_point!(RescanToWrite);
    let what = format!("the kernel to rescan {hctl}");
    let slot = scheduler.on_device_isolated(hctl, Stage::Rescan, &what)?;
    let seen = || device.describe();
    slot.run(deadline, seen, move || {
        sysfs::write(&devices, &attribute, "1")
    })?;
    crash_point!(RescanWritten);
    require_running(device)
}

fn require_running(device: &ScsiDevice) -> Result<()> {
    let hctl = device.hctl();
    let (kind, message) = match device.state()?.filter(|_| device.is_there()) {
        Some(State::Running) => return Ok(()),
        Some(state) => {
            let message =
                format!("{hctl} is in state {state}, in which the kernel rescans nothing");
            (ErrorKind::NotReady, message)
        }
        None => (
            ErrorKind::Vanished,
            format!("the SCSI device {hctl} went away"),
        ),
    };
    Err(Error::new(kind, message)
        .at(Stage::Rescan)
        .with_path(device.dir()))
}
