//! What is to be looked at, and when.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::id::VolumeId;

/// What is to be looked at.
#[derive(Debug, Default)]
pub(super) struct Refresh {
    pub(super) all: bool,
    pub(super) some: BTreeSet<VolumeId>,
    /// Not before this.
    at: Option<Instant>,
    /// When the last ended, and how long it took.
    last: Option<(Instant, Duration)>,
}

/// What is looked at.
pub(super) enum Scope {
    All,
    Some(BTreeSet<VolumeId>),
}

impl Refresh {
    /// After something happened: a moment later, for what comes with it, and so
    /// that looks take a sixth of the time at the most.
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

    /// What is to be looked at now.
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

    /// It failed: the same, in a while.
    pub(super) fn later(&mut self) {
        self.all = true;
        self.at = Some(Instant::now() + Duration::from_secs(1));
    }
}
