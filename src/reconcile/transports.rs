//! Watches the transports: a new one may bring back a path of a volume.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::engine::{ScsiTransport, ScsiTransports};

/// The pause after the first event, for the events that follow it.
const COALESCE_DELAY: Duration = Duration::from_millis(30);
/// The pause before the next refresh while a session is logging in: no event announces that
/// another process's login ends. It doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// How many such refreshes follow an event, which takes half a minute.
const MOST_REFRESHES: u32 = 6;

/// The transports at the last refresh, and when the next refresh is.
#[derive(Debug, Default)]
pub(super) struct Transports {
    known: BTreeSet<ScsiTransport>,
    next: Option<Instant>,
    /// The refreshes since the last event that were followed by another.
    refreshes: u32,
}

impl Transports {
    /// Schedules a refresh after a transport came, went or changed.
    pub(super) fn change(&mut self) {
        let soon = Instant::now() + COALESCE_DELAY;
        self.next = Some(self.next.map_or(soon, |next| next.min(soon)));
        self.refreshes = 0;
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.next
    }

    /// Whether a refresh is due; resets the schedule if it is.
    pub(super) fn take_due(&mut self) -> bool {
        self.next.take_if(|next| *next <= Instant::now()).is_some()
    }

    /// Schedules another refresh after one that failed, or that is not the last.
    pub(super) fn refresh_later(&mut self) {
        let later = Instant::now() + FIRST_PAUSE * (1 << self.refreshes);
        self.next.get_or_insert(later);
        self.refreshes = MOST_REFRESHES.min(self.refreshes + 1);
    }

    pub(super) fn known(&self) -> &BTreeSet<ScsiTransport> {
        &self.known
    }

    /// Takes the transports of a refresh and returns the new ones.
    pub(super) fn merge(&mut self, found: ScsiTransports) -> Vec<ScsiTransport> {
        if found.is_changing && self.refreshes < MOST_REFRESHES {
            self.refresh_later();
        }
        let new = found.up.difference(&self.known).cloned().collect();
        self.known = found.up;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refresh_that_failed_is_repeated() {
        let mut transports = Transports::default();
        for _ in 0..2 * MOST_REFRESHES {
            transports.refresh_later();
            let due = transports.next.take().unwrap();
            assert!(due <= Instant::now() + Duration::from_secs(60));
        }
    }

    #[test]
    fn the_end_of_a_login_is_noticed_without_an_event() {
        let logging_in = || ScsiTransports {
            up: BTreeSet::new(),
            is_changing: true,
        };
        let mut transports = Transports::default();
        transports.change();
        assert!(transports.due().is_some());
        transports.next = None;
        for _ in 0..MOST_REFRESHES {
            assert!(transports.merge(logging_in()).is_empty());
            assert!(transports.due().is_some());
            transports.next = None;
        }
        transports.merge(logging_in());
        assert!(transports.due().is_none(), "for ever");
    }
}
