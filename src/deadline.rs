//! The caller's time limit, and the pause between looks where nothing wakes us.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longer than anything waits, and short enough for the clock.
const FOREVER: Duration = Duration::from_hours(30 * 365 * 24);

/// The instant until which a call may wait. Every call that can wait takes
/// one; it covers the whole call, not each step of it.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    start: Instant,
    end: Instant,
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
        Self { start, end }
    }

    /// Time left; zero when the deadline has passed.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Time since the deadline was set.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// A deadline when half of the time that is left has passed.
    #[must_use]
    pub fn half(&self) -> Self {
        Self::after(self.remaining() / 2)
    }

    /// Whether the deadline has passed.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.remaining().is_zero()
    }
}

/// Pauses that double from a shortest to a longest, for the places where the
/// kernel offers nothing to wait on.
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

    /// The next pause.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.longest);
        pause
    }
}

/// Between half of `pause` and all of it, so that those that failed together do not all
/// try again together.
#[must_use]
pub(crate) fn jittered(pause: Duration) -> Duration {
    let noise = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| now.subsec_nanos());
    pause / 2 + (pause / 2).mul_f64(f64::from(noise % 1000) / 1000.0)
}

#[cfg(test)]
mod tests {
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
