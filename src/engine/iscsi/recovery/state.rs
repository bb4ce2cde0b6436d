//! What is known of a session that was lost, and when it is looked at next.

use std::time::{Duration, Instant};

use crate::deadline::{Backoff, jittered};
use crate::error::ErrorKind;
use crate::iscsi::IscsiSession;

/// How often one of which the kernel said that it is lost, and sysfs does not yet, is
/// looked at again: for some two seconds.
const LOOKS: u32 = 14;

#[derive(Debug)]
pub(super) struct RecoveryState {
    session: IscsiSession,
    /// When the kernel said so.
    heard: Option<Instant>,
    /// Sysfs says it too.
    lost: bool,
    looks_left: u32,
    /// `None` while an attempt is under way.
    due: Option<Instant>,
    /// When that should have come to its end; where it has not, when to look again.
    overdue: Option<Instant>,
    /// Nothing is done before, whatever is heard.
    not_before: Instant,
    between_looks: Backoff,
    between_tries: Pauses,
    tries: u32,
    /// What was said of it.
    failure: Option<ErrorKind>,
    said_spent: bool,
    /// The target asks for it.
    logs_out_first: bool,
}

/// Between tries: they grow, and may become longer ones for good.
#[derive(Debug)]
struct Pauses {
    backoff: Backoff,
    is_slow: bool,
}

impl Pauses {
    fn quick() -> Self {
        Self {
            backoff: Backoff::new(Duration::from_millis(50), Duration::from_secs(2)),
            is_slow: false,
        }
    }

    fn slow_down(&mut self) {
        if !self.is_slow {
            self.backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(15));
            self.is_slow = true;
        }
    }
}

impl RecoveryState {
    pub(in crate::engine) fn new(session: IscsiSession, now: Instant) -> Self {
        Self {
            session,
            heard: None,
            lost: false,
            looks_left: LOOKS,
            due: Some(now),
            overdue: None,
            not_before: now,
            between_looks: Backoff::new(Duration::from_millis(5), Duration::from_millis(250)),
            between_tries: Pauses::quick(),
            tries: 0,
            failure: None,
            said_spent: false,
            logs_out_first: false,
        }
    }

    pub(in crate::engine) fn session(&self) -> &IscsiSession {
        &self.session
    }

    /// When it is to be looked at; `None` while that is of no use.
    pub(in crate::engine) fn due(&self) -> Option<Instant> {
        self.due.map(|due| due.max(self.not_before))
    }

    /// The kernel has said that it is lost; the first of it counts.
    pub(in crate::engine) fn heard(&mut self, now: Instant) {
        self.heard.get_or_insert(now);
    }

    pub(in crate::engine) fn seen(&self) -> Option<Instant> {
        self.heard
    }

    pub(in crate::engine) fn tries(&self) -> u32 {
        self.tries
    }

    /// Nothing is done before `instant`.
    pub(super) fn not_before(&mut self, instant: Option<Instant>) {
        if let Some(instant) = instant {
            self.not_before = instant.max(self.not_before);
        }
    }

    /// The kernel has said more of it.
    pub(super) fn look_again_at(&mut self, now: Instant) {
        self.looks_left = LOOKS;
        if !self.lost {
            self.due = self.due.map(|due| due.min(now));
        }
    }

    /// Sysfs says that it stands. Whether it is to be looked at again all the same:
    /// its loss may not have come there yet.
    pub(super) fn look_once_more(&mut self, now: Instant) -> bool {
        if self.lost || self.looks_left == 0 {
            return false;
        }
        self.looks_left -= 1;
        self.due = Some(now + self.between_looks.pause());
        true
    }

    pub(super) fn is_lost_now(&mut self) {
        self.lost = true;
    }

    pub(super) fn was_lost(&self) -> bool {
        self.lost
    }

    pub(super) fn request_logout(&mut self) {
        self.logs_out_first = true;
    }

    pub(super) fn must_log_out(&self) -> bool {
        self.logs_out_first
    }

    /// An attempt begins that is to have ended by then.
    pub(in crate::engine) fn begin(&mut self, ends: Instant) {
        self.tries = self.tries.saturating_add(1);
        self.due = None;
        self.overdue = Some(ends);
    }

    /// When the attempt under way is looked at that does not end.
    pub(super) fn overdue(&self) -> Option<Instant> {
        self.overdue
    }

    /// It was looked at.
    pub(super) fn check_again_at(&mut self, next: Instant) {
        self.overdue = Some(next);
    }

    /// It has ended, and the session was not had back by it.
    pub(in crate::engine) fn end(&mut self, now: Instant) {
        self.logs_out_first = false;
        self.overdue = None;
        self.due = Some(now + jittered(self.between_tries.backoff.pause()));
    }

    /// Whether a failure of this kind is to be told.
    pub(in crate::engine) fn is_news(&mut self, failure: ErrorKind) -> bool {
        self.failure.replace(failure) != Some(failure)
    }

    /// I/O fails by now, so nothing is lost any more by a little more patience.
    pub(super) fn is_first_to_say_spent(&mut self) -> bool {
        self.between_tries.slow_down();
        !std::mem::replace(&mut self.said_spent, true)
    }

    /// The target refuses us, or nothing proves it: that takes another secret, and a try
    /// soon is of no use.
    pub(in crate::engine) fn is_refused(&mut self) {
        self.between_tries.slow_down();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::SessionId;
    use crate::kernel::Roots;

    fn recovery(now: Instant) -> RecoveryState {
        let roots = Roots::below("/nowhere");
        RecoveryState::new(IscsiSession::new(&roots, SessionId(1)), now)
    }

    #[test]
    fn a_loss_that_sysfs_does_not_show_is_looked_for_and_then_forgotten() {
        let start = Instant::now();
        let (mut recovery, mut now) = (recovery(start), start);
        let mut looks = 0;
        while recovery.look_once_more(now) {
            looks += 1;
            let due = recovery.due().unwrap();
            assert!(due > now);
            now = due;
        }
        assert_eq!(looks, LOOKS);
        assert!(now - start > Duration::from_secs(1), "{:?}", now - start);
        // The kernel says it anew.
        recovery.look_again_at(now);
        assert!(recovery.look_once_more(now));
        // Of one that was seen lost, that it stands is the end.
        recovery.is_lost_now();
        assert!(!recovery.look_once_more(now));
    }

    #[test]
    fn tries_come_at_once_then_with_growing_pauses_and_longer_ones_when_io_fails() {
        let now = Instant::now();
        let mut recovery = recovery(now);
        assert_eq!(recovery.due(), Some(now));
        let pause = |recovery: &mut RecoveryState| {
            recovery.begin(now);
            assert_eq!(recovery.due(), None);
            recovery.end(now);
            recovery.due().unwrap() - now
        };
        let pauses: Vec<_> = (0..12).map(|_| pause(&mut recovery)).collect();
        assert!(pauses[0] <= Duration::from_millis(50));
        assert!(pauses[11] >= Duration::from_secs(1));
        assert!(pauses.iter().all(|pause| *pause <= Duration::from_secs(2)));
        assert_eq!(recovery.tries(), 12);
        assert!(recovery.is_first_to_say_spent());
        assert!(!recovery.is_first_to_say_spent());
        let pauses: Vec<_> = (0..12).map(|_| pause(&mut recovery)).collect();
        assert!(pauses[11] >= Duration::from_secs(7));
    }

    #[test]
    fn a_target_that_wants_us_later_is_not_dialled_before() {
        let now = Instant::now();
        let mut recovery = recovery(now);
        let later = now + Duration::from_secs(3);
        recovery.not_before(Some(later));
        recovery.not_before(Some(now));
        recovery.not_before(None);
        assert_eq!(recovery.due(), Some(later));
        // Another word of the same loss, and a try that has failed meanwhile.
        recovery.look_again_at(now);
        assert_eq!(recovery.due(), Some(later));
        recovery.begin(now);
        assert_eq!(recovery.due(), None);
        recovery.end(now);
        assert_eq!(recovery.due(), Some(later));
    }

    #[test]
    fn an_attempt_that_does_not_end_is_looked_at_and_one_that_ended_never() {
        let now = Instant::now();
        let (ends, later) = (now + Duration::from_secs(15), now + Duration::from_secs(60));
        let mut recovery = recovery(now);
        assert_eq!(recovery.overdue(), None);
        recovery.begin(ends);
        assert_eq!(recovery.overdue(), Some(ends));
        recovery.check_again_at(later);
        // None is made beside it.
        assert_eq!((recovery.overdue(), recovery.due()), (Some(later), None));
        recovery.end(now);
        assert_eq!(recovery.overdue(), None);
    }

    #[test]
    fn a_kind_of_failure_is_told_once_until_another_comes() {
        let mut recovery = recovery(Instant::now());
        let kinds = [
            ErrorKind::Unreachable,
            ErrorKind::Unreachable,
            ErrorKind::NotPermitted,
            ErrorKind::Unreachable,
        ];
        let told = kinds.map(|kind| recovery.is_news(kind));
        assert_eq!(told, [true, false, true, true]);
    }
}
