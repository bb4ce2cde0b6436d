//! The number of worker threads: slow steps must not delay the others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::job::{Endpoint, Priority};
use crate::id::VolumeId;

/// After this time a step is slow: it no longer counts, and another thread is started where a
/// step waits.
const SLOW_AFTER: Duration = Duration::from_secs(5);
/// The same for a step that failed before, since it may hang again.
const RETRY_SLOW_AFTER: Duration = Duration::from_secs(1);
/// The most threads that are started in place of slow ones.
const MOST_EXTRA: usize = 64;
/// Threads in addition to those of the options: one for detaches, and one for steps whose
/// obstacle may be gone. No attach takes them.
const RESERVED: usize = 2;

/// The threads, and their steps.
#[derive(Debug, Default)]
pub(super) struct Workers {
    /// The number of threads of the options.
    threads: usize,
    started: usize,
    running: BTreeMap<VolumeId, Running>,
    /// Until when no thread is started, after a start that failed.
    no_start_before: Option<Instant>,
    /// The thread of the session recovery is wanted and not started.
    lacks_recovery: bool,
}

/// A step that a thread does.
#[derive(Debug)]
struct Running {
    began: Instant,
    priority: Priority,
    endpoint: Option<Endpoint>,
}

impl Running {
    fn slow_from(&self) -> Instant {
        let is_first = matches!(self.priority, Priority::Detach | Priority::FirstTry);
        self.began
            + if is_first {
                SLOW_AFTER
            } else {
                RETRY_SLOW_AFTER
            }
    }

    /// The endpoint for whose limit it counts.
    fn counts_at(&self, now: Instant) -> Option<&str> {
        let endpoint = self.endpoint.as_ref()?;
        let counts = endpoint.may_hang || self.began + RETRY_SLOW_AFTER <= now;
        counts.then_some(&*endpoint.name)
    }
}

/// How many steps may begin while others run.
#[derive(Debug)]
pub(super) struct Capacity {
    threads: usize,
    /// The number of running steps, including slow ones.
    running: usize,
    /// The running steps that are not slow.
    quick: BTreeMap<Priority, usize>,
    /// The steps at each server, target or host that count for its limit. Unblocked steps
    /// (`true`) count apart from the others: what hung before may be over.
    endpoints: BTreeMap<bool, BTreeMap<String, usize>>,
}

impl Capacity {
    /// Whether a thread is free for a step of this priority. Steps that failed before take at
    /// most half of the threads. A step waits while the steps at its endpoint take half of
    /// the threads, or a quarter if the step is not a first try. The pool keeps its last thread
    /// for first detaches, and the one before it for all detaches and for unblocked steps.
    pub(super) fn admits(&self, priority: Priority, endpoint: Option<&Endpoint>) -> bool {
        let (all, half) = (self.threads, (self.threads / 2).max(1));
        let quick = |priorities: &[Priority]| -> usize {
            let counts = priorities
                .iter()
                .filter_map(|priority| self.quick.get(priority));
            counts.sum()
        };
        let attaches = quick(&[Priority::Unblocked, Priority::FirstTry, Priority::Retry]);
        let at_endpoint = endpoint.and_then(|endpoint| {
            let endpoints = self.endpoints.get(&(priority == Priority::Unblocked))?;
            endpoints.get(&endpoint.name).copied()
        });
        let most_at_endpoint = if priority == Priority::FirstTry {
            half
        } else {
            (half / 2).max(1)
        };
        let most_threads = all + MOST_EXTRA;
        let has_thread = match priority {
            Priority::Detach => true,
            Priority::DetachRetry | Priority::Unblocked => {
                self.running < most_threads + RESERVED - 1
            }
            Priority::FirstTry | Priority::Retry => self.running < most_threads,
        };
        let is_full = match priority {
            Priority::Detach => quick(&[Priority::Detach]) >= all,
            Priority::DetachRetry => quick(&[Priority::DetachRetry]) >= half,
            Priority::Unblocked => attaches > all,
            Priority::FirstTry => attaches >= all,
            Priority::Retry => attaches >= all || quick(&[Priority::Retry]) >= half,
        };
        has_thread && !is_full && at_endpoint.unwrap_or_default() < most_at_endpoint
    }
}

impl Workers {
    /// No thread is started yet, also none of the session recovery where that is wanted.
    pub(super) fn new(threads: usize, lacks_recovery: bool) -> Self {
        Self {
            threads,
            lacks_recovery,
            ..Self::default()
        }
    }

    pub(super) fn note_started(&mut self) {
        self.started += 1;
    }

    /// Records that no thread could be started. The loop checks again within [`RETRY_SLOW_AFTER`]
    /// while a step waits.
    pub(super) fn note_start_failed(&mut self, now: Instant) {
        self.no_start_before = Some(now + RETRY_SLOW_AFTER);
    }

    /// Whether no worker thread could be started so far.
    pub(super) fn are_none(&self) -> bool {
        self.started == 0
    }

    pub(super) fn note_recovery_started(&mut self) {
        self.lacks_recovery = false;
    }

    pub(super) fn must_start_recovery(&self, now: Instant) -> bool {
        self.lacks_recovery && !self.must_wait(now)
    }

    /// When to try again to start the thread of the session recovery.
    pub(super) fn next_recovery_start(&self) -> Option<Instant> {
        self.no_start_before.filter(|_| self.lacks_recovery)
    }

    fn must_wait(&self, now: Instant) -> bool {
        self.no_start_before.is_some_and(|at| now < at)
    }

    pub(super) fn are_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Records the step that a thread has taken.
    pub(super) fn begin(
        &mut self,
        volume: VolumeId,
        priority: Priority,
        endpoint: Option<Endpoint>,
        began: Instant,
    ) {
        let step = Running {
            began,
            priority,
            endpoint,
        };
        self.running.insert(volume, step);
    }

    pub(super) fn end(&mut self, volume: &VolumeId) {
        self.running.remove(volume);
    }

    pub(super) fn capacity(&self, now: Instant) -> Capacity {
        let mut capacity = Capacity {
            threads: self.threads,
            running: self.running.len(),
            quick: BTreeMap::new(),
            endpoints: BTreeMap::new(),
        };
        for step in self.running.values() {
            if step.slow_from() > now {
                *capacity.quick.entry(step.priority).or_default() += 1;
            }
            if let Some(endpoint) = step.counts_at(now) {
                let is_unblocked = step.priority == Priority::Unblocked;
                let endpoints = capacity.endpoints.entry(is_unblocked).or_default();
                *endpoints.entry(endpoint.to_owned()).or_default() += 1;
            }
        }
        capacity
    }

    /// Whether to start another thread for one of the `waiting` steps: up to the number
    /// of the options and the extra ones, and no more than there are steps.
    pub(super) fn needs_thread(&self, waiting: usize, now: Instant) -> bool {
        if self.must_wait(now) {
            return false;
        }
        let are_busy = self.started <= self.running.len();
        let most = self.threads + RESERVED;
        let steps = self.running.len() + waiting;
        self.started < most.min(steps) || are_busy && self.started < most + self.slow(now)
    }

    /// Whether an idle thread must end, since fewer steps are slow now. It no longer counts.
    pub(super) fn release_thread(&mut self, now: Instant) -> bool {
        let too_many = self.started > self.threads + RESERVED + self.slow(now);
        self.started -= usize::from(too_many);
        too_many
    }

    /// When the next step may become slow, even one that begins only now.
    pub(super) fn next_slow(&self, now: Instant) -> Instant {
        let slow = self.running.values().map(Running::slow_from);
        let next = slow.filter(|at| *at > now).min();
        next.map_or(now + RETRY_SLOW_AFTER, |next| {
            next.min(now + RETRY_SLOW_AFTER)
        })
    }

    fn slow(&self, now: Instant) -> usize {
        let slow = self.running.values().filter(|at| at.slow_from() <= now);
        slow.count().min(MOST_EXTRA)
    }
}

#[cfg(test)]
mod tests;
