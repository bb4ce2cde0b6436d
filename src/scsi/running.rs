//! Makes a device run again that the kernel has given up.

use super::call_scheduler::CallScheduler;
use super::device::ScsiDevice;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::kernel::sysfs;

/// Writes `running` to the device's state, when its transport is back, and reads the state
/// back. The kernel accepts the word only with a newline (`scsi_sysfs.c`,
/// `store_state_field`). After a timeout the kernel may still do it.
///
/// # Errors
/// `NotReady`, naming the state; `Refused` in a state from which the kernel does not allow
/// it; `Vanished`; `Quarantined`; `NotPermitted`; `TimedOut` at stage `session`.
pub(crate) fn set_running(
    device: &ScsiDevice,
    scheduler: &CallScheduler,
    deadline: Deadline,
) -> Result<()> {
    let attribute = device.dir().join("state");
    let (hctl, devices) = (device.hctl(), scheduler.devices().clone());
    let what = format!("the kernel to set {hctl} running");
    let slot = scheduler.on_device(hctl, Stage::Session, &what)?;
    let write = move || sysfs::write(&devices, &attribute, "running\n");
    slot.run(deadline, || device.describe(), write)?;
    device.require_usable(Stage::Session)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::kernel::Roots;

    #[test]
    fn set_running_writes_the_state_as_the_kernel_expects_it() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("sys/bus/scsi/devices/2:0:0:1");
        fs::create_dir_all(&dir).unwrap();
        // A file keeps the bytes that a write does not replace, so this state has no
        // newline.
        fs::write(dir.join("state"), "offline").unwrap();
        let roots = Roots::below(root.path());
        let device = ScsiDevice::find(&roots, "2:0:0:1".parse().unwrap());
        let device = device.unwrap().unwrap();
        let scheduler = CallScheduler::new(&roots);
        let deadline = Deadline::after(Duration::from_secs(60));
        set_running(&device, &scheduler, deadline).unwrap();
        let written = fs::read_to_string(dir.join("state")).unwrap();
        assert_eq!(written, "running\n");
    }
}
