//! The followers of a reconciler's events, and the order of the events.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use parking_lot::{Condvar, Mutex};

use super::event::Event;
use crate::deadline::Deadline;

/// An event with its sequence number in its reconciler.
#[derive(Debug, Clone, serde::Serialize)]
#[non_exhaustive]
pub struct SequencedEvent {
    /// Counts the reconciler's events from 1, in the order in which its state changed.
    /// For [`Event::Missed`] it is the number of the last dropped event.
    pub sequence: u64,
    /// When it happened, by the machine's clock. In UTC when serialised.
    #[serde(serialize_with = "as_text")]
    pub time: SystemTime,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

impl fmt::Display for SequencedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.event.fmt(f)
    }
}

fn as_text<S: serde::Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_millis(*time))
}

/// How many events one follower may leave unread. Beyond that the oldest are dropped and
/// counted, since newer events say more.
const LONGEST: usize = 1024;

/// The events for one follower. Dropping it ends the delivery.
#[derive(Debug)]
pub struct Events(Arc<Queue>);

#[derive(Debug, Default)]
struct Queue {
    inner: Mutex<Inner>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    events: VecDeque<SequencedEvent>,
    missed: Option<SequencedEvent>,
    closed: bool,
}

impl Inner {
    fn drop_oldest(&mut self) {
        let Some(oldest) = self.events.pop_front() else {
            return;
        };
        let before = match self.missed.take().map(|missed| missed.event) {
            Some(Event::Missed { count }) => count,
            _ => 0,
        };
        let event = Event::Missed { count: before + 1 };
        self.missed = Some(SequencedEvent { event, ..oldest });
    }
}

impl Events {
    /// Waits for the next event; `None` when the deadline has passed, or when the
    /// reconciler is gone and all events are read.
    pub fn next(&mut self, deadline: Deadline) -> Option<SequencedEvent> {
        let idle =
            |inner: &mut Inner| inner.events.is_empty() && inner.missed.is_none() && !inner.closed;
        let mut inner = self.0.inner.lock();
        loop {
            let filled = &self.0.filled;
            filled.wait_while_for(&mut inner, idle, deadline.max_sleep());
            if deadline.has_passed() || !idle(&mut inner) {
                break;
            }
        }
        inner.missed.take().or_else(|| inner.events.pop_front())
    }
}

/// All followers.
#[derive(Debug, Default)]
pub(super) struct Followers(Mutex<Queues>);

#[derive(Debug, Default)]
struct Queues {
    last_sequence: u64,
    all: Vec<Weak<Queue>>,
}

impl Followers {
    pub(super) fn add(&self) -> Events {
        let queue = Arc::<Queue>::default();
        self.0.lock().all.push(Arc::downgrade(&queue));
        Events(queue)
    }

    /// Sends the event to all followers. The caller holds the lock of the state that
    /// changed, so the events come in the order of the changes.
    pub(super) fn send(&self, event: Event) -> SequencedEvent {
        let mut queues = self.0.lock();
        queues.last_sequence += 1;
        let event = SequencedEvent {
            sequence: queues.last_sequence,
            time: SystemTime::now(),
            event,
        };
        queues.all.retain(|follower| {
            let Some(queue) = follower.upgrade() else {
                return false;
            };
            let mut inner = queue.inner.lock();
            if inner.events.len() >= LONGEST {
                inner.drop_oldest();
            }
            inner.events.push_back(event.clone());
            drop(inner);
            queue.filled.notify_one();
            true
        });
        event
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        for queue in self.0.lock().all.iter().filter_map(Weak::upgrade) {
            queue.inner.lock().closed = true;
            queue.filled.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn healed(number: usize) -> Event {
        Event::Healed {
            volume: format!("pvc-{number}").parse().unwrap(),
        }
    }

    #[test]
    fn a_follower_that_does_not_read_gets_the_newest_events_and_the_number_of_missed_ones() {
        let followers = Followers::default();
        let (mut slow, now) = (followers.add(), Deadline::after(Duration::ZERO));
        for number in 0..LONGEST + 5 {
            followers.send(healed(number));
        }
        let missed = slow.next(now).unwrap();
        assert!(matches!(missed.event, Event::Missed { count: 5 }));
        assert_eq!(missed.sequence, 5);
        let read: Vec<SequencedEvent> = std::iter::from_fn(|| slow.next(now)).collect();
        assert_eq!(read.len(), LONGEST);
        assert_eq!(read[0].to_string(), "pvc-5: serves again");
        let numbers = read.iter().map(|event| event.sequence);
        assert!(numbers.eq(6..=u64::try_from(LONGEST).unwrap() + 5));
        assert!(slow.next(now).is_none());
    }

    #[test]
    fn a_follower_reads_the_events_that_are_left_after_the_reconciler_is_gone() {
        let followers = Followers::default();
        let mut events = followers.add();
        followers.send(healed(1));
        drop(followers);
        let long = Deadline::after(Duration::from_secs(60));
        assert!(events.next(long).is_some());
        assert!(events.next(long).is_none());
        assert!(!long.has_passed());
    }

    #[test]
    fn an_event_in_json_has_its_number_and_its_time_in_utc() {
        let followers = Followers::default();
        let sent = followers.send(healed(1));
        let json = serde_json::to_value(&sent).unwrap();
        assert_eq!(json["sequence"], 1);
        assert_eq!(json["event"], "healed");
        let time = json["time"].as_str().unwrap();
        let read = humantime::parse_rfc3339(time).unwrap();
        let lost = sent.time.duration_since(read).unwrap();
        assert!(
            time.ends_with('Z') && lost < Duration::from_millis(1),
            "{time}"
        );
    }
}
