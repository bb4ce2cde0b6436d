//! The volumes to look at, and when.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::id::VolumeId;

#[derive(Debug, Default)]
pub(super) struct Refresh {
    pub(super) all: bool,
    pub(super) some: BTreeSet<VolumeId>,
    /// The earliest time of the next look.
    at: Option<Instant>,
    /// When the last look ended, and how long it took.
    last: Option<(Instant, Duration)>,
}

/// The volumes that a look covers.
pub(super) enum Scope {
    All,
    Some(BTreeSet<VolumeId>),
}

impl Refresh {
    /// Schedules a look after an event: a moment later, to cover the events that follow,
    /// and so that looks take at most a sixth of the time.
    pub(super) fn soon(&mut self) {
        const MOMENT: Duration = Duration::from_millis(30);
        const SHARE: u32 = 5;
        let rest = self.last.map(|(end, took)| end + took * SHARE);
        let at = (Instant::now() + MOMENT).max(rest.unwrap_or_else(Instant::now));
        self.at.get_or_insert(at);
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.all || !self.some.is_empty()
    }

    pub(super) fn now(&mut self) {
        (self.all, self.at) = (true, None);
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.is_wanted()
            .then(|| self.at.unwrap_or_else(Instant::now))
    }

    /// The volumes to look at now, where a look is due.
    pub(super) fn take(&mut self) -> Option<Scope> {
        let due = self.due().is_some_and(|at| at <= Instant::now());
        if !due {
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

    pub(super) fn ended(&mut self, began: Instant) {
        self.last = Some((Instant::now(), began.elapsed()));
    }

    /// Schedules another look after one that failed.
    pub(super) fn later(&mut self) {
        self.all = true;
        self.at = Some(Instant::now() + Duration::from_secs(1));
    }
}
