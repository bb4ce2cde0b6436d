//! How many threads there are to be: what takes long keeps nobody waiting.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::id::VolumeId;

/// After this long a step's thread no longer counts among those that were given, and
/// another is started in its place where something waits for one.
const SLOW: Duration = Duration::from_secs(5);

/// The threads, and when the steps began that they are at.
#[derive(Debug, Default)]
pub(super) struct Workers {
    started: usize,
    at: BTreeMap<VolumeId, Instant>,
}

impl Workers {
    pub(super) fn start_one(&mut self) {
        self.started += 1;
    }

    pub(super) fn are_idle(&self) -> bool {
        self.at.is_empty()
    }

    pub(super) fn begin(&mut self, volume: VolumeId, now: Instant) {
        self.at.insert(volume, now);
    }

    pub(super) fn end(&mut self, volume: &VolumeId) {
        self.at.remove(volume);
    }

    /// Whether, of `given` threads, so many hang that another is to be started.
    pub(super) fn lack_one(&self, given: usize, now: Instant) -> bool {
        self.started < given + self.slow(now)
    }

    /// Whether one that has nothing to do is to go, since fewer hang by now.
    pub(super) fn let_one_go(&mut self, given: usize, now: Instant) -> bool {
        let too_many = self.started > given + self.slow(now);
        self.started -= usize::from(too_many);
        too_many
    }

    /// When the next step may be slow.
    pub(super) fn next_slow(&self, now: Instant) -> Instant {
        let slow = self.at.values().map(|began| *began + SLOW);
        slow.filter(|at| *at > now).min().unwrap_or(now + SLOW)
    }

    fn slow(&self, now: Instant) -> usize {
        let is_slow = |began: &&Instant| now.duration_since(**began) >= SLOW;
        self.at.values().filter(is_slow).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> VolumeId {
        format!("pvc-{number}").parse().unwrap()
    }

    #[test]
    fn another_thread_is_had_for_each_that_hangs_and_goes_when_that_is_over() {
        let mut workers = Workers::default();
        let begin = Instant::now();
        assert!(workers.lack_one(2, begin));
        for number in 0..2 {
            workers.start_one();
            workers.begin(id(number), begin);
        }
        assert!(!workers.lack_one(2, begin));
        assert_eq!(workers.next_slow(begin), begin + SLOW);
        let later = begin + SLOW;
        for number in 2..4 {
            assert!(workers.lack_one(2, later));
            workers.start_one();
            workers.begin(id(number), later);
        }
        assert!(!workers.lack_one(2, later));
        assert!(!workers.let_one_go(2, later));
        workers.end(&id(0));
        assert!(workers.let_one_go(2, later));
        assert!(!workers.let_one_go(2, later));
    }
}
