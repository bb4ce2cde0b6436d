//! One waiter's unread notices. The queue is bounded, and takes no memory until
//! a notice comes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::event::{Event, Notice};

/// How many events a waiter may leave unread. The next one becomes a resync, so
/// a slow waiter costs bounded memory and learns of every loss.
pub(super) const LONGEST: usize = 255;

/// The hub's thread fills it and one waiter empties it. Each holds its lock
/// only for one notice. std's bounded channel would do the same, but allocates
/// its 256 slots at once, about 6 KiB for each waiter.
#[derive(Debug, Default)]
pub(super) struct Queue {
    inner: Mutex<Inner>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    notices: VecDeque<Notice>,
    /// A resync is among the notices. The waiter that reads it looks at
    /// everything that was lost until then, so a second resync would add
    /// nothing.
    resync_unread: bool,
    /// A waiter is blocked; otherwise no notify is needed.
    waiting: bool,
    closed: bool,
}

impl Queue {
    /// Appends an event. Returns whether it became a resync.
    pub(super) fn push(&self, event: &Arc<Event>) -> bool {
        let mut inner = self.inner.lock();
        if inner.notices.len() >= LONGEST {
            return self.resync_in(inner);
        }
        inner.notices.push_back(Notice::Event(Arc::clone(event)));
        self.wake(inner);
        false
    }

    /// Appends a resync, unless one is unread. Returns whether it did.
    pub(super) fn resync(&self) -> bool {
        self.resync_in(self.inner.lock())
    }

    /// Tells the waiter, by one resync, that no more events come.
    pub(super) fn close(&self) {
        let mut inner = self.inner.lock();
        inner.closed = true;
        self.resync_in(inner);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.inner.lock().closed
    }

    /// The next notice; waits for it no longer than `wait`.
    pub(super) fn take(&self, wait: Duration) -> Option<Notice> {
        let mut inner = self.inner.lock();
        if inner.notices.is_empty() && !wait.is_zero() {
            inner.waiting = true;
            let is_empty = |inner: &mut Inner| inner.notices.is_empty();
            self.filled.wait_while_for(&mut inner, is_empty, wait);
            inner.waiting = false;
        }
        let notice = inner.notices.pop_front();
        if matches!(notice, Some(Notice::Resync)) {
            inner.resync_unread = false;
        }
        notice
    }

    fn resync_in(&self, mut inner: MutexGuard<'_, Inner>) -> bool {
        if inner.resync_unread {
            return false;
        }
        inner.resync_unread = true;
        inner.notices.push_back(Notice::Resync);
        self.wake(inner);
        true
    }

    /// Releases the lock first, or the woken waiter would block on it.
    fn wake(&self, inner: MutexGuard<'_, Inner>) {
        let waiting = inner.waiting;
        drop(inner);
        if waiting {
            self.filled.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::uevent::event::tests::event;

    const NOW: Duration = Duration::ZERO;

    fn kind(notice: Option<&Notice>) -> &'static str {
        match notice {
            Some(Notice::Event(_)) => "event",
            Some(Notice::Resync) => "resync",
            None => "nothing",
        }
    }

    fn read(queue: &Queue) -> &'static str {
        kind(queue.take(NOW).as_ref())
    }

    #[test]
    fn a_queue_that_nothing_has_come_into_has_allocated_nothing() {
        let queue = Queue::default();
        assert_eq!(read(&queue), "nothing");
        assert_eq!(queue.inner.lock().notices.capacity(), 0);
    }

    #[test]
    fn a_full_queue_keeps_what_it_has_and_ends_with_one_resync() {
        let (queue, event) = (Queue::default(), Arc::new(event("/x")));
        for _ in 0..LONGEST {
            assert!(!queue.push(&event));
        }
        assert!(queue.push(&event));
        assert!(!queue.push(&event));
        assert!(!queue.resync());
        for _ in 0..LONGEST {
            assert_eq!(read(&queue), "event");
        }
        assert_eq!(read(&queue), "resync");
        assert_eq!(read(&queue), "nothing");
    }

    #[test]
    fn a_second_resync_comes_only_when_the_first_was_read() {
        let queue = Queue::default();
        let given = (0..1000).filter(|_| queue.resync()).count();
        assert_eq!((given, queue.inner.lock().notices.len()), (1, 1));
        assert_eq!(read(&queue), "resync");
        assert!(queue.resync());
    }

    #[test]
    fn events_after_an_unread_resync_come_after_it() {
        let queue = Queue::default();
        queue.resync();
        queue.push(&event("/x").into());
        assert_eq!(read(&queue), "resync");
        assert_eq!(read(&queue), "event");
    }

    #[test]
    fn a_sleeping_reader_is_woken_by_an_event_and_by_the_end() {
        let queue = Queue::default();
        let (start, long) = (Instant::now(), Duration::from_secs(20));
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| (queue.take(long), queue.take(long)));
            while !queue.inner.lock().waiting {
                std::thread::yield_now();
            }
            queue.push(&event("/x").into());
            while !queue.inner.lock().waiting {
                std::thread::yield_now();
            }
            queue.close();
            let (first, second) = sleeper.join().unwrap();
            let read = (kind(first.as_ref()), kind(second.as_ref()));
            assert_eq!(read, ("event", "resync"));
        });
        assert!(queue.is_closed());
        // The close ended the wait, not its deadline.
        assert!(start.elapsed() < long);
    }
}
