//! The caller's time limit, and the pauses between checks when nothing wakes the caller.

mod cancel;
#[cfg(feature = "serde")]
mod seconds;

use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longer than any wait, and short enough for the clock.
const FOREVER: Duration = Duration::from_hours(30 * 365 * 24);

/// How long a wait sleeps before it checks whether its call is cancelled.
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// How long a cancelled call may roll back what it has done. A slow array and a slow udev
/// take a few seconds.
const ROLLBACK_LIMIT: Duration = Duration::from_secs(15);

pub use cancel::Cancel;
use cancel::Token;
#[cfg(feature = "serde")]
pub(crate) use seconds::as_seconds;

/// The instant until which a call may wait. Every call that can wait takes
/// one; it covers the whole call, not each step of it.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    start: Instant,
    end: Instant,
    cancel: Option<Token>,
}

impl Deadline {
    /// A deadline `limit` from now. A limit too long for the clock becomes 30
    /// years.
    #[must_use]
    pub fn after(limit: Duration) -> Self {
        let start = Instant::now();
        let end = start
            .checked_add(limit)
            .unwrap_or_else(|| start + limit.min(FOREVER));
        Self {
            start,
            end,
            cancel: None,
        }
    }

    /// The same deadline, which also passes as soon as `cancel` is used. The waits of the
    /// call notice that within 50 ms.
    #[must_use]
    pub fn cancelled_by(self, cancel: &Cancel) -> Self {
        let cancel = Some(cancel.token());
        Self { cancel, ..self }
    }

    /// Whether the call was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(Token::is_cancelled)
    }

    /// The same deadline, but no cancellation ends it.
    #[must_use]
    pub(crate) fn despite_cancel(self) -> Self {
        let cancel = None;
        Self { cancel, ..self }
    }

    /// The deadline for rolling back what the call has done: the rest of its time, or at
    /// most 15 seconds of it if the caller has cancelled the call.
    #[must_use]
    pub(crate) fn for_rollback(self) -> Self {
        let limit = if self.is_cancelled() {
            ROLLBACK_LIMIT
        } else {
            FOREVER
        };
        self.despite_cancel().at_most(limit)
    }

    /// Time left; zero when the deadline has passed.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.is_cancelled() {
            return Duration::ZERO;
        }
        self.end.saturating_duration_since(Instant::now())
    }

    /// How long a wait may sleep before it checks the deadline again: the remaining time,
    /// but at most 50 ms if the call can be cancelled.
    #[must_use]
    pub(crate) fn max_sleep(&self) -> Duration {
        match self.cancel {
            Some(_) => self.remaining().min(CANCEL_CHECK_INTERVAL),
            None => self.remaining(),
        }
    }

    /// Sleeps for `pause`, or until the deadline has passed.
    pub(crate) fn pause(&self, pause: Duration) {
        let pause = self.at_most(pause);
        while !pause.has_passed() {
            thread::park_timeout(pause.max_sleep());
        }
    }

    /// A deadline `limit` from now, or this one if it is sooner.
    #[must_use]
    pub(crate) fn at_most(&self, limit: Duration) -> Self {
        let cancel = self.cancel;
        Self {
            cancel,
            ..Self::after(self.remaining().min(limit))
        }
    }

    /// Time since the deadline was set.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// A deadline at half of the remaining time.
    #[must_use]
    pub fn half(&self) -> Self {
        self.at_most(self.remaining() / 2)
    }

    /// Whether the deadline has passed.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.remaining().is_zero()
    }
}

/// Pauses that double from a shortest to a longest, for conditions that the kernel does
/// not notify.
#[derive(Debug, Clone)]
pub struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    /// Starts at `shortest` and doubles up to `longest`, or up to 30 years.
    #[must_use]
    pub fn new(shortest: Duration, longest: Duration) -> Self {
        let longest = longest.min(FOREVER);
        Self {
            next: shortest.min(longest),
            longest,
        }
    }

    /// For a state that the kernel changes within milliseconds: 1 to 50 ms.
    pub(crate) fn for_kernel_state() -> Self {
        Self::new(Duration::from_millis(1), Duration::from_millis(50))
    }

    /// For a lock: 1 to 20 ms.
    pub(crate) fn for_lock() -> Self {
        Self::new(Duration::from_millis(1), Duration::from_millis(20))
    }

    /// For another process, such as multipathd, that is done in seconds: 5 to 500 ms.
    pub(crate) fn for_other_process() -> Self {
        Self::new(Duration::from_millis(5), Duration::from_millis(500))
    }

    /// The next pause.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.longest);
        pause
    }
}

/// A random time between half of `pause` and all of it, so that callers that failed
/// together do not all retry together.
#[must_use]
pub(crate) fn jittered(pause: Duration) -> Duration {
    let noise = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| now.subsec_nanos());
    pause / 2 + (pause / 2).mul_f64(f64::from(noise % 1000) / 1000.0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_deadline_beyond_the_clock_is_far_away_and_does_not_panic() {
        let deadline = Deadline::after(Duration::MAX);
        assert!(deadline.remaining() > Duration::from_hours(1));
    }

    #[test]
    fn a_deadline_of_nothing_has_passed() {
        assert!(Deadline::after(Duration::ZERO).has_passed());
    }

    #[test]
    fn half_of_a_deadline_leaves_the_other_half() {
        let deadline = Deadline::after(Duration::from_secs(100));
        let half = deadline.half().remaining();
        assert!(half <= Duration::from_secs(50) && half > Duration::from_secs(40));
    }

    #[test]
    fn a_call_that_is_cancelled_has_no_time_left_and_its_rollback_has() {
        let cancel = Cancel::new();
        let deadline = Deadline::after(Duration::from_secs(100)).cancelled_by(&cancel);
        let part = deadline.half().at_most(Duration::from_secs(60));
        assert!(!part.has_passed());
        assert!(deadline.max_sleep() < Duration::from_secs(1));
        cancel.clone().cancel();
        assert!(deadline.has_passed() && deadline.is_cancelled());
        assert!(part.has_passed() && part.half().is_cancelled());
        let rollback = deadline.for_rollback();
        assert!(!rollback.has_passed() && rollback.remaining() <= ROLLBACK_LIMIT);
    }

    #[test]
    fn a_pause_ends_where_its_call_is_cancelled() {
        let cancel = Cancel::new();
        let pause = Duration::from_secs(60);
        let deadline = Deadline::after(2 * pause).cancelled_by(&cancel);
        let cancels = thread::spawn(move || {
            // The pause has begun by then.
            Deadline::after(pause).pause(Duration::from_millis(200));
            cancel.cancel();
        });
        deadline.pause(pause);
        assert!(deadline.is_cancelled() && deadline.elapsed() < pause / 2);
        cancels.join().unwrap();
    }

    #[test]
    fn a_jittered_pause_is_shorter_than_it_was_by_half_at_most_and_differs_each_time() {
        let pause = Duration::from_secs(3600);
        let pauses: BTreeSet<Duration> = (0..100).map(|_| jittered(pause)).collect();
        assert!(pauses.len() > 1, "{pauses:?}");
        let expected = pause / 2..pause;
        assert!(pauses.iter().all(|it| expected.contains(it)), "{pauses:?}");
    }

    #[test]
    fn a_pause_is_never_too_long_for_the_clock() {
        let mut backoff = Backoff::new(Duration::MAX, Duration::MAX);
        assert!(Instant::now().checked_add(backoff.pause()).is_some());
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(5));
        let pauses: Vec<_> = (0..5).map(|_| backoff.pause().as_millis()).collect();
        assert_eq!(pauses, [1, 2, 4, 5, 5]);
    }
}
