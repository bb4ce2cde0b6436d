//! The options of a reconciler.

use std::num::NonZeroUsize;
use std::time::Duration;

use crate::deadline::Backoff;

/// The options of a [`Reconciler`](super::Reconciler).
#[derive(Debug, Clone)]
pub struct Options {
    pub(super) threads: NonZeroUsize,
    pub(super) step_limit: Duration,
    pub(super) resync: Duration,
    shortest_retry: Duration,
    longest_retry: Duration,
    pub(super) verify_new: bool,
}

impl Default for Options {
    fn default() -> Self {
        const EIGHT: NonZeroUsize = NonZeroUsize::MIN.saturating_add(7);
        Self {
            threads: EIGHT,
            step_limit: Duration::from_secs(120),
            resync: Duration::from_secs(300),
            shortest_retry: Duration::from_secs(1),
            longest_retry: Duration::from_secs(120),
            verify_new: true,
        }
    }
}

impl Options {
    /// How many volumes are attached and healed at once; 8 by default. Two further threads are
    /// reserved: one for detaches, and one for detaches and for steps whose obstacle may be gone.
    /// Detaches also use the threads that no attach uses: if no attach runs, as many volumes are
    /// detached at once. Volumes that hang do not delay the others: steps that failed before get at
    /// most half of the threads, those of one server or target a quarter. First attaches that take
    /// longer than 1 s get half of the threads at one server or target. A step that takes longer
    /// than 5 s, or 1 s where it failed before, no longer counts; at most 64 more threads are
    /// started for such steps.
    #[must_use]
    pub fn threads(mut self, count: NonZeroUsize) -> Self {
        self.threads = count;
        self
    }

    /// The time that one step of one volume may take; 120 s by default.
    #[must_use]
    pub fn step_limit(mut self, limit: Duration) -> Self {
        self.step_limit = limit;
        self
    }

    /// How often all volumes are refreshed without an event, in case a kernel event is
    /// lost; 5 minutes by default. Where a volume has a login, the sessions are also
    /// checked every 10 seconds, so that I/O on a lost session does not wait long.
    #[must_use]
    pub fn resync(mut self, period: Duration) -> Self {
        self.resync = period;
        self
    }

    /// The pauses between attempts for a volume that failed: `shortest` at first and
    /// twice as long each time, up to `longest`; 1 s and 120 s by default.
    #[must_use]
    pub fn retry(mut self, shortest: Duration, longest: Duration) -> Self {
        (self.shortest_retry, self.longest_retry) = (shortest, longest);
        self
    }

    /// Trusts sysfs about the volumes that are attached at the start: asks no device
    /// whether it is still the expected one, and no NBD server whether it is there.
    #[must_use]
    pub fn trust(mut self) -> Self {
        self.verify_new = false;
        self
    }

    pub(super) fn retry_pauses(&self) -> Backoff {
        Backoff::new(self.shortest_retry, self.longest_retry)
    }
}
