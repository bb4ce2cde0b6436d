//! Which path of a unit an attach returns where there is no multipath map.

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::attach::AttachRequest;
use crate::engine::attach::path_set::PathSet;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::engine::call::CallContext;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{self, AccessState, ScsiDevice};

impl Engine {
    /// The ALUA access state that the unit reports for a path, read after any transition:
    /// during a transition the path serves no I/O, so udev and the disk driver would wait
    /// for it. `None` where the unit does not report it.
    ///
    /// # Errors
    /// Those of [`scsi::read_access_state`]; `TimedOut` at stage `identify` where the
    /// transition does not end.
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

    /// Reads the ALUA access state of each path. Where no path serves I/O, waits for the
    /// paths in transition; one of several has half of the remaining time.
    pub(super) fn read_access_states(
        &self,
        unit: &mut PathSet,
        request: &AttachRequest,
        call: &mut CallContext,
    ) -> Result<()> {
        let deadline = call.deadline;
        call.enter(Stage::Identify);
        let (roots, scheduler) = (self.roots(), &self.scheduler);
        unit.retain(request, |path| {
            let (device, disk) = (&path.device, &path.disk);
            path.access_state = scsi::read_access_state(roots, scheduler, device, disk, deadline)?;
            Ok(())
        })?;
        if unit.paths.iter().any(ProbedPath::serves_io) {
            return Ok(());
        }
        let alone = unit.paths.len() == 1;
        unit.retain(request, |path| {
            let limit = if alone { deadline } else { deadline.half() };
            path.access_state = self.lasting_access_state(&path.device, &path.disk, limit)?;
            Ok(())
        })
    }

    /// # Errors
    /// `NotReady`, naming the state of each path, where no path serves I/O by its ALUA
    /// access state and a read fails as well (`scsi_debug` reports standby and serves
    /// I/O).
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
        let seen = || best.device.describe();
        let read = move || disk.read_first_block(&roots);
        let (scheduler, hctl) = (&self.scheduler, best.device.hctl());
        let slot = scheduler.on_device(hctl, Stage::Identify, &what);
        let Err(failure) = slot.and_then(|slot| slot.run(deadline, seen, read)) else {
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
    /// A path that reports no state counts as one that serves I/O.
    fn serves_io(&self) -> bool {
        self.access_state.is_none_or(AccessState::serves_io)
    }
}

impl PathSet {
    /// The path that serves I/O best; the first one among paths in the same ALUA access
    /// state. A path that reports no state counts as active/non-optimized.
    pub(in crate::engine) fn best(&self) -> Result<&ProbedPath> {
        let state =
            |path: &&ProbedPath| path.access_state.unwrap_or(AccessState::ActiveNonOptimized);
        self.paths
            .iter()
            .min_by_key(state)
            .map_or_else(|| self.first(), Ok)
    }
}
