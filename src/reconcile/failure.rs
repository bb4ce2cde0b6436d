//! The failure of a volume's step, and the time of the next attempt.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::options::Options;
use super::run::Run;
use super::step::StepKind;
use crate::deadline::{Backoff, jittered};
use crate::engine::journal::Failing;
use crate::error::{Error, Retry};
use crate::id::VolumeId;

#[derive(Debug)]
pub(super) struct Failure {
    step: StepKind,
    error: Arc<Error>,
    tries: u32,
    /// The number of the run in which it failed.
    run: u64,
    pauses: Backoff,
    /// The time of the next attempt; `None` where something must change first.
    next: Option<Instant>,
    /// The obstacle may be gone.
    is_unblocked: bool,
}

impl Failure {
    /// The failure that follows `before`. Also returns the pause before the next attempt.
    pub(super) fn after(
        before: Option<Self>,
        step: StepKind,
        error: Error,
        run: &Run,
        options: &Options,
    ) -> (Self, Option<Duration>) {
        /// Requests wait for the server, and their time is limited.
        const LONGEST_WITHOUT_SERVER: Duration = Duration::from_secs(10);
        let (tries, mut pauses) = match before {
            Some(before) => (before.tries, before.pauses),
            None => (0, options.retry_pauses()),
        };
        let mut pause = (error.retry() != Retry::Never).then(|| pauses.pause());
        if asks_nbd_server(step) {
            // The server refuses it now, but a restarted server may serve it.
            let longest = LONGEST_WITHOUT_SERVER;
            pause = Some(pause.map_or(longest, |pause| pause.min(longest)));
        }
        let pause = pause.map(jittered);
        let failure = Self {
            step,
            error: Arc::new(error),
            tries: tries.saturating_add(1),
            run: run.number(),
            pauses,
            next: pause.map(|pause| Instant::now() + pause),
            is_unblocked: false,
        };
        (failure, pause)
    }

    pub(super) fn error(&self) -> &Arc<Error> {
        &self.error
    }

    pub(super) fn tries(&self) -> u32 {
        self.tries
    }

    /// The time of the next attempt; `None` where something must change first.
    pub(super) fn next_try(&self) -> Option<Instant> {
        self.next
    }

    pub(super) fn is_unblocked(&self) -> bool {
        self.is_unblocked
    }

    pub(super) fn is_of(&self, step: StepKind) -> bool {
        self.step == step
    }

    /// Has the step tried again at once, since its obstacle may be gone.
    pub(super) fn unblock(&mut self) {
        (self.next, self.is_unblocked) = (Some(Instant::now()), true);
    }

    /// Has the step tried again at this time at the latest.
    pub(super) fn retry_by(&mut self, at: Instant) {
        self.next = Some(self.next.map_or(at, |next| next.min(at)));
    }

    /// Whether a run that tries each step once has tried this one.
    pub(super) fn was_tried_in(&self, run: &Run) -> bool {
        run.tries_once() && self.run == run.number()
    }

    /// Whether the volume's next step, of this kind, must wait for the next attempt. After an
    /// error that no retry helps, other steps of the volume still run.
    pub(super) fn delays(&self, step: StepKind, now: Instant) -> bool {
        let is_same = self.step == step || asks_nbd_server(self.step) && asks_nbd_server(step);
        let concerns_it = is_same || self.error.retry() != Retry::Never;
        concerns_it && self.next.is_none_or(|next| next > now)
    }

    /// The form for other readers of the journal.
    pub(super) fn published(&self, volume: &VolumeId) -> Failing {
        let error = format!("{:#}", self.error);
        let mut failing = Failing::new(volume.clone(), self.step.as_str(), error, self.tries);
        let now = Instant::now();
        let wait = |next: Instant| next.saturating_duration_since(now);
        failing.next_try = self.next.map(|next| SystemTime::now() + wait(next));
        failing
    }
}

fn asks_nbd_server(step: StepKind) -> bool {
    matches!(step, StepKind::Heal | StepKind::Verify)
}
