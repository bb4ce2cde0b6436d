//! The data that the threads of a reconciler share.

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::event::Event;
use super::followers::{Events, Followers};
use super::options::Options;
use super::state::State;

#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Wakes the loop.
    pub(super) wake: Condvar,
    /// Wakes the workers.
    pub(super) work: Condvar,
    /// Wakes the callers that wait for a volume.
    pub(super) changed: Condvar,
    followers: Followers,
}

impl Shared {
    pub(super) fn new(options: Options) -> Self {
        Self {
            state: Mutex::new(State::new(options)),
            ..Self::default()
        }
    }

    pub(super) fn subscribe(&self) -> Events {
        self.followers.add()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Sends the events of the last change of the state before another thread can change it,
    /// so that they come in the order of the changes.
    pub(super) fn send(
        &self,
        state: MutexGuard<'_, State>,
        events: impl IntoIterator<Item = Event>,
    ) {
        let events = events.into_iter();
        let sent: Vec<_> = events.map(|event| self.followers.send(event)).collect();
        drop(state);
        // A subscriber of the log may ask for the state, so its lock is free by now.
        for event in sent {
            tracing::info!(sequence = event.sequence, %event, "reconciled");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::deadline::Deadline;

    #[test]
    fn events_come_in_the_order_in_which_the_state_changed() {
        const THREADS: u64 = 8;
        // A follower that falls behind by more than 1,024 events loses the oldest.
        const EACH: u64 = 100;
        let shared = Shared::default();
        let mut events = shared.followers.add();
        let change = || {
            for _ in 0..EACH {
                let mut state = shared.state();
                state.note_wakeup();
                let volume = format!("pvc-{}", state.counters().wakeups).parse().unwrap();
                shared.send(state, [Event::Healed { volume }]);
                thread::yield_now();
            }
        };
        let limit = Deadline::after(Duration::from_secs(60));
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(change);
            }
            for number in 1..=THREADS * EACH {
                let event = events.next(limit).expect("in time");
                assert_eq!(event.sequence, number);
                assert_eq!(event.to_string(), format!("pvc-{number}: serves again"));
            }
        });
    }
}
