//! The next task of the loop.

use std::time::{Duration, Instant};

use super::State;
use crate::deadline::Deadline;
use crate::engine::journal::Failing;
use crate::reconcile::event::Event;
use crate::reconcile::refresh::Scope;

/// The next task of the loop, which it does without the lock of the state.
#[derive(Debug)]
pub(in crate::reconcile) enum Task {
    EndRun,
    /// Refresh these volumes. So many steps have ended before.
    Refresh(Scope, u64),
    RefreshTransports,
    /// Send the events of a new plan, and wake the workers for its steps.
    SendPlanEvents(Vec<Event>),
    StartWorker,
    StartSessionRecovery,
    PublishFailures(Vec<Failing>),
    /// Wait to be woken, at most this long.
    Wait(Duration),
}

impl State {
    /// The next task of a run. With a deadline, the run ends then, or once nothing is left to
    /// do.
    pub(in crate::reconcile) fn next_task(&mut self, until: Option<Deadline>) -> Task {
        /// Within this time after a refresh of all volumes, all failed steps are tried again.
        const SPREAD: Duration = Duration::from_secs(30);
        if self.run.is_stopped() || until.is_some_and(|deadline| deadline.has_passed()) {
            return Task::EndRun;
        }
        if self.refresh.until_resync().is_zero() {
            if until.is_none() {
                self.reset_backoff(SPREAD.min(self.options.resync / 10));
            }
            self.refresh.request_all_now();
        }
        if let Some(scope) = self.refresh.take() {
            if matches!(scope, Scope::All) {
                self.refresh.resync_after(self.options.resync);
            }
            return Task::Refresh(scope, self.counters.steps);
        }
        if self.transports.take_due() {
            return Task::RefreshTransports;
        }
        if self.schedule.is_plan_due() {
            return Task::SendPlanEvents(self.plan_and_queue());
        }
        if until.is_some() && self.is_idle() {
            return Task::EndRun;
        }
        if self.schedule.needs_worker() {
            return Task::StartWorker;
        }
        if self.schedule.workers.must_start_recovery(Instant::now()) {
            return Task::StartSessionRecovery;
        }
        if self.publisher.take_due(Instant::now()) {
            let failures = self.failures();
            let published = failures.map(|(volume, failure)| failure.published(volume));
            return Task::PublishFailures(published.collect());
        }
        Task::Wait(self.longest_wait(until))
    }

    /// The time until the first timer.
    fn longest_wait(&self, until: Option<Deadline>) -> Duration {
        let limit = self.refresh.until_resync();
        let limit = until.map_or(limit, |until| limit.min(until.remaining()));
        let timers = [
            self.next_timer(),
            self.schedule.next_slow_step(),
            self.schedule.workers.next_recovery_start(),
        ];
        let first = timers.into_iter().flatten().min();
        first.map_or(limit, |at| {
            limit.min(at.saturating_duration_since(Instant::now()))
        })
    }
}

#[cfg(test)]
mod tests;
