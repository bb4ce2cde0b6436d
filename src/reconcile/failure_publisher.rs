//! The schedule for publishing the failing volumes.

use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub(super) struct FailurePublisher {
    last: Option<Instant>,
    next: Option<Instant>,
}

impl FailurePublisher {
    /// Notes that the published failures are out of date.
    pub(super) fn change(&mut self) {
        /// Many volumes may fail at once.
        const PAUSE: Duration = Duration::from_millis(200);
        let now = Instant::now();
        let next = self.last.map_or(now, |last| now.max(last + PAUSE));
        self.next.get_or_insert(next);
    }

    /// Has a publication that failed done again.
    pub(super) fn retry(&mut self) {
        /// A full disk may stay full.
        const PAUSE: Duration = Duration::from_secs(1);
        self.next = Some(Instant::now() + PAUSE);
    }

    /// Whether a publication is due; resets the schedule if it is.
    pub(super) fn take_due(&mut self, now: Instant) -> bool {
        let is_due = self.next.is_some_and(|due| due <= now);
        if is_due {
            (self.next, self.last) = (None, Some(now));
        }
        is_due
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.next
    }
}
