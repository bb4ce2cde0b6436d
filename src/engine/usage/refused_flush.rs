//! The flush of a unit's cache that is refused because of the ALUA access state of its path.

use std::fs::File;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::error::Error;
use crate::kernel::Roots;
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{self, AccessState, ScsiDevice};

/// The errors of a flush that a target refuses because of its port's access state
/// (`drivers/scsi/scsi_lib.c`, `scsi_io_completion_action`).
const REFUSALS: [Errno; 3] = [Errno::EIO, Errno::EAGAIN, Errno::ENOLINK];

/// A target refuses a flush once, perhaps after a unit attention. After a medium error the kernel
/// sends the flush again, six times in all (`drivers/scsi/scsi_error.c`, `scsi_check_sense`). It
/// also sends it again during a transition.
const ANSWERS_OF_A_REFUSAL: u64 = 2;

/// No flush times out sooner, unless `queue/io_timeout` is below 500 ms: the kernel gives a flush
/// twice that time (`drivers/scsi/sd.c`, `sd_setup_flush_cmnd`).
const SHORTEST_TIMEOUT: Duration = Duration::from_secs(1);

/// A path just before the flush of its unit's cache.
pub(super) struct PathBeforeFlush {
    device: ScsiDevice,
    /// The state that the kernel knows, if the path serves no I/O in it.
    non_serving: Option<AccessState>,
    sent_commands: Option<u64>,
    failed_commands: Option<u64>,
    looked_at: Instant,
}

impl PathBeforeFlush {
    /// `None` if the disk is no SCSI disk, is gone or cannot be read.
    pub(super) fn look_at(disk: &BlockDevice) -> Option<Self> {
        let device = ScsiDevice::below(disk)?;
        let known = device.known_access_state().ok().flatten();
        Some(Self {
            non_serving: known.filter(|state| !state.serves_io()),
            sent_commands: device.sent_commands(),
            failed_commands: device.failed_commands(),
            device,
            looked_at: Instant::now(),
        })
    }

    /// Why the flush that ended with this error was refused. `None` if it may have failed for
    /// another reason.
    ///
    /// The kernel refuses by the state that it knows, which may be out of date. It asks the target
    /// for the state again when a command returns with a unit attention
    /// (`drivers/scsi/device_handler/scsi_dh_alua.c`, `alua_check_sense`), and this function sends
    /// a command.
    pub(super) fn refusal(&self, roots: &Roots, file: &File, error: &Error) -> Option<String> {
        let failed = self.device.failed_commands();
        let unsent = self.known_state_if_unsent(failed);
        let hctl = self.device.hctl();
        let has_states = self.device.has_port_groups().unwrap_or(false);
        let target = has_states.then(|| scsi::access_state_of_open(roots, file));
        let target = target.and_then(|state| state.ok().flatten());
        let target_serves = target.is_some_and(AccessState::serves_io);
        if let Some(known) = unsent {
            let why = format!("the kernel knows {hctl} as {known} and sent it no flush");
            let rescan = self.device.dir().join("rescan");
            return Some(match target {
                Some(state) if target_serves => format!(
                    "{why}; the target reports {state}: if a second detach ends so too, write 1 to {}",
                    rescan.display()
                ),
                _ => why,
            });
        }
        let state = target.filter(|_| !target_serves)?;
        let answers = failed?.checked_sub(self.failed_commands?)?;
        let is_refusal = REFUSALS.iter().any(|&no| error.errno() == Some(no as i32))
            && (state == AccessState::Transitioning || answers <= ANSWERS_OF_A_REFUSAL);
        is_refusal.then(|| format!("the target reports {hctl} as {state}"))
    }

    /// The kernel counts each command that it sends and each that a target fails, and neither
    /// count has a command that its ALUA handler refuses (`drivers/scsi/scsi_lib.c`,
    /// `scsi_dispatch_cmd`, `scsi_complete` and `scsi_prepare_cmd`). Other processes send commands
    /// too, so an unchanged count of failed commands is enough. It leaves out a timeout.
    fn known_state_if_unsent(&self, failed: Option<u64>) -> Option<AccessState> {
        let is_same = |before: Option<u64>, now: Option<u64>| before.is_some() && before == now;
        let sent_none = is_same(self.sent_commands, self.device.sent_commands());
        let failed_none =
            is_same(self.failed_commands, failed) && self.looked_at.elapsed() < SHORTEST_TIMEOUT;
        self.non_serving.filter(|_| sent_none || failed_none)
    }
}
