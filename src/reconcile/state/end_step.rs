//! Records the outcomes of steps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::State;
use super::changes::MAY_HAVE_DIED;
use crate::engine::{Condition, VolumeStatus};
use crate::error::{Error, ErrorKind};
use crate::id::VolumeId;
use crate::nbd::Difference;
use crate::reconcile::event::Event;
use crate::reconcile::failure::Failure;
use crate::reconcile::job::{Job, NotServing, Outcome};
use crate::reconcile::step::StepKind;
use crate::reconcile::tracked::{Activity, PathRetry};

impl State {
    /// Records the end of a step, and returns the events to report.
    pub(in crate::reconcile) fn end_step(&mut self, job: Job, outcome: Outcome) -> Vec<Event> {
        let (volume, kind) = (job.step.volume.clone(), job.step.kind);
        let has_failed = matches!(outcome, Outcome::Failed(_) | Outcome::NotServing(_));
        self.note_end(&volume, kind, has_failed);
        let events = self.record_outcome(job, outcome);
        let has_next = self.step(&volume).is_some();
        // Another volume may have waited for it.
        let frees = matches!(kind, StepKind::Detach | StepKind::Finish);
        if has_next || frees || has_failed {
            self.schedule.require_plan();
        }
        events
    }

    fn note_end(&mut self, volume: &VolumeId, kind: StepKind, has_failed: bool) {
        self.schedule.workers.end(volume);
        self.counters.steps += 1;
        let tracked = self.tracked.entry(volume.clone()).or_default();
        (tracked.activity, tracked.last_ended_step) = (Activity::Idle, self.counters.steps);
        if std::mem::take(&mut tracked.needs_refresh) {
            self.refresh.request(volume);
        }
        if !has_failed {
            if tracked.failure.take().is_some() {
                self.publisher.change();
            }
        } else if kind != StepKind::Resize {
            // The failure has its own time for a retry.
            tracked.path_retry = None;
        }
        let wanted = self.desired.get(volume);
        if wanted.is_some_and(|spec| spec.log_in.is_some()) {
            // A session that this step made and kept counts for the other volumes from now
            // on.
            self.transports.change();
        }
    }

    fn record_outcome(&mut self, job: Job, outcome: Outcome) -> Vec<Event> {
        let (volume, kind) = (job.step.volume, job.step.kind);
        let event = match outcome {
            Outcome::Attached(status) => {
                let attached = self.record_attached(*status);
                let certificate = self.certificate_event(&volume);
                return attached.into_iter().chain(certificate).collect();
            }
            Outcome::Detached { safe_to_unmap } => {
                self.remove_status(&volume);
                Some(Event::Detached {
                    volume,
                    safe_to_unmap,
                })
            }
            Outcome::Serves => self.record_serving(&volume, job.began),
            Outcome::Adopted(differences) => {
                let healed = self.record_serving(&volume, job.began);
                let content = differences.into_iter();
                let content = content.filter_map(|one| content_event(&volume, one));
                return healed.into_iter().chain(content).collect();
            }
            Outcome::Resized { old_size, size } => {
                if let Some(status) = self.actual.volumes.get_mut(&volume) {
                    status.size = Some(size);
                }
                Some(Event::Resized {
                    volume,
                    old_size,
                    size,
                })
            }
            Outcome::Unknown => {
                self.refresh.request(&volume);
                None
            }
            Outcome::Differs(condition, seen) => self.record_difference(&volume, condition, seen),
            Outcome::NotServing(not_serving) => {
                Some(self.record_not_serving(&volume, kind, not_serving))
            }
            Outcome::Failed(error) => {
                self.refresh.request(&volume);
                let tracked = self.tracked.entry(volume.clone()).or_default();
                tracked.reconnect_handle = job.reconnect_handle;
                let (error, next_try) = self.record_failure(&volume, kind, error);
                Some(Event::Failed {
                    volume,
                    step: kind,
                    error,
                    next_try,
                })
            }
        };
        event.into_iter().collect()
    }

    /// Records an attached volume.
    fn record_attached(&mut self, status: VolumeStatus) -> Option<Event> {
        let volume = status.volume.clone();
        let tracked = self.tracked.entry(volume.clone()).or_default();
        (
            tracked.loss_was_reported,
            tracked.reconnect_handle,
            tracked.verified_condition,
        ) = (false, None, None);
        let last_retry = tracked.path_retry.take();
        if !status.missing.is_empty() {
            let first = || PathRetry::after(self.options.retry_pauses());
            tracked.path_retry = Some(last_retry.map_or_else(first, PathRetry::next));
        }
        let has_died = tracked.link_died_at.is_some();
        let event = attach_event(self.actual.get(&volume), &status);
        self.set_status(status);
        if has_died {
            let lost = self.mark_link_dead(&volume);
            return event.or(lost);
        }
        event
    }

    /// Records that the device answered. A link that died since `began` may have died
    /// after the answer, and the kernel reports a death only once: the device is asked
    /// again.
    fn record_serving(&mut self, volume: &VolumeId, began: Instant) -> Option<Event> {
        let tracked = self.tracked.entry(volume.clone()).or_default();
        let died_since = tracked.link_died_at.is_some_and(|died| died >= began);
        (
            tracked.link_died_at,
            tracked.reconnect_handle,
            tracked.verified_condition,
        ) = (None, None, None);
        let was_lost = std::mem::take(&mut tracked.loss_was_reported);
        let status = self.actual.volumes.get_mut(volume)?;
        status.condition = Condition::Complete;
        status.verify_reason = died_since.then(|| MAY_HAVE_DIED.to_owned());
        "it answers".clone_into(&mut status.seen);
        // A reconnect may have met another certificate.
        if status.tls.is_some() {
            self.refresh.request(volume);
        }
        was_lost.then(|| Event::Healed {
            volume: volume.clone(),
        })
    }

    /// Records that the device answered and differs from sysfs, which keeps the data of
    /// the kernel's scan and is no longer trusted.
    fn record_difference(
        &mut self,
        volume: &VolumeId,
        condition: Condition,
        seen: String,
    ) -> Option<Event> {
        let tracked = self.tracked.entry(volume.clone()).or_default();
        tracked.verified_condition = Some((condition, seen.clone()));
        let status = self.actual.volumes.get_mut(volume)?;
        (status.condition, status.seen, status.verify_reason) = (condition, seen.clone(), None);
        tracked.mark_lost().then(|| Event::Lost {
            volume: volume.clone(),
            why: seen,
            budget_left: None,
        })
    }

    /// Records that a volume does not serve I/O.
    fn record_not_serving(
        &mut self,
        volume: &VolumeId,
        kind: StepKind,
        not_serving: NotServing,
    ) -> Event {
        let NotServing { error, .. } = not_serving;
        let is_gone = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Vanished);
        if is_gone {
            self.refresh.request(volume);
        }
        let why = error.to_string();
        if let Some(status) = self.actual.volumes.get_mut(volume) {
            (status.condition, status.seen) = (Condition::LinkDead, why.clone());
        }
        self.record_failure(volume, kind, error);
        let tracked = self.tracked.entry(volume.clone()).or_default();
        tracked.reconnect_handle = not_serving.reconnect_handle.filter(|_| !is_gone);
        tracked.loss_was_reported = true;
        Event::Lost {
            volume: volume.clone(),
            why,
            budget_left: not_serving.budget_left,
        }
    }

    /// Returns the error, and the pause before the next attempt.
    fn record_failure(
        &mut self,
        volume: &VolumeId,
        kind: StepKind,
        error: Error,
    ) -> (Arc<Error>, Option<Duration>) {
        self.counters.failures += 1;
        self.publisher.change();
        let tracked = self.tracked.entry(volume.clone()).or_default();
        let before = tracked.failure.take();
        let (failure, pause) = Failure::after(before, kind, error, &self.run, &self.options);
        let failure = tracked.failure.insert(failure);
        (Arc::clone(failure.error()), pause)
    }
}

/// The event for an attached volume, unless nothing of it has changed.
fn attach_event(before: Option<&VolumeStatus>, status: &VolumeStatus) -> Option<Event> {
    let volume = status.volume.clone();
    let node = status.node.clone().unwrap_or_default();
    let Some(before) = before.filter(|before| before.node.is_some()) else {
        let size = status.size.unwrap_or_default();
        return Some(Event::Attached { volume, node, size });
    };
    let is_same = before.node == status.node
        && before.paths == status.paths
        && before.condition == Condition::Complete;
    (!is_same).then(|| Event::Changed {
        volume,
        node,
        paths: status.paths.len(),
        missing: status.missing.iter().map(ToString::to_string).collect(),
    })
}

/// The event of a heal's difference, if it concerns the content.
fn content_event(volume: &VolumeId, difference: Difference) -> Option<Event> {
    let Difference::Content { from, to, .. } = difference else {
        return None;
    };
    let volume = volume.clone();
    Some(Event::ContentDiffers { volume, from, to })
}

#[cfg(test)]
mod tests;
