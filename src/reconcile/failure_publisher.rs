//! When it is to be told again what fails.

use std::time::{Duration, Instant};

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

    /// Whether it is to be told now, and from now on no more.
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
