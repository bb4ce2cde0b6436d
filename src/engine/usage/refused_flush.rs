//! The flush of a unit's cache over a path whose ALUA access state refuses it.

use std::fs::File;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::error::Error;
use crate::kernel::Roots;
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{self, AccessState, ScsiDevice};

/// The errors of a flush that a target refuses because of its port's access state
/// (`drivers/scsi/scsi_lib.c`, `scsi_io_completion_action`). A target that cannot write its cache
/// to the medium causes others.
const REFUSALS: [Errno; 3] = [Errno::EIO, Errno::EAGAIN, Errno::ENOLINK];

/// No command times out sooner. The kernel sets timeouts in whole seconds, and gives a flush twice
/// that time (`drivers/scsi/sd.c`, `sd_setup_flush_cmnd`).
const SHORTEST_TIMEOUT: Duration = Duration::from_secs(1);

/// A path just before the flush of its unit's cache.
pub(super) struct PathBeforeFlush {
    device: ScsiDevice,
    /// The state by which the kernel will refuse the flush without sending it, and the number of
    /// commands that have failed on the device.
    refusing: Option<(AccessState, u64)>,
    looked_at: Instant,
}

impl PathBeforeFlush {
    /// `None` if the disk is no SCSI disk or is gone.
    pub(super) fn look_at(disk: &BlockDevice) -> Option<Self> {
        let device = ScsiDevice::of_disk(disk).ok().flatten()?;
        let state = device.known_access_state().ok().flatten();
        let refusing = state
            .filter(|state| !state.serves_io())
            .and_then(|state| Some((state, device.failed_commands()?)));
        Some(Self {
            device,
            refusing,
            looked_at: Instant::now(),
        })
    }

    /// The access state that refused the flush which ended with this error. `None` if the flush
    /// may have failed for another reason.
    ///
    /// The kernel refuses by the state that it knows, which may be out of date, and learns another
    /// one from the target's answer to a command. This function sends that command.
    pub(super) fn refusal(&self, roots: &Roots, file: &File, error: &Error) -> Option<String> {
        if !self.device.has_port_groups().unwrap_or(false) {
            return None;
        }
        let unsent = self.known_state_if_unsent();
        let target = scsi::access_state_of_open(roots, file).ok().flatten();
        if let Some(known) = unsent {
            let target = target.map_or_else(String::new, |now| format!(", the target says {now}"));
            let why = format!("the kernel did not send it: it knows the ALUA access state {known}");
            return Some(why + &target);
        }
        let state = target.filter(|state| !state.serves_io())?;
        let is_refusal = REFUSALS.iter().any(|&no| error.errno() == Some(no as i32));
        is_refusal.then(|| format!("its ALUA access state is {state}"))
    }

    /// The kernel counts each command that a target fails, and none that its ALUA handler refuses
    /// (`drivers/scsi/scsi_lib.c`, `scsi_complete` and `scsi_prepare_cmd`). It also counts none
    /// that times out.
    fn known_state_if_unsent(&self) -> Option<AccessState> {
        let (known, failed) = self.refusing?;
        let unsent = self.device.failed_commands() == Some(failed)
            && self.looked_at.elapsed() < SHORTEST_TIMEOUT;
        unsent.then_some(known)
    }
}
