//! The number of worker threads: slow steps must not delay the others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::job::{Place, Priority};
use crate::id::VolumeId;

/// After this time a step's thread no longer counts as given, and another is started where
/// a step waits.
const SLOW: Duration = Duration::from_secs(5);
/// The same for a step that failed before, since it may hang again.
const SLOW_AGAIN: Duration = Duration::from_secs(1);
/// The most threads that are started in place of slow ones.
const MOST_BESIDE: usize = 64;
/// Threads beside the given ones: one for detaches, and one for steps whose obstacle may be
/// gone. No attach takes them.
const RESERVED: usize = 2;

/// The threads, and their steps.
#[derive(Debug, Default)]
pub(super) struct Workers {
    started: usize,
    at: BTreeMap<VolumeId, At>,
    /// Until when no thread is started, after a start that failed.
    none_before: Option<Instant>,
    /// The thread of the session recovery is wanted and not started.
    lacks_recovery: bool,
}

#[derive(Debug)]
struct At {
    began: Instant,
    priority: Priority,
    place: Option<Place>,
}

impl At {
    fn slow_from(&self) -> Instant {
        let is_first = matches!(self.priority, Priority::Detach | Priority::Fresh);
        self.began + if is_first { SLOW } else { SLOW_AGAIN }
    }

    /// The place whose limit it counts for.
    fn counts_at(&self, now: Instant) -> Option<&str> {
        let place = self.place.as_ref()?;
        let counts = place.may_hang || self.began + SLOW_AGAIN <= now;
        counts.then_some(&*place.name)
    }
}

/// The room for further steps beside those under way.
#[derive(Debug)]
pub(super) struct Room {
    given: usize,
    /// The number of steps under way, including slow ones.
    under_way: usize,
    /// The steps under way that are not slow.
    quick: BTreeMap<Priority, usize>,
    /// The steps at each server, target or host that count for its limit. Unblocked steps
    /// (`true`) count apart from the others: what hung before may be over.
    places: BTreeMap<bool, BTreeMap<String, usize>>,
}

impl Room {
    /// Whether a thread is free for a step of this priority. Steps that failed before take at
    /// most half of the threads. A step waits while the steps at its place take half of the
    /// threads, or a quarter if the step is not a first try. The pool keeps its last thread
    /// for first detaches, and the one before it for all detaches and for unblocked steps.
    pub(super) fn is_for(&self, priority: Priority, place: Option<&Place>) -> bool {
        let (all, half) = (self.given, (self.given / 2).max(1));
        let quick = |priorities: &[Priority]| -> usize {
            let counts = priorities
                .iter()
                .filter_map(|priority| self.quick.get(priority));
            counts.sum()
        };
        let coming = quick(&[Priority::Unblocked, Priority::Fresh, Priority::Again]);
        let at_place = place.and_then(|place| {
            let places = self.places.get(&(priority == Priority::Unblocked))?;
            places.get(&place.name).copied()
        });
        let most_at_place = if priority == Priority::Fresh {
            half
        } else {
            (half / 2).max(1)
        };
        let attaches = all + MOST_BESIDE;
        let has_thread = match priority {
            Priority::Detach => true,
            Priority::DetachAgain | Priority::Unblocked => self.under_way < attaches + RESERVED - 1,
            Priority::Fresh | Priority::Again => self.under_way < attaches,
        };
        let is_full = match priority {
            Priority::Detach => quick(&[Priority::Detach]) >= all,
            Priority::DetachAgain => quick(&[Priority::DetachAgain]) >= half,
            Priority::Unblocked => coming > all,
            Priority::Fresh => coming >= all,
            Priority::Again => coming >= all || quick(&[Priority::Again]) >= half,
        };
        has_thread && !is_full && at_place.unwrap_or_default() < most_at_place
    }
}

impl Workers {
    pub(super) fn start_one(&mut self) {
        self.started += 1;
    }

    /// Records that no thread could be started. The loop checks again within [`SLOW_AGAIN`]
    /// while a step waits.
    pub(super) fn fail_to_start(&mut self, now: Instant) {
        self.none_before = Some(now + SLOW_AGAIN);
    }

    /// Whether no worker thread could be started so far.
    pub(super) fn are_none(&self) -> bool {
        self.started == 0
    }

    pub(super) fn want_recovery(&mut self) {
        self.lacks_recovery = true;
    }

    pub(super) fn mark_recovery_started(&mut self) {
        self.lacks_recovery = false;
    }

    pub(super) fn must_start_recovery(&self, now: Instant) -> bool {
        self.lacks_recovery && !self.must_wait(now)
    }

    /// When to try again to start the thread of the session recovery.
    pub(super) fn next_recovery_start(&self) -> Option<Instant> {
        self.none_before.filter(|_| self.lacks_recovery)
    }

    fn must_wait(&self, now: Instant) -> bool {
        self.none_before.is_some_and(|at| now < at)
    }

    pub(super) fn are_idle(&self) -> bool {
        self.at.is_empty()
    }

    pub(super) fn begin(
        &mut self,
        volume: VolumeId,
        priority: Priority,
        place: Option<Place>,
        began: Instant,
    ) {
        let at = At {
            began,
            priority,
            place,
        };
        self.at.insert(volume, at);
    }

    pub(super) fn end(&mut self, volume: &VolumeId) {
        self.at.remove(volume);
    }

    pub(super) fn room(&self, given: usize, now: Instant) -> Room {
        let mut room = Room {
            given,
            under_way: self.at.len(),
            quick: BTreeMap::new(),
            places: BTreeMap::new(),
        };
        for at in self.at.values() {
            if at.slow_from() > now {
                *room.quick.entry(at.priority).or_default() += 1;
            }
            if let Some(place) = at.counts_at(now) {
                let is_unblocked = at.priority == Priority::Unblocked;
                let places = room.places.entry(is_unblocked).or_default();
                *places.entry(place.to_owned()).or_default() += 1;
            }
        }
        room
    }

    /// Whether to start another thread for one of the `waiting` steps: up to `given` and
    /// the extra ones, and no more than there are steps.
    pub(super) fn lack_one(&self, given: usize, waiting: usize, now: Instant) -> bool {
        if self.must_wait(now) {
            return false;
        }
        let are_busy = self.started <= self.at.len();
        let given = given + RESERVED;
        let have_a_step = self.at.len() + waiting;
        self.started < given.min(have_a_step) || are_busy && self.started < given + self.slow(now)
    }

    /// Whether an idle thread must end, since fewer steps are slow now.
    pub(super) fn let_one_go(&mut self, given: usize, now: Instant) -> bool {
        let too_many = self.started > given + RESERVED + self.slow(now);
        self.started -= usize::from(too_many);
        too_many
    }

    /// When the next step may become slow, even one that begins only now.
    pub(super) fn next_slow(&self, now: Instant) -> Instant {
        let slow = self.at.values().map(At::slow_from);
        let next = slow.filter(|at| *at > now).min();
        next.map_or(now + SLOW_AGAIN, |next| next.min(now + SLOW_AGAIN))
    }

    fn slow(&self, now: Instant) -> usize {
        let slow = self.at.values().filter(|at| at.slow_from() <= now);
        slow.count().min(MOST_BESIDE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> VolumeId {
        format!("pvc-{number}").parse().unwrap()
    }

    #[test]
    fn a_thread_that_cannot_be_had_is_tried_for_again_after_a_while() {
        let (mut workers, now) = (Workers::default(), Instant::now());
        assert!(workers.lack_one(2, 1, now));
        workers.fail_to_start(now);
        assert!(!workers.lack_one(2, 1, now), "the loop spins");
        assert!(workers.lack_one(2, 1, workers.next_slow(now)));
    }

    #[test]
    fn no_more_threads_are_started_than_there_are_steps() {
        let (mut workers, now) = (Workers::default(), Instant::now());
        for _ in 0..2 {
            assert!(workers.lack_one(8, 2, now));
            workers.start_one();
        }
        assert!(!workers.lack_one(8, 2, now), "both have a thread");
        workers.begin(id(0), Priority::Fresh, None, now);
        assert!(!workers.lack_one(8, 1, now), "the other will be taken");
        workers.begin(id(1), Priority::Fresh, None, now);
        assert!(workers.lack_one(8, 1, now));
    }

    #[test]
    fn the_thread_that_keeps_sessions_is_tried_for_again_until_it_is_had() {
        let (mut workers, now) = (Workers::default(), Instant::now());
        assert!(!workers.must_start_recovery(now), "an apply keeps none");
        workers.want_recovery();
        assert!(workers.must_start_recovery(now));
        workers.fail_to_start(now);
        assert!(!workers.must_start_recovery(now), "the loop spins");
        let again = workers
            .next_recovery_start()
            .expect("the loop sleeps for ever");
        assert!(workers.must_start_recovery(again));
        workers.mark_recovery_started();
        assert!(!workers.must_start_recovery(again) && workers.next_recovery_start().is_none());
    }

    #[test]
    fn a_detach_has_a_thread_where_attaches_hang_in_all_that_they_may_have() {
        let mut workers = Workers::default();
        let begin = Instant::now();
        let later = begin + SLOW;
        let (given, mut number) = (8, 0);
        let mut begin_those_of = |priority: Priority| {
            while workers.room(given, later).is_for(priority, None) {
                assert!(number < 1000, "without a limit");
                workers.begin(id(number), priority, None, begin);
                number += 1;
            }
            number
        };
        let attaches = begin_those_of(Priority::Fresh);
        assert_eq!(begin_those_of(Priority::Again), attaches);
        let unblocked = begin_those_of(Priority::Unblocked);
        assert_eq!(unblocked, attaches + 1);
        let room = workers.room(given, later);
        assert!(room.is_for(Priority::Detach, None));
        // A thread can be started for it.
        for _ in 0..unblocked {
            workers.start_one();
        }
        assert!(workers.lack_one(given, 1, later));
    }

    #[test]
    fn first_attaches_that_hang_at_one_place_leave_threads_for_another_place() {
        let place = |name: &str| Place {
            name: name.to_owned(),
            may_hang: false,
        };
        let (silent, answers) = (place("silent"), place("answers"));
        let (mut workers, begin) = (Workers::default(), Instant::now());
        for number in 0..8 {
            assert!(
                workers
                    .room(8, begin)
                    .is_for(Priority::Fresh, Some(&silent))
            );
            workers.begin(id(number), Priority::Fresh, Some(silent.clone()), begin);
        }
        let room = workers.room(8, begin + SLOW);
        assert!(!room.is_for(Priority::Fresh, Some(&silent)));
        assert!(room.is_for(Priority::Fresh, Some(&answers)));
    }

    #[test]
    fn another_thread_is_had_for_each_that_hangs_and_goes_when_that_is_over() {
        let mut workers = Workers::default();
        let begin = Instant::now();
        let given = 2 + u32::try_from(RESERVED).unwrap();
        assert!(workers.lack_one(2, 1, begin));
        for number in 0..given {
            workers.start_one();
            workers.begin(id(number), Priority::Fresh, None, begin);
        }
        assert!(!workers.lack_one(2, 1, begin));
        let later = begin + SLOW;
        for number in given..2 * given {
            assert!(workers.lack_one(2, 1, later));
            workers.start_one();
            assert!(!workers.lack_one(2, 1, later), "one has nothing to do");
            workers.begin(id(number), Priority::Fresh, None, later);
        }
        assert!(!workers.lack_one(2, 1, later));
        assert!(!workers.let_one_go(2, later));
        workers.end(&id(0));
        assert!(workers.let_one_go(2, later));
        assert!(!workers.let_one_go(2, later));
    }
}
