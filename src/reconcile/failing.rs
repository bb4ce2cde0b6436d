//! Publishes the failing volumes for other readers of the journal.

use std::time::{Duration, Instant, SystemTime};

use super::reconciler::Reconciler;
use super::state::State;
use crate::deadline::Deadline;
use crate::engine::journal::Failing;

impl State {
    /// The failing volumes, where they are due to be published.
    pub(super) fn take_failing(&mut self) -> Option<Vec<Failing>> {
        let now = Instant::now();
        if !self.publisher.take_due(now) {
            return None;
        }
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
        /// Only the loop waits for the write.
        const LIMIT: Duration = Duration::from_secs(2);
        let told = self.journal.tell_failing(failing, Deadline::after(LIMIT));
        if let Err(error) = told {
            tracing::warn!(%error, "cannot publish the failures");
        }
    }
}
