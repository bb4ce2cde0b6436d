//! What fails, told to whoever looks at the journal from beside.

use std::time::{Duration, Instant, SystemTime};

use super::reconciler::Reconciler;
use super::state::State;
use crate::deadline::Deadline;
use crate::engine::journal::Failing;

/// When it is to be told again what fails.
#[derive(Debug, Default)]
pub(super) struct FailurePublisher {
    last: Option<Instant>,
    next: Option<Instant>,
}

impl FailurePublisher {
    /// What fails is not what was told.
    pub(super) fn change(&mut self) {
        /// Between two of them: many volumes may fail at once.
        const PAUSE: Duration = Duration::from_millis(200);
        let now = Instant::now();
        let next = self.last.map_or(now, |last| now.max(last + PAUSE));
        self.next.get_or_insert(next);
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.next
    }
}

impl State {
    /// What fails, where that is to be told now.
    pub(super) fn take_failing(&mut self) -> Option<Vec<Failing>> {
        let now = Instant::now();
        self.publisher.due().filter(|due| *due <= now)?;
        (self.publisher.next, self.publisher.last) = (None, Some(now));
        let clock = SystemTime::now();
        let failing = self.tracked.iter().filter_map(|(volume, tracked)| {
            let failure = tracked.failure.as_ref()?;
            let error = format!("{:#}", failure.error);
            let step = failure.step.as_str();
            let mut failing = Failing::new(volume.clone(), step, error, failure.tries);
            let wait = |next: Instant| next.saturating_duration_since(now);
            failing.next_try = failure.next.map(|next| clock + wait(next));
            Some(failing)
        });
        Some(failing.collect())
    }
}

impl Reconciler {
    pub(super) fn tell_failing(&self, failing: Vec<Failing>) {
        /// Nobody waits for it but the loop.
        const LIMIT: Duration = Duration::from_secs(2);
        let told = self.journal.tell_failing(failing, Deadline::after(LIMIT));
        if let Err(error) = told {
            tracing::warn!(%error, "nobody is told what fails");
        }
    }
}
