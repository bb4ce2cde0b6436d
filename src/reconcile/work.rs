//! The worker threads: each does one step of one volume after another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::job::{Job, NotServing, Outcome};
use super::reconciler::Reconciler;
use super::step::StepKind;
use crate::deadline::Deadline;
use crate::engine::{
    Action, Condition, DetachVolume, HealOutcome, ReconnectHandle, Recovered, StageObserver,
    VolumeStatus,
};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::VolumeId;

impl Reconciler {
    /// Does steps until the run ends.
    pub(super) fn work(&self, until: Option<Deadline>) {
        while let Some(mut job) = self.next_job() {
            let limit = until.map_or(Duration::MAX, |deadline| deadline.remaining());
            let limit = Deadline::after(limit.min(self.options.step_limit));
            let outcome = self.perform(&mut job, limit);
            let outcome = outcome.unwrap_or_else(Outcome::Failed);
            let mut state = self.shared.state();
            let events = state.end_step(job, outcome);
            let must_wake = state.schedule.needs_plan()
                || state.schedule.is_idle()
                || state.refresh.is_wanted();
            self.shared.send(state, events);
            self.shared.changed.notify_all();
            if must_wake {
                self.shared.wake.notify_all();
            }
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut state = self.shared.state();
        loop {
            let workers = &mut state.schedule.workers;
            if workers.release_thread(Instant::now()) || state.run.must_threads_end() {
                return None;
            }
            if let Some(job) = state.take_job() {
                return Some(job);
            }
            self.shared.work.wait(&mut state);
        }
    }

    #[tracing::instrument(skip_all, fields(volume = %job.step.volume, step = %job.step.kind))]
    fn perform(&self, job: &mut Job, deadline: Deadline) -> Result<Outcome> {
        let volume = &job.step.volume;
        tracing::debug!(reason = %job.step.reason, "begins a step");
        match job.step.kind {
            StepKind::Attach => self.attach(volume, deadline),
            StepKind::Resize => self.resize(volume, deadline),
            StepKind::Detach => self.detach(job, deadline),
            StepKind::Heal => Ok(self.heal(job, deadline)),
            StepKind::Verify if self.is_nbd(volume) => Ok(self.heal(job, deadline)),
            StepKind::Finish | StepKind::Verify => {
                let recovered = self.engine.recover_volume(&self.journal, volume, deadline);
                Ok(match job.step.kind {
                    StepKind::Finish => self.finished(volume, recovered),
                    _ => self.verified(volume, recovered),
                })
            }
            StepKind::Wait | StepKind::Refused => Ok(Outcome::Unknown),
        }
    }

    fn attach(&self, volume: &VolumeId, deadline: Deadline) -> Result<Outcome> {
        let wanted = self.shared.state().desired().get(volume).cloned();
        let Some(spec) = wanted else {
            return Ok(Outcome::Unknown);
        };
        let request = spec.request()?.observe(self.observer(volume));
        let attachment = self
            .engine
            .attach_volume(&self.journal, volume, &request, deadline)?;
        let status = VolumeStatus::attached(volume.clone(), spec, &attachment);
        Ok(Outcome::Attached(Box::new(status)))
    }

    fn detach(&self, job: &mut Job, deadline: Deadline) -> Result<Outcome> {
        let volume = &job.step.volume;
        if job.is_failing {
            // Unwritten data needs a server.
            self.try_reconnect(volume, &mut job.reconnect_handle, deadline);
        }
        let how = DetachVolume::default().observe(self.observer(volume));
        match self
            .engine
            .detach_volume(&self.journal, volume, &how, deadline)
        {
            Ok(detachment) => Ok(Outcome::Detached {
                safe_to_unmap: detachment.safe_to_unmap,
            }),
            Err(_) if self.journal.record(volume).is_none() => Ok(self.detached(volume)),
            Err(failure) => Err(failure.into()),
        }
    }

    fn resize(&self, volume: &VolumeId, deadline: Deadline) -> Result<Outcome> {
        let min_size = self.shared.state().desired().min_size(volume);
        let resized = self
            .engine
            .resize_volume(&self.journal, volume, min_size, deadline)?;
        Ok(Outcome::Resized {
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
    fn try_reconnect(
        &self,
        volume: &VolumeId,
        reconnect_handle: &mut Option<Box<ReconnectHandle>>,
        deadline: Deadline,
    ) {
        const LIMIT: Duration = Duration::from_secs(10);
        if reconnect_handle.is_none() {
            *reconnect_handle = self.reconnect_handle(volume).ok().map(Box::new);
        }
        if let Some(reconnect_handle) = reconnect_handle {
            let report = reconnect_handle.proceed(&self.engine, deadline.at_most(LIMIT));
            tracing::debug!(?report, "tried to reconnect before a detach");
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

    fn heal(&self, job: &mut Job, deadline: Deadline) -> Outcome {
        const SHORTEST: Duration = Duration::from_secs(2);
        const LONGEST: Duration = Duration::from_secs(30);
        let handle = job.reconnect_handle.take();
        let handle =
            handle.map_or_else(|| self.reconnect_handle(&job.step.volume).map(Box::new), Ok);
        let mut handle = match handle {
            Ok(handle) => handle,
            Err(error) => return Outcome::NotServing(NotServing::because(error)),
        };
        // A server that answers late is given more time the next time.
        let limit = SHORTEST.saturating_mul(1 << job.tries.min(4)).min(LONGEST);
        let report = handle.proceed(&self.engine, deadline.at_most(limit));
        let device = report.index.name();
        let unhealed = |kind, what: &HealOutcome| {
            let message = format!("{device} is not reconnected: {what}");
            Error::new(kind, message).at(Stage::Reconfigure)
        };
        let error = match report.outcome {
            HealOutcome::Adopted(differences) => return Outcome::Adopted(differences),
            HealOutcome::Failed(error) | HealOutcome::Degraded(error) => error,
            outcome if outcome.serves() => return Outcome::Serves,
            outcome @ HealOutcome::GeometryChanged(_) => {
                unhealed(ErrorKind::IdentityMismatch, &outcome)
            }
            outcome => unhealed(ErrorKind::Unreachable, &outcome),
        };
        Outcome::NotServing(NotServing {
            error,
            budget_left: report.budget_left,
            reconnect_handle: Some(handle),
        })
    }

    /// The outcome for a volume of which the journal has no record, or the record of a detach.
    fn detached(&self, volume: &VolumeId) -> Outcome {
        let detached = self.journal.detached_as(volume);
        Outcome::Detached {
            safe_to_unmap: detached.is_some_and(|detached| detached.safe_to_unmap),
        }
    }

    /// The outcome of finishing an operation that was begun.
    fn finished(&self, volume: &VolumeId, recovered: Option<Recovered>) -> Outcome {
        match recovered.map(|recovered| recovered.action) {
            Some(Action::Failed(error)) => Outcome::Failed(error),
            _ if self.journal.record(volume).is_none() => self.detached(volume),
            _ => Outcome::Unknown,
        }
    }

    /// The outcome of asking a SCSI unit for its identity.
    fn verified(&self, volume: &VolumeId, recovered: Option<Recovered>) -> Outcome {
        let Some(recovered) = recovered else {
            return self.finished(volume, None);
        };
        match (recovered.action, recovered.condition) {
            (Action::Failed(error), _) => Outcome::Failed(error),
            (_, Condition::Complete) => Outcome::Serves,
            (_, Condition::LinkDead) => {
                let error = Error::new(ErrorKind::NotReady, recovered.seen).at(Stage::Identify);
                Outcome::NotServing(NotServing::because(error))
            }
            (_, condition) => Outcome::Differs(condition, recovered.seen),
        }
    }
}
