//! One step of one volume.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::job::{Done, Job};
use super::plan::StepKind;
use super::reconciler::Reconciler;
use super::state::RunState;
use crate::deadline::Deadline;
use crate::engine::{
    Action, Condition, DetachVolume, HealOutcome, ReconnectHandle, Recovered, StageObserver,
    VolumeStatus,
};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::VolumeId;

impl Reconciler {
    /// Does steps until the loop ends.
    pub(super) fn work(&self, until: Option<Deadline>) {
        while let Some(mut job) = self.next_job() {
            let limit = until.map_or(Duration::MAX, |deadline| deadline.remaining());
            let limit = Deadline::after(limit.min(self.options.step_limit));
            let done = self.perform(&mut job, limit).unwrap_or_else(Done::Failed);
            let mut state = self.shared.state();
            let events = state.settle(&mut job, done, &self.options);
            let more = state.replan || state.is_idle() || state.refresh.due().is_some();
            self.shared.tell(state, events);
            self.shared.changed.notify_all();
            if more {
                self.shared.wake.notify_all();
            }
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut state = self.shared.state();
        loop {
            let threads = self.options.threads.get();
            let too_many = state.workers.let_one_go(threads, Instant::now());
            if state.driver == RunState::Ended || too_many {
                return None;
            }
            if let Some(job) = state.take_job(threads) {
                return Some(job);
            }
            if state.replan {
                self.shared.wake.notify_all();
            }
            self.shared.work.wait(&mut state);
        }
    }

    #[tracing::instrument(skip_all, fields(volume = %job.step.volume, step = %job.step.kind))]
    fn perform(&self, job: &mut Job, deadline: Deadline) -> Result<Done> {
        let volume = &job.step.volume;
        tracing::debug!(reason = %job.step.reason, "a step");
        match job.step.kind {
            StepKind::Attach => self.attach(volume, deadline),
            StepKind::Resize => self.resize(volume, deadline),
            StepKind::Detach => self.detach(job, deadline),
            StepKind::Finish => {
                let finished = self.engine.recover_volume(&self.journal, volume, deadline);
                Ok(self.finished(volume, finished))
            }
            StepKind::Prove if self.is_nbd(volume) => Ok(self.heal(job, deadline)),
            StepKind::Prove => {
                let asked = self.engine.recover_volume(&self.journal, volume, deadline);
                Ok(self.proven(volume, asked))
            }
            StepKind::Heal => Ok(self.heal(job, deadline)),
            StepKind::Wait | StepKind::Refused => Ok(Done::Finished),
        }
    }

    fn attach(&self, volume: &VolumeId, deadline: Deadline) -> Result<Done> {
        let wanted = self.shared.state().desired.get(volume).cloned();
        let Some(spec) = wanted else {
            return Ok(Done::Finished);
        };
        let request = spec.request()?.observe(self.observer(volume));
        let attachment = self
            .engine
            .attach_volume(&self.journal, volume, &request, deadline)?;
        let there = VolumeStatus::attached(volume.clone(), spec, &attachment);
        Ok(Done::Stands(Box::new(there)))
    }

    fn detach(&self, job: &mut Job, deadline: Deadline) -> Result<Done> {
        let volume = &job.step.volume;
        if job.is_failing {
            // Unwritten data needs a server.
            self.revive(volume, &mut job.reconnect_handle, deadline);
        }
        let how = DetachVolume::default().observe(self.observer(volume));
        match self
            .engine
            .detach_volume(&self.journal, volume, &how, deadline)
        {
            Ok(detachment) => Ok(Done::Gone {
                safe_to_unmap: detachment.safe_to_unmap,
            }),
            Err(_) if self.journal.record(volume).is_none() => Ok(self.gone(volume)),
            Err(failure) => Err(failure.into()),
        }
    }

    fn resize(&self, volume: &VolumeId, deadline: Deadline) -> Result<Done> {
        let min_size = self.shared.state().desired.min_size(volume);
        let resized = self
            .engine
            .resize_volume(&self.journal, volume, min_size, deadline)?;
        Ok(Done::Resized {
            old_size: resized.old_size,
            size: resized.size,
        })
    }

    /// Records the stages of a volume's call.
    fn observer(&self, volume: &VolumeId) -> StageObserver {
        let (shared, volume) = (Arc::clone(&self.shared), volume.clone());
        StageObserver::new(move |stage| shared.state().record_stage(&volume, stage))
    }

    /// Reconnects an NBD device to its server, if that is there at once.
    fn revive(
        &self,
        volume: &VolumeId,
        reconnect_handle: &mut Option<Box<ReconnectHandle>>,
        deadline: Deadline,
    ) {
        const TURN: Duration = Duration::from_secs(10);
        let turn = deadline.at_most(TURN);
        if reconnect_handle.is_none() {
            *reconnect_handle = self.reconnect_handle(volume).ok().map(Box::new);
        }
        if let Some(reconnect_handle) = reconnect_handle {
            let healing = reconnect_handle.proceed(&self.engine, turn);
            tracing::debug!(?healing, "before a detach");
        }
    }

    fn is_nbd(&self, volume: &VolumeId) -> bool {
        let record = self.journal.record(volume);
        record.is_some_and(|record| record.spec.nbd.is_some())
    }

    fn reconnect_handle(&self, volume: &VolumeId) -> Result<ReconnectHandle> {
        let gone = || {
            let message = format!("the journal has no volume {volume}");
            Error::new(ErrorKind::NotFound, message).at(Stage::Resolve)
        };
        let record = self.journal.record(volume).ok_or_else(gone)?;
        self.engine.reconnect_handle_of(&record)
    }

    fn heal(&self, job: &mut Job, deadline: Deadline) -> Done {
        const SHORTEST: Duration = Duration::from_secs(2);
        const LONGEST: Duration = Duration::from_secs(30);
        let reconnect_handle = job.reconnect_handle.take();
        let reconnect_handle = reconnect_handle
            .map_or_else(|| self.reconnect_handle(&job.step.volume).map(Box::new), Ok);
        let mut reconnect_handle = match reconnect_handle {
            Ok(reconnect_handle) => reconnect_handle,
            Err(error) => {
                return Done::Disconnected {
                    reconnect_handle: None,
                    error,
                    budget_left: None,
                };
            }
        };
        // A server that answers late is given more time the next time.
        let turn = SHORTEST.saturating_mul(1 << job.tries.min(4)).min(LONGEST);
        let turn = deadline.at_most(turn);
        let healing = reconnect_handle.proceed(&self.engine, turn);
        let lacks_a_connection = matches!(healing.outcome, HealOutcome::Degraded(_));
        if let HealOutcome::Adopted(differences) = healing.outcome {
            return Done::Adopted(differences);
        }
        if healing.outcome.serves() && !lacks_a_connection {
            return Done::Serves;
        }
        let device = healing.index.name();
        let unhealed = |kind, what: String| {
            let message = format!("{device} has no server: {what}");
            Error::new(kind, message).at(Stage::Reconfigure)
        };
        let error = match healing.outcome {
            HealOutcome::Failed(error) | HealOutcome::Degraded(error) => error,
            HealOutcome::GeometryChanged(differences) => {
                let told: Vec<String> = differences.iter().map(ToString::to_string).collect();
                let what = format!("the export has changed: {}", told.join("; "));
                unhealed(ErrorKind::IdentityMismatch, what)
            }
            outcome => unhealed(ErrorKind::Unreachable, format!("{outcome:?}")),
        };
        Done::Disconnected {
            reconnect_handle: Some(reconnect_handle),
            error,
            budget_left: healing.budget_left,
        }
    }

    /// The result for a volume of which the journal has no record, or the record of a detach.
    fn gone(&self, volume: &VolumeId) -> Done {
        let detached = self.journal.detached_as(volume);
        Done::Gone {
            safe_to_unmap: detached.is_some_and(|detached| detached.safe_to_unmap),
        }
    }

    fn finished(&self, volume: &VolumeId, recovered: Option<Recovered>) -> Done {
        match recovered.map(|recovered| recovered.action) {
            Some(Action::Failed(error)) => Done::Failed(error),
            _ if self.journal.record(volume).is_none() => self.gone(volume),
            _ => Done::Finished,
        }
    }

    fn proven(&self, volume: &VolumeId, asked: Option<Recovered>) -> Done {
        let Some(asked) = asked else {
            return self.finished(volume, None);
        };
        match (asked.action, asked.condition) {
            (Action::Failed(error), _) => Done::Failed(error),
            (_, Condition::Complete) => Done::Serves,
            (_, Condition::LinkDead) => {
                let error = Error::new(ErrorKind::NotReady, asked.seen).at(Stage::Identify);
                Done::Disconnected {
                    reconnect_handle: None,
                    error,
                    budget_left: None,
                }
            }
            (_, condition) => Done::Differs(condition, asked.seen),
        }
    }
}
