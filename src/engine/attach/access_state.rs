//! The ALUA access state of one path.

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::error::{Error, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{self, AccessState, ScsiDevice};

/// The ALUA access state that the unit reports for a path, read after any transition:
/// during a transition the path serves no I/O, so udev and the disk driver would wait
/// for it. `None` where the unit does not report it.
///
/// # Errors
/// Those of [`scsi::read_access_state`]; `TimedOut` at stage `identify` where the
/// transition does not end.
pub(super) fn lasting_access_state(
    engine: &Engine,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Option<AccessState>> {
    let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
    let mut was_in_transition = false;
    loop {
        let state =
            scsi::read_access_state(engine.roots(), &engine.scheduler, device, disk, deadline)?;
        match state {
            Some(AccessState::Transitioning) => was_in_transition = true,
            // A missing answer does not show that the transition has ended.
            None if was_in_transition => {}
            state => return Ok(state),
        }
        if deadline.has_passed() {
            let hctl = device.hctl();
            let what = format!("the ALUA access state of {hctl} to change");
            let error = Error::timed_out(Stage::Identify, deadline, &what);
            return Err(error.with_last_seen(format!("{hctl} is transitioning")));
        }
        deadline.pause(pauses.pause());
    }
}
