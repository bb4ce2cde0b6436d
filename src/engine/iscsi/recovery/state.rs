//! The state of a lost session, and when to look at it next.

use std::time::{Duration, Instant};

use crate::deadline::{Backoff, jittered};
use crate::error::ErrorKind;
use crate::iscsi::IscsiSession;

/// How often to read sysfs again, over about two seconds, for a session whose loss the
/// kernel has reported and sysfs does not show yet.
const MAX_LOOKS: u32 = 14;

#[derive(Debug)]
pub(super) struct RecoveryState {
    session: IscsiSession,
    /// When the kernel reported the loss.
    loss_reported: Option<Instant>,
    /// When a notice last came during an attempt.
    noticed: Option<Instant>,
    /// Whether sysfs shows the loss too.
    lost: bool,
    looks_left: u32,
    /// When to look at the session; `None` while an attempt is under way.
    due: Option<Instant>,
    /// When the attempt under way should have ended or, after that, when to check it
    /// again.
    overdue: Option<Instant>,
    /// No attempt starts before this.
    not_before: Instant,
    between_looks: Backoff,
    between_tries: Pauses,
    tries: u32,
    /// The kind of the last reported failure.
    failure: Option<ErrorKind>,
    reported_budget_spent: bool,
    /// The target asked for a logout.
    logs_out_first: bool,
}

/// The pauses between attempts: they grow, and may switch to longer ones permanently.
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
            loss_reported: None,
            noticed: None,
            lost: false,
            looks_left: MAX_LOOKS,
            due: Some(now),
            overdue: None,
            not_before: now,
            between_looks: Backoff::new(Duration::from_millis(5), Duration::from_millis(250)),
            between_tries: Pauses::quick(),
            tries: 0,
            failure: None,
            reported_budget_spent: false,
            logs_out_first: false,
        }
    }

    pub(in crate::engine) fn session(&self) -> &IscsiSession {
        &self.session
    }

    /// When to look at the session; `None` while an attempt is under way.
    pub(in crate::engine) fn due(&self) -> Option<Instant> {
        self.due.map(|due| due.max(self.not_before))
    }

    /// Records that the kernel reported the loss; the first report counts.
    pub(in crate::engine) fn record_loss(&mut self, now: Instant) {
        self.loss_reported.get_or_insert(now);
    }

    pub(in crate::engine) fn loss_reported(&self) -> Option<Instant> {
        self.loss_reported
    }

    pub(in crate::engine) fn tries(&self) -> u32 {
        self.tries
    }

    /// Delays the next attempt until `instant`.
    pub(super) fn delay_until(&mut self, instant: Option<Instant>) {
        if let Some(instant) = instant {
            self.not_before = instant.max(self.not_before);
        }
    }

    /// Restarts the looks after a further notice of the kernel.
    pub(super) fn look_again_at(&mut self, now: Instant) {
        self.looks_left = MAX_LOOKS;
        if self.due.is_none() {
            self.noticed = Some(now);
        }
        if !self.lost {
            self.due = self.due.map(|due| due.min(now));
        }
    }

    /// Whether to look again though sysfs shows the session as logged in: it may not show
    /// the loss yet.
    pub(super) fn look_once_more(&mut self, now: Instant) -> bool {
        if self.lost || self.looks_left == 0 {
            return false;
        }
        self.looks_left -= 1;
        self.due = Some(now + self.between_looks.pause());
        true
    }

    pub(super) fn set_lost(&mut self) {
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

    /// Records the start of an attempt, which should end by `ends`.
    pub(in crate::engine) fn begin_attempt(&mut self, ends: Instant) {
        self.tries = self.tries.saturating_add(1);
        self.noticed = None;
        self.due = None;
        self.overdue = Some(ends);
    }

    /// When to check an attempt that does not end; `None` without an attempt.
    pub(super) fn overdue(&self) -> Option<Instant> {
        self.overdue
    }

    pub(super) fn check_again_at(&mut self, next: Instant) {
        self.overdue = Some(next);
    }

    /// Records an attempt that ended without recovering the session.
    pub(in crate::engine) fn end_attempt(&mut self, now: Instant) {
        self.logs_out_first = false;
        self.overdue = None;
        self.due = Some(now + jittered(self.between_tries.backoff.pause()));
    }

    /// Whether a notice came during the last attempt.
    pub(super) fn was_noticed(&self) -> bool {
        self.noticed.is_some()
    }

    /// Records an attempt that recovered the session, which is lost again by now.
    pub(super) fn begin_again(&mut self, now: Instant) {
        self.end_attempt(now);
        self.loss_reported = self.noticed;
    }

    /// Records a failure. Returns whether its kind is new, so that the failure must be
    /// reported.
    pub(in crate::engine) fn record_failure(&mut self, failure: ErrorKind) -> bool {
        self.failure.replace(failure) != Some(failure)
    }

    /// Whether to report now that the recovery timeout has passed. I/O fails by now, so
    /// longer pauses cost nothing.
    pub(super) fn first_budget_report(&mut self) -> bool {
        self.between_tries.slow_down();
        !std::mem::replace(&mut self.reported_budget_spent, true)
    }

    /// Records that the target refuses the login or fails to prove its identity. Only
    /// another secret helps then, so the attempts slow down.
    pub(in crate::engine) fn note_refusal(&mut self) {
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
        assert_eq!(looks, MAX_LOOKS);
        assert!(now - start > Duration::from_secs(1), "{:?}", now - start);
        // The kernel reports the loss again.
        recovery.look_again_at(now);
        assert!(recovery.look_once_more(now));
        // A session that was lost and is logged in again needs no further look.
        recovery.set_lost();
        assert!(!recovery.look_once_more(now));
    }

    #[test]
    fn the_first_attempt_is_immediate_and_the_pauses_grow_more_when_io_fails() {
        let now = Instant::now();
        let mut recovery = recovery(now);
        assert_eq!(recovery.due(), Some(now));
        let pause = |recovery: &mut RecoveryState| {
            recovery.begin_attempt(now);
            assert_eq!(recovery.due(), None);
            recovery.end_attempt(now);
            recovery.due().unwrap() - now
        };
        let pauses: Vec<_> = (0..12).map(|_| pause(&mut recovery)).collect();
        assert!(pauses[0] <= Duration::from_millis(50));
        assert!(pauses[11] >= Duration::from_secs(1));
        // A pause of the longest length is shortened too.
        assert!(pauses.iter().all(|pause| *pause < Duration::from_secs(2)));
        assert_eq!(recovery.tries(), 12);
        assert!(recovery.first_budget_report());
        assert!(!recovery.first_budget_report());
        let pauses: Vec<_> = (0..12).map(|_| pause(&mut recovery)).collect();
        assert!(pauses[11] >= Duration::from_secs(7));
    }

    #[test]
    fn a_target_that_asks_for_a_later_login_is_not_dialled_before() {
        let now = Instant::now();
        let mut recovery = recovery(now);
        let later = now + Duration::from_secs(3);
        recovery.delay_until(Some(later));
        recovery.delay_until(Some(now));
        recovery.delay_until(None);
        assert_eq!(recovery.due(), Some(later));
        // Neither a further notice nor a failed attempt shortens the wait.
        recovery.look_again_at(now);
        assert_eq!(recovery.due(), Some(later));
        recovery.begin_attempt(now);
        assert_eq!(recovery.due(), None);
        recovery.end_attempt(now);
        assert_eq!(recovery.due(), Some(later));
    }

    #[test]
    fn only_an_unfinished_attempt_becomes_overdue() {
        let now = Instant::now();
        let (ends, later) = (now + Duration::from_secs(15), now + Duration::from_secs(60));
        let mut recovery = recovery(now);
        assert_eq!(recovery.overdue(), None);
        recovery.begin_attempt(ends);
        assert_eq!(recovery.overdue(), Some(ends));
        recovery.check_again_at(later);
        // No second attempt starts beside it.
        assert_eq!((recovery.overdue(), recovery.due()), (Some(later), None));
        recovery.end_attempt(now);
        assert_eq!(recovery.overdue(), None);
    }

    #[test]
    fn a_kind_of_failure_is_reported_once_until_another_comes() {
        let mut recovery = recovery(Instant::now());
        let kinds = [
            ErrorKind::Unreachable,
            ErrorKind::Unreachable,
            ErrorKind::NotPermitted,
            ErrorKind::Unreachable,
        ];
        let is_new = kinds.map(|kind| recovery.record_failure(kind));
        assert_eq!(is_new, [true, false, true, true]);
    }
}
