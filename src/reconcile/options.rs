//! How a reconciler works.

use std::num::NonZeroUsize;
use std::time::Duration;

/// How a [`Reconciler`](super::Reconciler) works.
#[derive(Debug, Clone)]
pub struct Options {
    pub(super) threads: NonZeroUsize,
    pub(super) step_limit: Duration,
    pub(super) resync: Duration,
    pub(super) shortest_retry: Duration,
    pub(super) longest_retry: Duration,
    pub(super) prove: bool,
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
            prove: true,
        }
    }
}

impl Options {
    /// How many volumes are attached and healed at once; 8 without it. As many are
    /// detached beside these, with one thread of their own at least, and one is kept for
    /// what failed and may be over. What hangs does not keep the others waiting: those
    /// that failed before are given half of the threads at most, those of one server or
    /// target a quarter, and a step that takes longer than 5 s, or 1 s where it failed
    /// before, keeps its thread beside these, of which there are 64 at most.
    #[must_use]
    pub fn threads(mut self, count: NonZeroUsize) -> Self {
        self.threads = count;
        self
    }

    /// The time that one step of one volume may take; 120 s without it.
    #[must_use]
    pub fn step_limit(mut self, limit: Duration) -> Self {
        self.step_limit = limit;
        self
    }

    /// How often everything is looked at though nothing has happened: the net
    /// below the kernel's events; 5 minutes without it. Where a volume has a login,
    /// the sessions alone are looked at every 10 seconds too: what waits on a lost one
    /// does not wait for long.
    #[must_use]
    pub fn resync(mut self, period: Duration) -> Self {
        self.resync = period;
        self
    }

    /// How long a volume that failed waits for its next try: this long at first
    /// and twice as long each time, up to `longest`; 1 s and 120 s without it.
    #[must_use]
    pub fn retry(mut self, shortest: Duration, longest: Duration) -> Self {
        (self.shortest_retry, self.longest_retry) = (shortest, longest);
        self
    }

    /// Takes the volumes that stand at the start at sysfs's word, and asks no
    /// device whether it is still the one, and no NBD server whether it is there.
    #[must_use]
    pub fn trust(mut self) -> Self {
        self.prove = false;
        self
    }
}
