//! The steps on their way from the plan to a worker and back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::event::Event;
use super::job::{Done, Job, Place, Priority, place_of};
use super::options::Options;
use super::plan::{StepKind, step_for};
use super::state::{MAY_HAVE_DIED, State, sooner};
use super::tracked::{Failure, PathRetry};
use crate::deadline::{Backoff, jittered};
use crate::engine::{Condition, ReconnectHandle, VolumeStatus};
use crate::error::{Error, ErrorKind, Retry};
use crate::id::VolumeId;
use crate::nbd::Difference;

/// Whether a failure of one step is a failure of the other: both ask an NBD server.
fn is_one(one: StepKind, other: StepKind) -> bool {
    let asks = |kind| matches!(kind, StepKind::Heal | StepKind::Prove);
    one == other || asks(one) && asks(other)
}

impl State {
    /// Makes a new plan and queues the steps that can start now.
    pub(super) fn plan_now(&mut self) -> Vec<Event> {
        let now = Instant::now();
        let mut events = Vec::new();
        self.counters.plans += 1;
        (self.replan, self.retry_at) = (false, None);
        for job in self.queues.waiting() {
            if let Some(tracked) = self.tracked.get_mut(&job.step.volume) {
                tracked.busy = false;
            }
        }
        let mut jobs = Vec::new();
        self.forget_sizes();
        self.look_for_due_paths(now);
        let run = self.runs();
        for step in self.plan().steps {
            let tracked = self.tracked.entry(step.volume.clone()).or_default();
            if tracked.busy {
                continue;
            }
            let refused = step.kind == StepKind::Refused;
            if refused && tracked.refused.as_deref() != Some(&*step.reason) {
                tracked.refused = Some(step.reason.clone().into_owned());
                let error = Error::new(ErrorKind::InUse, step.to_string());
                events.push(Event::Failed {
                    volume: step.volume.clone(),
                    step: step.kind,
                    error: Arc::new(error),
                    next_try: None,
                });
            }
            if !step.kind.acts() || !step.after.is_empty() {
                continue;
            }
            let wanted = self.desired.get(&step.volume);
            let detaches = step.kind == StepKind::Detach || wanted.is_none();
            let priority = match &tracked.failure {
                None if detaches => Priority::Detach,
                Some(_) if detaches => Priority::DetachAgain,
                None => Priority::Fresh,
                Some(failure) if failure.is_unblocked => Priority::Unblocked,
                Some(_) => Priority::Again,
            };
            let spec = wanted.or_else(|| Some(&self.actual.get(&step.volume)?.spec));
            let source = spec.and_then(|spec| spec.sources.first());
            let may_hang = priority == Priority::Again || step.kind == StepKind::Heal;
            let is_limited = !matches!(priority, Priority::Detach | Priority::DetachAgain);
            let place = source.filter(|_| is_limited).map(|source| Place {
                name: place_of(source),
                may_hang,
            });
            let mut tries = 0;
            if let Some(failure) = &tracked.failure {
                tries = failure.tries;
                if self.once && failure.run == run {
                    continue;
                }
                // After an error that no retry helps, other steps of the volume still run.
                let concerns_it =
                    failure.error.retry() != Retry::Never || is_one(failure.step, step.kind);
                let held = concerns_it && failure.next.is_none_or(|next| next > now);
                if held {
                    self.retry_at = sooner(self.retry_at, failure.next);
                    continue;
                }
            }
            tracked.busy = true;
            let job = Job {
                step,
                generation: self.generation,
                began: now,
                priority,
                due: tracked.failure.as_ref().and_then(|failure| failure.next),
                place,
                is_failing: tracked.failure.is_some() || tracked.lost,
                tries,
                reconnect_handle: None,
            };
            jobs.push(job);
        }
        self.queues.fill(jobs);
        events
    }

    /// Has the volumes looked at whose missing paths are due for a retry.
    fn look_for_due_paths(&mut self, now: Instant) {
        for (volume, tracked) in &self.tracked {
            let Some(path_retry) = tracked.path_retry.as_ref().filter(|_| !self.once) else {
                continue;
            };
            if path_retry.at > now {
                self.retry_at = sooner(self.retry_at, Some(path_retry.at));
            } else if !tracked.busy {
                self.refresh.some.insert(volume.clone());
                self.refresh.soon();
            }
        }
    }

    /// Drops the failure of a resize that is no longer the next step: a volume that is too
    /// small delays only its resize.
    fn forget_sizes(&mut self) {
        for (volume, tracked) in &mut self.tracked {
            let failed = tracked.failure.as_ref().map(|failure| failure.step);
            if failed != Some(StepKind::Resize) || tracked.busy {
                continue;
            }
            let (wanted, there) = (self.desired.wanted(volume), self.actual.get(volume));
            let step = step_for(volume, wanted, there);
            if step.is_none_or(|step| step.kind != StepKind::Resize) {
                tracked.failure = None;
                self.publisher.change();
            }
        }
    }

    /// Takes the next step for which a worker is free.
    pub(super) fn take_job(&mut self, threads: usize) -> Option<Job> {
        loop {
            let room = self.workers.room(threads, Instant::now());
            let mut job = self.queues.take(&room)?;
            let tracked = self.tracked.entry(job.step.volume.clone()).or_default();
            if job.generation != self.generation {
                // The wanted state may have changed since.
                tracked.busy = false;
                self.replan = true;
                continue;
            }
            job.reconnect_handle = tracked.reconnect_handle.take();
            (tracked.doing, tracked.stage) = (Some(job.step.kind), None);
            if job.step.kind == StepKind::Attach {
                tracked.died = None;
            }
            job.began = Instant::now();
            let (volume, place) = (job.step.volume.clone(), job.place.clone());
            self.workers.begin(volume, job.priority, place, job.began);
            return Some(job);
        }
    }

    pub(super) fn settle(&mut self, job: &mut Job, done: Done, options: &Options) -> Vec<Event> {
        let reconnect_handle = job.reconnect_handle.take();
        let volume = &job.step.volume;
        self.workers.end(volume);
        self.ended += 1;
        self.counters.steps += 1;
        let ended = self.ended;
        let tracked = self.tracked.entry(volume.clone()).or_default();
        (tracked.busy, tracked.ended, tracked.doing) = (false, ended, None);
        if std::mem::take(&mut tracked.dirty) {
            self.refresh.some.insert(volume.clone());
            self.refresh.soon();
        }
        let failed = matches!(done, Done::Failed(_) | Done::Disconnected { .. });
        if !failed {
            if tracked.failure.take().is_some() {
                self.publisher.change();
            }
        } else if job.step.kind != StepKind::Resize {
            // The failure has its own time for a retry.
            tracked.path_retry = None;
        }
        let mut events = Vec::new();
        let wanted = self.desired.get(volume);
        if wanted.is_some_and(|spec| spec.log_in.is_some()) {
            // A session that this step made and kept counts for the other volumes from now
            // on.
            self.transports.change();
        }
        match done {
            Done::Stands(there) => {
                events.extend(self.stands(*there, options));
                events.extend(self.certificate_event(volume));
            }
            Done::Gone { safe_to_unmap } => {
                self.forget(volume);
                events.push(Event::Detached {
                    volume: volume.clone(),
                    safe_to_unmap,
                });
            }
            Done::Serves => events.extend(self.serves(volume, job.began)),
            Done::Adopted(differences) => {
                events.extend(self.serves(volume, job.began));
                let differences = differences.into_iter();
                events.extend(differences.filter_map(|d| content_event(volume, d)));
            }
            Done::Resized { old_size, size } => {
                if let Some(there) = self.actual.volumes.get_mut(volume) {
                    there.size = Some(size);
                }
                let volume = volume.clone();
                events.push(Event::Resized {
                    volume,
                    old_size,
                    size,
                });
            }
            Done::Finished => self.look_at(volume),
            Done::Differs(condition, seen) => events.extend(self.differs(volume, condition, seen)),
            Done::Disconnected {
                reconnect_handle,
                error,
                budget_left,
            } => {
                let kind = job.step.kind;
                let why = self.disconnected(volume, kind, reconnect_handle, error, options);
                events.push(Event::Lost {
                    volume: volume.clone(),
                    why,
                    budget_left,
                });
            }
            Done::Failed(error) => {
                self.look_at(volume);
                if let Some(tracked) = self.tracked.get_mut(volume) {
                    tracked.reconnect_handle = reconnect_handle;
                }
                let (error, next_try) = self.fail(volume, job.step.kind, error, options);
                events.push(Event::Failed {
                    volume: volume.clone(),
                    step: job.step.kind,
                    error,
                    next_try,
                });
            }
        }
        let goes_on = self.step(volume).is_some();
        let freed = matches!(job.step.kind, StepKind::Detach | StepKind::Finish);
        self.replan |= goes_on || freed || failed || job.generation != self.generation;
        events
    }

    /// Records that an NBD device has lost its server. Returns why.
    fn disconnected(
        &mut self,
        volume: &VolumeId,
        kind: StepKind,
        reconnect_handle: Option<Box<ReconnectHandle>>,
        error: Error,
        options: &Options,
    ) -> String {
        let gone = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Vanished);
        if gone {
            self.look_at(volume);
        }
        let why = error.to_string();
        if let Some(there) = self.actual.volumes.get_mut(volume) {
            (there.condition, there.seen) = (Condition::LinkDead, why.clone());
        }
        self.fail(volume, kind, error, options);
        let tracked = self.tracked.entry(volume.clone()).or_default();
        tracked.reconnect_handle = reconnect_handle.filter(|_| !gone);
        tracked.lost = true;
        why
    }

    fn look_at(&mut self, volume: &VolumeId) {
        self.refresh.some.insert(volume.clone());
        self.refresh.soon();
    }

    /// Records an attached volume.
    fn stands(&mut self, there: VolumeStatus, options: &Options) -> Option<Event> {
        let volume = there.volume.clone();
        let tracked = self.tracked.entry(volume.clone()).or_default();
        (tracked.lost, tracked.reconnect_handle, tracked.differs) = (false, None, None);
        tracked.path_retry = if there.missing.is_empty() {
            None
        } else {
            let pauses = Backoff::new(options.shortest_retry, options.longest_retry);
            let mut pauses = tracked
                .path_retry
                .take()
                .map_or(pauses, |path_retry| path_retry.pauses);
            let at = Instant::now() + jittered(pauses.pause());
            Some(PathRetry { pauses, at })
        };
        let died = tracked.died.is_some();
        let before = self.actual.volumes.get(&volume);
        let was_handed_out = before.is_some_and(|before| before.node.is_some());
        let same = before.is_some_and(|before| {
            before.node == there.node
                && before.paths == there.paths
                && before.condition == Condition::Complete
        });
        let node = there.node.clone().unwrap_or_default();
        let event = if !was_handed_out {
            let size = there.size.unwrap_or_default();
            let volume = volume.clone();
            Some(Event::Attached { volume, node, size })
        } else if same {
            None
        } else {
            Some(Event::Changed {
                volume: volume.clone(),
                node,
                paths: there.paths.len(),
                missing: there.missing.iter().map(ToString::to_string).collect(),
            })
        };
        self.know(there);
        if died {
            let lost = self.mark_dead(&volume);
            return event.or(lost);
        }
        event
    }

    /// Records that the device answered. A link that died since `began` may have died
    /// after the answer, and the kernel reports a death only once: the device is asked
    /// again.
    fn serves(&mut self, volume: &VolumeId, began: Instant) -> Option<Event> {
        let tracked = self.tracked.entry(volume.clone()).or_default();
        let died_since = tracked.died.is_some_and(|died| died >= began);
        (tracked.died, tracked.reconnect_handle, tracked.differs) = (None, None, None);
        let lost = std::mem::take(&mut tracked.lost);
        let there = self.actual.volumes.get_mut(volume)?;
        there.condition = Condition::Complete;
        there.verify_reason = died_since.then(|| MAY_HAVE_DIED.to_owned());
        "it answers".clone_into(&mut there.seen);
        // A reconnect may have met another certificate.
        if there.tls.is_some() {
            self.look_at(volume);
        }
        lost.then(|| Event::Healed {
            volume: volume.clone(),
        })
    }

    /// Records that the device answered and differs from sysfs, which keeps the data of
    /// the kernel's scan and is no longer trusted.
    fn differs(&mut self, volume: &VolumeId, condition: Condition, seen: String) -> Option<Event> {
        let tracked = self.tracked.entry(volume.clone()).or_default();
        tracked.differs = Some((condition, seen.clone()));
        let there = self.actual.volumes.get_mut(volume)?;
        (there.condition, there.seen, there.verify_reason) = (condition, seen.clone(), None);
        let told = std::mem::replace(&mut tracked.lost, true);
        (!told).then(|| Event::Lost {
            volume: volume.clone(),
            why: seen,
            budget_left: None,
        })
    }

    fn fail(
        &mut self,
        volume: &VolumeId,
        kind: StepKind,
        error: Error,
        options: &Options,
    ) -> (Arc<Error>, Option<Duration>) {
        /// Requests wait for the server, and their time is limited.
        const LONGEST_WITHOUT_SERVER: Duration = Duration::from_secs(10);
        self.counters.failures += 1;
        self.publisher.change();
        let run = self.runs();
        let tracked = self.tracked.entry(volume.clone()).or_default();
        let error = Arc::new(error);
        let (shortest, longest) = (options.shortest_retry, options.longest_retry);
        let (tries, mut pauses) = match &tracked.failure {
            Some(failure) => (failure.tries, failure.pauses.clone()),
            None => (0, Backoff::new(shortest, longest)),
        };
        let mut pause = (error.retry() != Retry::Never).then(|| pauses.pause());
        if is_one(kind, StepKind::Heal) {
            // The server refuses it now, but a restarted server may serve it.
            let longest = LONGEST_WITHOUT_SERVER;
            pause = Some(pause.map_or(longest, |pause| pause.min(longest)));
        }
        let pause = pause.map(jittered);
        tracked.failure = Some(Failure {
            step: kind,
            error: Arc::clone(&error),
            tries: tries.saturating_add(1),
            run,
            pauses,
            next: pause.map(|pause| Instant::now() + pause),
            is_unblocked: false,
        });
        (error, pause)
    }
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
