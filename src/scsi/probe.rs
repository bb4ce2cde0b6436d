//! The disk driver comes after the scan, on a thread of the kernel's own.

use super::device::ScsiDevice;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::Roots;
use crate::kernel::blockdev::BlockDevice;
use crate::uevent::{self, Watch};

/// Waits until the disk of `device` is there. For a `fresh` device that is when
/// the kernel has announced it, since before that its partitions are still
/// being read (`block/genhd.c` holds the event back until then).
///
/// # Errors
/// `NotSupported` where the device is no disk; `NotReady` where the kernel has
/// it in a state in which it serves no I/O; `Vanished`; `TimedOut` at stage
/// `probe`: the SCSI device stands.
pub(crate) fn wait_for_disk(
    device: &ScsiDevice,
    fresh: bool,
    roots: &Roots,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<BlockDevice> {
    let hctl = device.hctl();
    if !device.is_disk()? {
        let kind = device.peripheral_type()?;
        let message = format!("{hctl} is no disk: its peripheral device type is {kind:#04x}");
        return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Probe));
    }
    loop {
        match device.state()?.as_deref() {
            Some("running" | "created") => {}
            Some(state) => {
                let message = format!("{hctl} is in state {state} and serves no I/O");
                return Err(Error::new(ErrorKind::NotReady, message)
                    .at(Stage::Probe)
                    .with_path(device.dir()));
            }
            None => return Err(vanished(device)),
        }
        if let Some(disk) = device.disk()? {
            let announced = watch.kernel_announced(&uevent::devpath(roots, disk.dir())?);
            if !fresh || announced || watch.has_missed() {
                return Ok(disk);
            }
        }
        if watch.next(deadline).is_none() {
            let what = format!("the kernel to bring the disk of {hctl}");
            let error = Error::timed_out(Stage::Probe, deadline.elapsed(), &what);
            return Err(error.with_last_seen(device.describe()));
        }
    }
}

fn vanished(device: &ScsiDevice) -> Error {
    let message = format!("the SCSI device {} went away", device.hctl());
    Error::new(ErrorKind::Vanished, message).at(Stage::Probe)
}
