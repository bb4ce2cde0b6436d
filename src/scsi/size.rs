//! Repairs disks that the kernel shows with a size of 0.

use super::call_scheduler::CallScheduler;
use super::device::ScsiDevice;
use super::rescan::rescan;
use super::state::State;
use crate::deadline::Deadline;
use crate::error::{ErrorKind, Result};

/// Whether the device runs and the kernel shows a size of 0 for its disk.
///
/// A rescan over a lost path makes the kernel set this size, because its READ CAPACITY
/// fails. A process may ask for the rescan, or the kernel does it itself when `running` is
/// written to an offline device (`drivers/scsi/sd.c`, `sd_revalidate_disk`; `scsi_sysfs.c`,
/// `store_state_field`). The kernel does not read the size again when the path is back.
///
/// # Errors
/// Those of reading sysfs.
pub(crate) fn shows_no_size(device: &ScsiDevice) -> Result<bool> {
    if device.state()? != Some(State::Running) {
        return Ok(false);
    }
    let Some(disk) = device.disk()? else {
        return Ok(false);
    };
    match disk.size() {
        // A disk loses its size before its device goes.
        Err(error) if error.kind() == ErrorKind::Vanished || !device.is_there() => Ok(false),
        size => Ok(size? == 0),
    }
}

/// Makes the kernel read the size again if it [shows none](shows_no_size), and returns
/// whether it shows one now. `true` at once if it already does, or if there is no disk.
///
/// # Errors
/// As for [`rescan`], and those of reading sysfs.
pub(crate) fn reread_size(
    device: &ScsiDevice,
    scheduler: &CallScheduler,
    deadline: Deadline,
) -> Result<bool> {
    if !shows_no_size(device)? {
        return Ok(true);
    }
    rescan(device, scheduler, deadline)?;
    let has_size = !shows_no_size(device)?;
    if has_size {
        tracing::info!(hctl = %device.hctl(), "the kernel has read the size that it had lost");
    }
    Ok(has_size)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::kernel::Roots;

    fn device(root: &Path, state: &str, sectors: &str) -> ScsiDevice {
        let dir = root.join("sys/bus/scsi/devices/2:0:0:1");
        fs::create_dir_all(dir.join("block/sdb")).unwrap();
        fs::write(dir.join("state"), state).unwrap();
        fs::write(dir.join("rescan"), "").unwrap();
        fs::write(dir.join("block/sdb/dev"), "8:16\n").unwrap();
        fs::write(dir.join("block/sdb/size"), sectors).unwrap();
        let found = ScsiDevice::find(&Roots::below(root), "2:0:0:1".parse().unwrap());
        found.unwrap().unwrap()
    }

    #[test]
    fn only_a_running_disk_without_a_size_is_rescanned() {
        let root = tempfile::tempdir().unwrap();
        let scheduler = CallScheduler::new(&Roots::below(root.path()));
        let deadline = Deadline::after(Duration::from_secs(60));
        for (state, sectors, has_size, rescanned) in [
            ("running\n", "16384\n", true, ""),
            // The kernel does not rescan a device in this state.
            ("offline\n", "0\n", true, ""),
            ("running\n", "0\n", false, "1"),
        ] {
            let device = device(root.path(), state, sectors);
            let read = reread_size(&device, &scheduler, deadline).unwrap();
            let written = fs::read_to_string(device.dir().join("rescan")).unwrap();
            assert_eq!((read, &*written), (has_size, rescanned), "{state}{sectors}");
        }
    }
}
