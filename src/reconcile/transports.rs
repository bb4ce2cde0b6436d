//! Watches the transports: a new one may bring back a path of a volume.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::engine::ScsiTransport;

/// The pause after the first event, for the events that follow it.
const MOMENT: Duration = Duration::from_millis(30);
/// The pause before the next look while a session is logging in: no event announces that
/// another process's login ends. It doubles each time.
const NEXT_LOOK: Duration = Duration::from_millis(500);
/// How many such looks follow an event, which takes half a minute.
const LOOKS: u32 = 6;

/// The transports at the last look, and when the next look is.
#[derive(Debug, Default)]
pub(super) struct Transports {
    pub(super) known: BTreeSet<ScsiTransport>,
    next: Option<Instant>,
    /// The looks since the last event.
    looks: u32,
}

impl Transports {
    /// Schedules a look after a transport came, went or changed.
    pub(super) fn change(&mut self) {
        let soon = Instant::now() + MOMENT;
        self.next = Some(self.next.map_or(soon, |next| next.min(soon)));
        self.looks = 0;
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.next
    }

    /// Whether a look is due; resets the schedule if it is.
    pub(super) fn take(&mut self) -> bool {
        let is_due = self.next.is_some_and(|next| next <= Instant::now());
        if is_due {
            self.next = None;
        }
        is_due
    }

    /// Schedules another look after a look that failed.
    pub(super) fn look_later(&mut self) {
        let later = Instant::now() + NEXT_LOOK * (1 << self.looks);
        self.next.get_or_insert(later);
        self.looks = LOOKS.min(self.looks + 1);
    }

    /// Records the transports of a look and returns the new ones.
    pub(super) fn look(
        &mut self,
        up: BTreeSet<ScsiTransport>,
        is_changing: bool,
    ) -> Vec<ScsiTransport> {
        if is_changing && self.looks < LOOKS {
            let again = Instant::now() + NEXT_LOOK * (1 << self.looks);
            self.next.get_or_insert(again);
            self.looks += 1;
        }
        let new = up.difference(&self.known).cloned().collect();
        self.known = up;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_looked_at_is_looked_at_again() {
        let mut transports = Transports::default();
        for _ in 0..2 * LOOKS {
            transports.look_later();
            let due = transports.next.take().unwrap();
            assert!(due <= Instant::now() + Duration::from_secs(60));
        }
    }

    #[test]
    fn what_the_end_of_a_login_makes_stand_is_looked_for_though_no_event_tells_of_it() {
        let mut transports = Transports::default();
        transports.change();
        assert!(transports.due().is_some());
        transports.next = None;
        for _ in 0..LOOKS {
            assert!(transports.look(BTreeSet::new(), true).is_empty());
            assert!(transports.due().is_some());
            transports.next = None;
        }
        transports.look(BTreeSet::new(), true);
        assert!(transports.due().is_none(), "for ever");
    }
}
