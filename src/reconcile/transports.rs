//! Whether a path of a volume may be back: something leads to it that did not before.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::engine::ScsiTransport;

/// After the first event, for those that come with it.
const MOMENT: Duration = Duration::from_millis(30);
/// No event tells the end of a login that somebody else is at. It is looked for after
/// this, and twice as long each time.
const NEXT_LOOK: Duration = Duration::from_millis(500);
/// So often after an event, which is for half a minute.
const LOOKS: u32 = 6;

/// What stood when it was last looked at, and when that is next.
#[derive(Debug, Default)]
pub(super) struct Transports {
    pub(super) known: BTreeSet<ScsiTransport>,
    next: Option<Instant>,
    /// Since the last event.
    looks: u32,
}

impl Transports {
    /// Something of it came, went or changed.
    pub(super) fn change(&mut self) {
        let soon = Instant::now() + MOMENT;
        self.next = Some(self.next.map_or(soon, |next| next.min(soon)));
        self.looks = 0;
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.next
    }

    /// Whether it is to be looked at now.
    pub(super) fn take(&mut self) -> bool {
        let is_due = self.next.is_some_and(|next| next <= Instant::now());
        if is_due {
            self.next = None;
        }
        is_due
    }

    /// It could not be looked at, and is looked at again.
    pub(super) fn look_later(&mut self) {
        let later = Instant::now() + NEXT_LOOK * (1 << self.looks);
        self.next.get_or_insert(later);
        self.looks = LOOKS.min(self.looks + 1);
    }

    /// It was looked at: what is new.
    pub(super) fn look(
        &mut self,
        standing: BTreeSet<ScsiTransport>,
        is_changing: bool,
    ) -> Vec<ScsiTransport> {
        if is_changing && self.looks < LOOKS {
            let again = Instant::now() + NEXT_LOOK * (1 << self.looks);
            self.next.get_or_insert(again);
            self.looks += 1;
        }
        let new = standing.difference(&self.known).cloned().collect();
        self.known = standing;
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
