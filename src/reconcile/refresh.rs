//! Which volumes to refresh from sysfs, and when.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::id::VolumeId;

#[derive(Debug, Default)]
pub(super) struct Refresh {
    all: bool,
    some: BTreeSet<VolumeId>,
    /// The earliest time of the next refresh.
    at: Option<Instant>,
    /// When the last refresh ended, and how long it took.
    last: Option<(Instant, Duration)>,
    /// When all volumes are refreshed without an event.
    resync: Option<Deadline>,
}

/// The volumes that a refresh covers.
#[derive(Debug)]
pub(super) enum Scope {
    All,
    Some(BTreeSet<VolumeId>),
}

impl Refresh {
    /// Schedules a refresh of all volumes after this time.
    pub(super) fn resync_after(&mut self, period: Duration) {
        self.resync = Some(Deadline::after(period));
    }

    /// The time until all volumes are refreshed without an event.
    pub(super) fn until_resync(&self) -> Duration {
        self.resync
            .as_ref()
            .map_or(Duration::MAX, Deadline::remaining)
    }

    /// Requests a refresh of a volume after an event.
    pub(super) fn request(&mut self, volume: &VolumeId) {
        self.some.insert(volume.clone());
        self.delay();
    }

    /// Requests a refresh of all volumes after an event.
    pub(super) fn request_all(&mut self) {
        self.all = true;
        self.delay();
    }

    /// Delays the refresh a moment, to cover the events that follow, and so that refreshes
    /// take at most a sixth of the time.
    fn delay(&mut self) {
        const COALESCE_DELAY: Duration = Duration::from_millis(30);
        const SHARE: u32 = 5;
        let rest = self.last.map(|(end, took)| end + took * SHARE);
        let at = (Instant::now() + COALESCE_DELAY).max(rest.unwrap_or_else(Instant::now));
        self.at.get_or_insert(at);
    }

    /// Requests a refresh of all volumes at once.
    pub(super) fn request_all_now(&mut self) {
        (self.all, self.at) = (true, None);
    }

    /// Requests another refresh after one that failed.
    pub(super) fn request_again(&mut self) {
        self.all = true;
        self.at = Some(Instant::now() + Duration::from_secs(1));
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.all || !self.some.is_empty()
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.is_wanted()
            .then(|| self.at.unwrap_or_else(Instant::now))
    }

    /// The volumes to refresh now, where a refresh is due.
    pub(super) fn take(&mut self) -> Option<Scope> {
        let is_due = self.due().is_some_and(|at| at <= Instant::now());
        if !is_due {
            return None;
        }
        self.at = None;
        let some = std::mem::take(&mut self.some);
        Some(if std::mem::take(&mut self.all) {
            Scope::All
        } else {
            Scope::Some(some)
        })
    }

    pub(super) fn note_ended(&mut self, began: Instant) {
        self.last = Some((Instant::now(), began.elapsed()));
    }
}
