//! Chooses the path that an attach returns if there is no multipath map.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::AttachRequest;
use crate::engine::attach::access_state::lasting_access_state;
use crate::engine::attach::path_set::PathSet;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::engine::call::CallContext;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{DevNo, DiskSeq};
use crate::scsi::{self, AccessState};

/// Reads the ALUA access state of each path. Where no path serves I/O, waits for the
/// paths in transition; one of several has half of the remaining time.
pub(super) fn read_access_states(
    engine: &Engine,
    unit: &mut PathSet,
    request: &AttachRequest,
    call: &mut CallContext,
) -> Result<()> {
    let deadline = call.deadline;
    call.enter(Stage::Identify);
    let (roots, scheduler) = (engine.roots(), &engine.scheduler);
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
        path.access_state = lasting_access_state(engine, &path.device, &path.disk, limit)?;
        Ok(())
    })
}

/// # Errors
/// `NotReady`, naming the state of each path, where no path serves I/O by its ALUA
/// access state and a read fails as well (`scsi_debug` reports standby and serves
/// I/O).
pub(super) fn require_a_path_that_serves_io(
    engine: &Engine,
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
    let best = unit.best(None)?;
    let (disk, roots) = (best.disk.clone(), engine.roots().clone());
    let what = format!("a read of {}", disk.name());
    let seen = || best.device.describe();
    let read = move || disk.read_first_block(&roots);
    let (scheduler, hctl) = (&engine.scheduler, best.device.hctl());
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

impl ProbedPath {
    /// A path that reports no state counts as one that serves I/O.
    fn serves_io(&self) -> bool {
        self.access_state.is_none_or(AccessState::serves_io)
    }
}

impl PathSet {
    /// The path that serves I/O best. Of paths in the same ALUA access state it is the one with
    /// the `last_device` of the volume, which may be in use, or else the first. A path that
    /// reports no state counts as active/non-optimized.
    pub(in crate::engine) fn best(
        &self,
        last_device: Option<(DevNo, Option<DiskSeq>)>,
    ) -> Result<&ProbedPath> {
        let rank = |path: &&ProbedPath| {
            let state = path.access_state.unwrap_or(AccessState::ActiveNonOptimized);
            (
                state,
                last_device != Some((path.disk.devno(), path.diskseq)),
            )
        };
        self.paths
            .iter()
            .min_by_key(rank)
            .map_or_else(|| self.first(), Ok)
    }
}
