//! Having a device run again that the kernel has given up.

use super::device::ScsiDevice;
use super::lanes::Lanes;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::kernel::sysfs;

/// Writes `running` to the device's state, where its transport is back, and reads it
/// back. The kernel takes it with a newline alone (`scsi_sysfs.c`,
/// `store_state_field`). After a timeout the kernel may still do it.
///
/// # Errors
/// `NotReady`, naming the state; `Refused` in a state that does not lead there;
/// `Vanished`; `Quarantined`; `NotPermitted`; `TimedOut` at stage `session`.
pub(crate) fn set_running(device: &ScsiDevice, lanes: &Lanes, deadline: Deadline) -> Result<()> {
    let attribute = device.dir().join("state");
    let hctl = device.hctl();
    lanes.on_device(
        hctl,
        Stage::Session,
        &format!("the kernel to have {hctl} run again"),
        deadline,
        || device.describe(),
        move || sysfs::write(&attribute, "running\n"),
    )?;
    device.require_usable(Stage::Session)
}
