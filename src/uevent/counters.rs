//! The hub's counters.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What a hub has counted since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Counters {
    /// Events read, from the kernel and from udev.
    pub events: u64,
    /// Datagrams passed over: malformed, not from the kernel, or with a device
    /// path longer than the kernel can send.
    pub foreign_messages: u64,
    /// Events delivered incomplete, because a part was longer, or there were
    /// more parts, than the kernel or udev's own rules produce.
    pub cut: u64,
    /// Checks of a socket that found that its buffer had been full since the
    /// last check.
    pub overruns: u64,
    /// Resyncs delivered to watches. A watch with an unread resync gets no
    /// other.
    pub resyncs: u64,
    /// Current watches.
    pub watches: u64,
    /// Waits of watches that ended with a notice. Without events, each pause
    /// between two looks at sysfs counts as one.
    pub waits: u64,
    /// The total time of these waits; `waited_seconds` when serialised.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "waited_seconds",
            serialize_with = "crate::deadline::as_seconds"
        )
    )]
    pub waited: Duration,
    /// The longest of these waits; `longest_wait_seconds` when serialised.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "longest_wait_seconds",
            serialize_with = "crate::deadline::as_seconds"
        )
    )]
    pub longest_wait: Duration,
    /// Waits of watches that ended at their deadline.
    pub waits_in_vain: u64,
}

/// The counters while they count.
#[derive(Debug, Default)]
pub(super) struct Counts {
    events: AtomicU64,
    foreign_messages: AtomicU64,
    cut: AtomicU64,
    overruns: AtomicU64,
    resyncs: AtomicU64,
    waits: AtomicU64,
    /// In microseconds. Ten thousand constant waiters fill it in 58 years.
    waited: AtomicU64,
    longest_wait: AtomicU64,
    waits_in_vain: AtomicU64,
}

fn increment(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

impl Counts {
    pub(super) fn event(&self) {
        increment(&self.events);
    }

    pub(super) fn foreign_message(&self) {
        increment(&self.foreign_messages);
    }

    pub(super) fn cut(&self) {
        increment(&self.cut);
    }

    pub(super) fn overrun(&self) {
        increment(&self.overruns);
    }

    pub(super) fn resyncs(&self, handed: u64) {
        self.resyncs.fetch_add(handed, Ordering::Relaxed);
    }

    pub(super) fn wait(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        increment(&self.waits);
        self.waited.fetch_add(micros, Ordering::Relaxed);
        self.longest_wait.fetch_max(micros, Ordering::Relaxed);
    }

    /// Counts a wait that ended at its deadline.
    pub(super) fn wait_in_vain(&self) {
        increment(&self.waits_in_vain);
    }

    pub(super) fn read(&self, watches: u64) -> Counters {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            events: count(&self.events),
            foreign_messages: count(&self.foreign_messages),
            cut: count(&self.cut),
            overruns: count(&self.overruns),
            resyncs: count(&self.resyncs),
            watches,
            waits: count(&self.waits),
            waited: Duration::from_micros(count(&self.waited)),
            longest_wait: Duration::from_micros(count(&self.longest_wait)),
            waits_in_vain: count(&self.waits_in_vain),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_counted_with_their_time_and_the_longest_of_them() {
        let counts = Counts::default();
        for millis in [5, 40, 3] {
            counts.wait(Duration::from_millis(millis));
        }
        counts.wait_in_vain();
        let read = counts.read(7);
        assert_eq!((read.waits, read.waits_in_vain, read.watches), (3, 1, 7));
        assert_eq!(read.waited, Duration::from_millis(48));
        assert_eq!(read.longest_wait, Duration::from_millis(40));
    }

    #[cfg(feature = "serde")]
    #[test]
    fn times_are_seconds_for_people_and_programs() {
        let counts = Counts::default();
        counts.wait(Duration::from_millis(1500));
        let json = serde_json::to_value(counts.read(0)).unwrap();
        assert_eq!(json["waited_seconds"], 1.5);
        assert_eq!(json["longest_wait_seconds"], 1.5);
    }
}
