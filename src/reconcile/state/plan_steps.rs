//! Makes plans, and hands their steps to the workers.

use std::sync::Arc;
use std::time::Instant;

use super::State;
use crate::error::{Error, ErrorKind};
use crate::reconcile::event::Event;
use crate::reconcile::failure::Failure;
use crate::reconcile::job::{Endpoint, Job, Priority};
use crate::reconcile::step::{Step, StepKind, step_for};
use crate::reconcile::tracked::Activity;

impl State {
    /// Makes a new plan, and queues the steps that can begin now.
    pub(in crate::reconcile) fn plan_and_queue(&mut self) -> Vec<Event> {
        let now = Instant::now();
        self.counters.plans += 1;
        self.drop_queued_steps();
        self.drop_needless_resize_failures();
        self.refresh_due_paths(now);
        let (mut events, mut jobs) = (Vec::new(), Vec::new());
        for step in self.plan().steps {
            if self.is_busy(&step.volume) {
                continue;
            }
            if step.kind == StepKind::Refused {
                events.extend(self.report_refusal(&step));
            } else if step.kind.acts() && step.after.is_empty() {
                jobs.extend(self.job_of(step, now));
            }
        }
        self.schedule.queue(jobs);
        events
    }

    /// Drops the steps that wait for a worker: a new plan will have those that still suit.
    pub(super) fn drop_queued_steps(&mut self) {
        self.schedule.clear();
        for tracked in self.tracked.values_mut() {
            if matches!(tracked.activity, Activity::Queued) {
                tracked.activity = Activity::Idle;
            }
        }
    }

    /// Refreshes the volumes whose missing paths are due for a retry.
    fn refresh_due_paths(&mut self, now: Instant) {
        if self.run.tries_once() {
            return;
        }
        for (volume, tracked) in &self.tracked {
            match &tracked.path_retry {
                Some(path_retry) if path_retry.at > now => {
                    self.schedule.require_plan_at(path_retry.at);
                }
                Some(_) if !tracked.is_busy() => self.refresh.request(volume),
                _ => {}
            }
        }
    }

    /// Drops the failure of a resize that is no longer the next step: a volume that is too
    /// small delays only its resize.
    fn drop_needless_resize_failures(&mut self) {
        for (volume, tracked) in &mut self.tracked {
            let failure = tracked.failure.as_ref();
            if tracked.is_busy() || !failure.is_some_and(|failed| failed.is_of(StepKind::Resize)) {
                continue;
            }
            let (wanted, status) = (self.desired.wanted(volume), self.actual.get(volume));
            let step = step_for(volume, wanted, status);
            if step.is_none_or(|step| step.kind != StepKind::Resize) {
                tracked.failure = None;
                self.publisher.change();
            }
        }
    }

    /// The event for a step that is refused, once for each reason.
    fn report_refusal(&mut self, step: &Step) -> Option<Event> {
        let tracked = self.tracked.entry(step.volume.clone()).or_default();
        if tracked.refused_reason.as_deref() == Some(&*step.reason) {
            return None;
        }
        tracked.refused_reason = Some(step.reason.clone().into_owned());
        Some(Event::Failed {
            volume: step.volume.clone(),
            step: step.kind,
            error: Arc::new(Error::new(ErrorKind::InUse, step.to_string())),
            next_try: None,
        })
    }

    /// The job of a step, unless the failure of an earlier one delays it.
    fn job_of(&mut self, step: Step, now: Instant) -> Option<Job> {
        let wanted = self.desired.get(&step.volume);
        let tracked = self.tracked.entry(step.volume.clone()).or_default();
        let failure = tracked.failure.as_ref();
        if let Some(failure) = failure {
            if failure.was_tried_in(&self.run) {
                return None;
            }
            if failure.delays(step.kind, now) {
                if let Some(next_try) = failure.next_try() {
                    self.schedule.require_plan_at(next_try);
                }
                return None;
            }
        }
        let detaches = step.kind == StepKind::Detach || wanted.is_none();
        let priority = match failure {
            None if detaches => Priority::Detach,
            Some(_) if detaches => Priority::DetachRetry,
            None => Priority::FirstTry,
            Some(failure) if failure.is_unblocked() => Priority::Unblocked,
            Some(_) => Priority::Retry,
        };
        let spec = wanted.or_else(|| Some(&self.actual.get(&step.volume)?.spec));
        let source = spec.and_then(|spec| spec.sources.first());
        let may_hang = priority == Priority::Retry || step.kind == StepKind::Heal;
        let endpoint = source
            .filter(|_| !detaches)
            .map(|source| Endpoint::of(source, may_hang));
        tracked.activity = Activity::Queued;
        Some(Job {
            step,
            began: now,
            priority,
            due: failure.and_then(Failure::next_try),
            endpoint,
            is_failing: failure.is_some() || tracked.loss_was_reported,
            tries: failure.map_or(0, Failure::tries),
            reconnect_handle: None,
        })
    }

    /// Takes the next step for which a worker is free.
    pub(in crate::reconcile) fn take_job(&mut self) -> Option<Job> {
        let mut job = self.schedule.take_job()?;
        let tracked = self.tracked.entry(job.step.volume.clone()).or_default();
        job.reconnect_handle = tracked.reconnect_handle.take();
        tracked.activity = Activity::Running(job.step.kind, None);
        if job.step.kind == StepKind::Attach {
            tracked.link_died_at = None;
        }
        Some(job)
    }
}

#[cfg(test)]
mod tests;
