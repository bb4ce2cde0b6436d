//! Recovery after a crash: compares what the journal says with what sysfs shows, and
//! finishes or undoes what was begun.

mod condition;
mod observe;
pub(super) mod status;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::iscsi::sessions::{LOGIN, destroy_incomplete};
use crate::engine::journal::{Journal, Operation, Problem, Record, VolumeGuard};
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::resize::serves_its_size;
use crate::engine::telemetry::{self, Call};
use crate::engine::volume::attach::attach_guarded;
use crate::engine::volume::content::record_content;
use crate::engine::volume::detach::{DetachVolume, detach_guarded, wait_for_probe_of};
use crate::engine::volume::recover::observe::{Observed, find_foreign, observe};
use crate::engine::volume::resize::{has_no_intent, resize_guarded};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Source, VolumeId};
use crate::kernel::pool;
use crate::scsi::{self, ScsiDevice};
pub use condition::{Action, Condition, Foreign};
pub use status::VolumeStatus;

/// What a recovery found and did, for every volume of a journal.
#[derive(Debug, serde::Serialize)]
#[non_exhaustive]
pub struct Recovery {
    /// The volumes, by name.
    pub volumes: Vec<Recovered>,
    /// Devices that the journal does not know; none was touched.
    pub foreign: Vec<Foreign>,
    /// Files in the journal's directory that are not records; see [`Journal::problems`].
    pub problems: Vec<Problem>,
}

impl Recovery {
    /// Whether every volume is attached or detached, and serves.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.volumes.iter().all(Recovered::is_whole)
    }
}

/// What a recovery found and did for one volume.
#[derive(Debug, serde::Serialize)]
#[non_exhaustive]
pub struct Recovered {
    /// The volume.
    pub volume: VolumeId,
    /// The condition in which it was found.
    pub condition: Condition,
    /// The condition in words: what sysfs and the device itself showed.
    pub seen: String,
    /// The action that was taken.
    #[serde(flatten)]
    pub action: Action,
    /// The node of its device, if it is attached and serves.
    pub node: Option<PathBuf>,
}

impl Recovered {
    /// Whether it is attached or detached, and serves.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        match self.action {
            Action::Nothing => self.condition == Condition::Complete,
            Action::Finished | Action::Undone | Action::Healed => true,
            Action::Failed(_) => false,
        }
    }

    fn outcome(&self) -> Result<(), ErrorKind> {
        match &self.action {
            Action::Failed(error) => Err(error.kind()),
            Action::Nothing | Action::Finished | Action::Undone | Action::Healed => Ok(()),
        }
    }

    fn failed(volume: VolumeId, condition: Condition, seen: String, error: Error) -> Self {
        Self {
            volume,
            condition,
            seen,
            action: Action::Failed(error),
            node: None,
        }
    }
}

impl Engine {
    /// Looks for every volume of the journal by its identity, finishes or undoes what was
    /// begun, and reports all of it. A process does this once when it starts, before it
    /// attaches anything.
    ///
    /// | the journal says | what is there | condition | what is done |
    /// |---|---|---|---|
    /// | attached | the unit answers, as the device that was handed out | `Complete` | nothing |
    /// | | an NBD device whose server is away | `LinkDead` | healed, if the server is back within seconds; [`Engine::healer`] goes on |
    /// | | no path answers, or a map without paths | `LinkDead` | nothing: paths come back |
    /// | | the unit answers, and the kernel takes a path for empty | `Complete` | healed: the kernel reads its size again |
    /// | | another unit answers there, or the unit is another device now | `Changed` | nothing: a repeated attach hands out the new one |
    /// | | nothing | `Gone` | nothing, and the record stays: a session may bring it again; a repeated attach or a detach decides |
    /// | an attach was begun | something | `HalfAttached` | attached, with all its proofs; if that fails it stays as it is |
    /// | | nothing | `Gone` | undone: no caller got a device. If it was attached before, the record only loses the intent |
    /// | | another volume's device | `Gone` | undone, and the device is left alone |
    /// | a detach was begun | something | `HalfDetached` | detached; a refusal (`InUse`) leaves it attached, and the detach is no longer under way |
    /// | | nothing | `Gone` | the detach is proven, and the record says so |
    /// | a resize was begun | the unit answers | `HalfAttached` | resized; an NBD device whose server is smaller than the request keeps the size that it serves, and one whose only connection does not serve the new size gets the size from before: undone |
    /// | | no path answers | `LinkDead` | nothing, and it stays begun |
    ///
    /// A detach that the recovery finishes loses no more than any detach, and abandons
    /// unwritten data only if the caller had asked for that. The recovery destroys an iSCSI
    /// session whose login died before it had named the session. It works on 64 volumes at
    /// once. The failure of one volume is its [`Action::Failed`]. Minimum kernel: 5.10, for
    /// NBD 5.14.
    ///
    /// # Errors
    /// If sysfs cannot be read.
    pub fn recover(&self, journal: &Journal, deadline: Deadline) -> Result<Recovery> {
        telemetry::measured(Call::Recover, || recover_all(self, journal, deadline))
    }

    /// Removes the lock files that dead processes have left, except those that mark an
    /// unfinished login.
    pub(crate) fn purge_stale_locks(&self) {
        DeviceLock::purge_stale(self.roots(), LOGIN);
    }

    /// As [`recover`](Self::recover), for one volume. `None` if the journal does not know it
    /// (any more).
    #[tracing::instrument(skip_all, fields(%volume))]
    pub fn recover_volume(
        &self,
        journal: &Journal,
        volume: &VolumeId,
        deadline: Deadline,
    ) -> Option<Recovered> {
        let recover = || recover_one(self, journal, volume, SERVER_LIMIT, deadline);
        telemetry::measured_by(Call::Recover, recover, |recovered| {
            recovered.as_ref().map_or(Ok(()), Recovered::outcome)
        })
    }
}

fn recover_all(engine: &Engine, journal: &Journal, deadline: Deadline) -> Result<Recovery> {
    let records = journal.records();
    let server_limit = server_limit(records.len(), deadline);
    let one =
        |record: &Record| recover_one(engine, journal, &record.volume, server_limit, deadline);
    let ended = pool::each(Stage::Resolve, &records, one);
    let without_end = |record: &Record, error| {
        let seen = "the search for it did not finish".to_owned();
        Recovered::failed(
            record.volume.clone(),
            condition_by_intent(record),
            seen,
            error,
        )
    };
    let volumes = records
        .iter()
        .zip(ended)
        .filter_map(|(record, ended)| {
            ended.unwrap_or_else(|error| Some(without_end(record, error)))
        })
        .collect();
    if let Err(error) = destroy_incomplete(engine.roots(), deadline) {
        // Its lock file stays, so the next recovery finds it.
        tracing::warn!(%error, "cannot destroy an incomplete session");
    }
    engine.purge_stale_locks();
    // A volume that was attached meanwhile is known as well.
    let known: Vec<Record> = records.into_iter().chain(journal.records()).collect();
    Ok(Recovery {
        volumes,
        foreign: find_foreign(engine, &known)?,
        problems: journal.problems().to_vec(),
    })
}

fn recover_one(
    engine: &Engine,
    journal: &Journal,
    volume: &VolumeId,
    server_limit: Duration,
    deadline: Deadline,
) -> Option<Recovered> {
    let failed = |condition, seen, error| Recovered::failed(volume.clone(), condition, seen, error);
    let guard = match journal.guard(volume, None, deadline) {
        Ok(guard) => guard,
        Err(error) => {
            let seen = "another thread works on it".to_owned();
            let record = journal.record(volume)?;
            return Some(failed(condition_by_intent(&record), seen, error));
        }
    };
    let record = guard.record()?;
    let seen = match observe(engine, &guard, &record, deadline) {
        Ok(seen) => seen,
        Err(error) => {
            let seen = "it could not be looked for".to_owned();
            return Some(failed(condition_by_intent(&record), seen, error));
        }
    };
    let condition = seen.condition(&record);
    let (condition, action) = match finish_or_undo(
        engine,
        &guard,
        &record,
        &seen,
        condition,
        server_limit,
        deadline,
    ) {
        Ok(done) => done,
        Err(error) => (condition, Action::Failed(error)),
    };
    if condition == Condition::Complete
        && let Err(error) = record_content(engine, &guard, deadline)
    {
        tracing::warn!(%error, "cannot record its content names");
    }
    tracing::info!(?condition, ?action, %seen, "recovered");
    let outcome = guard.record().and_then(|record| record.outcome);
    let attached =
        condition == Condition::Complete || !matches!(action, Action::Nothing | Action::Failed(_));
    Some(Recovered {
        volume: volume.clone(),
        condition,
        seen: seen.to_string(),
        action,
        node: outcome.filter(|_| attached).map(|outcome| outcome.node),
    })
}

fn finish_or_undo(
    engine: &Engine,
    guard: &Arc<VolumeGuard>,
    record: &Record,
    seen: &Observed,
    condition: Condition,
    server_limit: Duration,
    deadline: Deadline,
) -> Result<(Condition, Action)> {
    let operation = record.operation();
    let is_there = !matches!(seen, Observed::Nothing);
    let without_intent = || Record {
        intent: None,
        ..record.clone()
    };
    let action = match operation {
        None => return heal_attached(engine, record, seen, condition, server_limit, deadline),
        Some(Operation::Detach { abandon_unwritten }) => {
            let how = DetachVolume {
                abandon: abandon_unwritten,
                ..DetachVolume::default()
            };
            if !abandon_unwritten {
                wait_for_probe_of(engine, record, deadline)?;
            }
            // A refused detach leaves it attached, and no later recovery may detach it.
            detach_guarded(engine, guard, without_intent(), &how, deadline)?;
            Action::Finished
        }
        Some(Operation::Attach) if is_there => {
            let (_, healed) =
                heal_attached(engine, record, seen, condition, server_limit, deadline)?;
            if matches!(healed, Action::Failed(_)) {
                return Ok((Condition::LinkDead, healed));
            }
            let request = record.spec.request()?;
            let before = Some(record.clone());
            attach_guarded(engine, guard, before, record.clone(), &request, deadline)?;
            Action::Finished
        }
        Some(Operation::Resize { at_least }) if matches!(seen, Observed::Answers { .. }) => {
            if record.spec.nbd.is_some() {
                let (_, healed) =
                    heal_attached(engine, record, seen, condition, server_limit, deadline)?;
                if matches!(healed, Action::Failed(_)) {
                    return Ok((Condition::LinkDead, healed));
                }
            }
            match resize_guarded(engine, guard, record.clone(), at_least, deadline) {
                Ok(_) => Action::Finished,
                Err(error) if serves_its_size(&error) && has_no_intent(guard) => {
                    tracing::warn!(%error, volume = %record.volume, "the resize is undone");
                    Action::Undone
                }
                Err(error) => return Err(error),
            }
        }
        // Its paths come back, and the resize stays begun until then.
        Some(Operation::Resize { .. }) if condition == Condition::LinkDead => Action::Nothing,
        Some(Operation::Attach) if record.outcome.is_none() => {
            let how = DetachVolume::default();
            detach_guarded(engine, guard, record.clone(), &how, deadline)?;
            // No caller got the device.
            guard.restore_record(deadline.for_rollback())?;
            Action::Undone
        }
        Some(Operation::Attach | Operation::Resize { .. }) => {
            guard.write(without_intent(), deadline)?;
            Action::Nothing
        }
    };
    Ok((condition, action))
}

/// Heals an attached NBD device if its server does not answer. Makes the kernel read the
/// size again of a SCSI path that it takes for empty.
fn heal_attached(
    engine: &Engine,
    record: &Record,
    seen: &Observed,
    condition: Condition,
    server_limit: Duration,
    deadline: Deadline,
) -> Result<(Condition, Action)> {
    if let Observed::Answers { without_size, .. } = seen
        && !without_size.is_empty()
    {
        return Ok(match reread_sizes(engine, without_size, deadline) {
            Ok(()) => (condition, Action::Healed),
            Err(error) => (Condition::LinkDead, Action::Failed(error)),
        });
    }
    let source = record.spec.sources.first();
    let is_there = matches!(condition, Condition::Complete | Condition::HalfAttached);
    let Some(source @ Source::Nbd(_)) = source.filter(|_| is_there) else {
        return Ok((condition, Action::Nothing));
    };
    let limit = deadline.at_most(server_limit);
    let healing = engine.heal_source(source, &record.nbd_options(), limit)?;
    Ok(observe::after_healing(condition, healing))
}

fn reread_sizes(engine: &Engine, paths: &[ScsiDevice], deadline: Deadline) -> Result<()> {
    for device in paths {
        if !scsi::reread_size(device, &engine.scheduler, deadline)? {
            let hctl = device.hctl();
            let message = format!("the kernel still shows {hctl} without a size after a rescan");
            return Err(Error::new(ErrorKind::NotReady, message).at(Stage::Rescan));
        }
    }
    Ok(())
}

/// A server that is back answers within this time; the healer waits for other servers.
const SERVER_LIMIT: Duration = Duration::from_secs(5);

/// How long one of `count` volumes may wait for its server. If there are more volumes than
/// threads, the time is shorter, so that some is left for the last ones.
fn server_limit(count: usize, deadline: Deadline) -> Duration {
    let rounds = u32::try_from(count.div_ceil(pool::MAX_THREADS)).unwrap_or(u32::MAX);
    SERVER_LIMIT.min(deadline.remaining() / rounds.saturating_mul(2).max(1))
}

/// The condition of a volume that could not be looked for.
fn condition_by_intent(record: &Record) -> Condition {
    match record.operation() {
        Some(Operation::Detach { .. }) => Condition::HalfDetached,
        Some(_) => Condition::HalfAttached,
        None => Condition::LinkDead,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_without_servers_leave_time_for_the_later_volumes() {
        let limit = Duration::from_secs(60);
        let deadline = Deadline::after(limit);
        assert_eq!(server_limit(1, deadline), SERVER_LIMIT);
        let many = 1000;
        let rounds = u32::try_from(many / pool::MAX_THREADS + 1).unwrap();
        assert!(server_limit(many, deadline) * rounds <= limit / 2);
    }
}
