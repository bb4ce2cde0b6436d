//! Which path of a unit is handed out where no multipath map is.

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::attach::AttachRequest;
use crate::engine::attach::scsi::PathSet;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::engine::timing::StageTimer;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{self, AccessState, ScsiDevice};

impl Engine {
    /// The ALUA access state of a path, as the unit says it now, after any transition:
    /// meanwhile the path serves no I/O, and udev and the disk driver would wait for it.
    /// `None` where the unit does not say it.
    ///
    /// # Errors
    /// As of [`scsi::read_access_state`]; `TimedOut` at stage `identify` where the
    /// transition has not ended.
    pub(super) fn lasting_access_state(
        &self,
        device: &ScsiDevice,
        disk: &BlockDevice,
        deadline: Deadline,
    ) -> Result<Option<AccessState>> {
        let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
        let mut was_in_transition = false;
        loop {
            let state =
                scsi::read_access_state(self.roots(), &self.scheduler, device, disk, deadline)?;
            match state {
                Some(AccessState::Transitioning) => was_in_transition = true,
                // No answer is not the end of a transition.
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

    /// Asks over each path in which ALUA access state it is. Where none serves I/O, those in
    /// transition are waited for; one of several has half of what is left of the time.
    pub(super) fn read_access_states(
        &self,
        unit: &mut PathSet,
        request: &AttachRequest,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<()> {
        timer.enter(Stage::Identify);
        let (roots, scheduler) = (self.roots(), &self.scheduler);
        unit.keep(request, |path| {
            let (device, disk) = (&path.device, &path.disk);
            path.access_state = scsi::read_access_state(roots, scheduler, device, disk, deadline)?;
            Ok(())
        })?;
        if unit.paths.iter().any(ProbedPath::serves_io) {
            return Ok(());
        }
        let alone = unit.paths.len() == 1;
        unit.keep(request, |path| {
            let limit = if alone { deadline } else { deadline.half() };
            path.access_state = self.lasting_access_state(&path.device, &path.disk, limit)?;
            Ok(())
        })
    }

    /// # Errors
    /// `NotReady`, naming the state of each path, where none serves I/O: neither in its ALUA
    /// access state nor where it is read. `scsi_debug` says standby and serves.
    pub(super) fn require_one_that_serves_io(
        &self,
        unit: &PathSet,
        deadline: Deadline,
    ) -> Result<()> {
        let mut idle = Vec::new();
        for path in &unit.paths {
            match path.access_state {
                Some(state) if !path.serves_io() => {
                    idle.push(format!("{} is {state}", path.device.hctl()));
                }
                _ => return Ok(()),
            }
        }
        let best = unit.best()?;
        let (disk, roots) = (best.disk.clone(), self.roots().clone());
        let what = format!("a read of {}", disk.name());
        let read = self.scheduler.on_device(
            best.device.hctl(),
            Stage::Identify,
            &what,
            deadline,
            || best.device.describe(),
            move || disk.read_first_block(&roots),
        );
        let Err(failure) = read else {
            return Ok(());
        };
        let message = format!(
            "no path's ALUA access state allows I/O ({}): attach over another target port as \
             well, or make a path active on the target",
            idle.join(", ")
        );
        let error = Error::new(ErrorKind::NotReady, message).at(Stage::Identify);
        Err(error.caused_by(failure))
    }
}

impl ProbedPath {
    /// One that says nothing of its state is taken for one that does.
    fn serves_io(&self) -> bool {
        self.access_state.is_none_or(AccessState::serves_io)
    }
}

impl PathSet {
    /// The path that serves I/O best: the first of those in the same ALUA access state. One
    /// that says nothing of its state is taken for one that serves I/O.
    pub(in crate::engine) fn best(&self) -> Result<&ProbedPath> {
        let state =
            |path: &&ProbedPath| path.access_state.unwrap_or(AccessState::ActiveNonOptimized);
        self.paths
            .iter()
            .min_by_key(state)
            .map_or_else(|| self.first(), Ok)
    }
}
