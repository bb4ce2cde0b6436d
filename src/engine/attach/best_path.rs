//! Which path of a unit is handed out where no multipath map is.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::AttachRequest;
use crate::engine::attach::scsi::PathSet;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::engine::timing::StageTimer;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::scsi::{self, AccessState};

impl Engine {
    /// Asks over each path in which ALUA access state it is. One of several has half of what
    /// is left of the time.
    pub(super) fn read_access_states(
        &self,
        unit: &mut PathSet,
        request: &AttachRequest,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<()> {
        timer.enter(Stage::Identify);
        let alone = unit.paths.len() == 1;
        unit.keep(request, |path| {
            let limit = if alone { deadline } else { deadline.half() };
            let (roots, scheduler) = (self.roots(), &self.scheduler);
            path.access_state =
                scsi::read_access_state(roots, scheduler, &path.device, &path.disk, limit)?;
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
                Some(state) if !state.serves_io() => {
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
