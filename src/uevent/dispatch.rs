//! From an event to those who wait for it, in time that does not depend on how
//! many wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::event::Event;
use super::watch::Notice;

/// Notices a waiter may leave unread. Past that it gets a resync, so a slow
/// waiter costs bounded memory and loses nothing.
const QUEUE: usize = 256;

pub(super) type WaiterId = u64;

/// The waiters, by the path component that each watches.
#[derive(Debug, Default)]
pub(super) struct Dispatch {
    waiters: Mutex<Waiters>,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Waiters {
    next: WaiterId,
    by_id: HashMap<WaiterId, Waiter>,
    by_component: HashMap<String, Vec<WaiterId>>,
    of_everything: Vec<WaiterId>,
}

#[derive(Debug)]
struct Waiter {
    /// `None` watches everything.
    component: Option<String>,
    notices: SyncSender<Notice>,
    lost: AtomicBool,
}

#[derive(Debug, Default)]
struct Counts {
    events: AtomicU64,
    strangers: AtomicU64,
    overruns: AtomicU64,
    resyncs: AtomicU64,
}

/// What the hub has counted since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Counters {
    /// Events read.
    pub events: u64,
    /// Datagrams passed over: malformed, or not from the kernel.
    pub strangers: u64,
    /// Times that a socket's buffer was full.
    pub overruns: u64,
    /// Resyncs handed to waiters.
    pub resyncs: u64,
}

impl Dispatch {
    pub(super) fn subscribe(&self, component: Option<&str>) -> (WaiterId, Receiver<Notice>) {
        let (notices, receiver) = sync_channel(QUEUE);
        let waiters = &mut *self.lock();
        let id = waiters.next;
        waiters.next += 1;
        match component {
            Some(component) => waiters
                .by_component
                .entry(component.to_owned())
                .or_default()
                .push(id),
            None => waiters.of_everything.push(id),
        }
        waiters.by_id.insert(
            id,
            Waiter {
                component: component.map(str::to_owned),
                notices,
                lost: AtomicBool::new(false),
            },
        );
        (id, receiver)
    }

    pub(super) fn unsubscribe(&self, id: WaiterId) {
        let waiters = &mut *self.lock();
        let Some(waiter) = waiters.by_id.remove(&id) else {
            return;
        };
        let Some(component) = waiter.component else {
            waiters.of_everything.retain(|&other| other != id);
            return;
        };
        if let Some(ids) = waiters.by_component.get_mut(&component) {
            ids.retain(|&other| other != id);
            if ids.is_empty() {
                waiters.by_component.remove(&component);
            }
        }
    }

    /// Hands the event to those who watch a component of `devpath`. `event` is
    /// made only when there is one.
    pub(super) fn deliver(&self, devpath: &str, event: impl FnOnce() -> Option<Event>) {
        self.counts.events.fetch_add(1, Ordering::Relaxed);
        let waiters = self.lock();
        let watching = devpath
            .split('/')
            .filter_map(|component| waiters.by_component.get(component))
            .flatten()
            .chain(&waiters.of_everything);
        let mut watching = watching.filter_map(|id| waiters.by_id.get(id)).peekable();
        if watching.peek().is_none() {
            return;
        }
        let Some(event) = event().map(Arc::new) else {
            return;
        };
        for waiter in watching {
            self.send(waiter, Notice::Event(Arc::clone(&event)));
        }
    }

    /// Events are lost: every waiter has to look again.
    pub(super) fn resync(&self) {
        self.counts.overruns.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("uevents were lost; every waiter looks at sysfs again");
        for waiter in self.lock().by_id.values() {
            self.send(waiter, Notice::Resync);
        }
    }

    pub(super) fn count_stranger(&self) {
        self.counts.strangers.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the waiter's queue was full since the last call. The waiter
    /// reads its full queue first, so it always comes back here.
    pub(super) fn take_lost(&self, id: WaiterId) -> bool {
        let waiters = self.lock();
        let waiter = waiters.by_id.get(&id);
        waiter.is_some_and(|waiter| waiter.lost.swap(false, Ordering::Relaxed))
    }

    pub(super) fn counters(&self) -> Counters {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            events: count(&self.counts.events),
            strangers: count(&self.counts.strangers),
            overruns: count(&self.counts.overruns),
            resyncs: count(&self.counts.resyncs),
        }
    }

    /// Ends every watch: nothing will come any more.
    pub(super) fn close(&self) {
        *self.lock() = Waiters::default();
    }

    fn send(&self, waiter: &Waiter, notice: Notice) {
        if matches!(notice, Notice::Resync) {
            self.counts.resyncs.fetch_add(1, Ordering::Relaxed);
        }
        if let Err(TrySendError::Full(_)) = waiter.notices.try_send(notice)
            && !waiter.lost.swap(true, Ordering::Relaxed)
        {
            self.counts.resyncs.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiters> {
        // No code under this lock can leave the maps half changed.
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(devpath: &str) -> Event {
        let text = format!("add@{devpath}\0ACTION=add\0DEVPATH={devpath}\0SEQNUM=1\0");
        let message = super::super::message::Message::parse(text.as_bytes()).unwrap();
        Event::of_kernel(&message)
    }

    #[test]
    fn an_event_reaches_those_who_watch_a_component_of_its_path_and_no_others() {
        let dispatch = Dispatch::default();
        let (_, mine) = dispatch.subscribe(Some("2:0:0:3"));
        let (_, other) = dispatch.subscribe(Some("2:0:0:30"));
        let (_, all) = dispatch.subscribe(None);
        let path = "/devices/x/host2/target2:0:0/2:0:0:3/block/sda";
        dispatch.deliver(path, || Some(event(path)));
        assert!(matches!(mine.try_recv(), Ok(Notice::Event(e)) if e.devpath == path));
        assert!(all.try_recv().is_ok());
        assert!(other.try_recv().is_err());
    }

    #[test]
    fn an_event_that_nobody_watches_is_not_copied() {
        let dispatch = Dispatch::default();
        let (id, _receiver) = dispatch.subscribe(Some("nbd0"));
        dispatch.unsubscribe(id);
        dispatch.deliver("/devices/virtual/block/nbd0", || unreachable!());
        assert_eq!(dispatch.counters().events, 1);
    }

    #[test]
    fn a_waiter_that_does_not_read_is_told_that_it_missed_something() {
        let dispatch = Dispatch::default();
        let (id, receiver) = dispatch.subscribe(Some("x"));
        for _ in 0..=QUEUE {
            dispatch.deliver("/x", || Some(event("/x")));
        }
        assert_eq!(receiver.try_iter().count(), QUEUE);
        assert!(dispatch.take_lost(id));
        assert!(!dispatch.take_lost(id));
    }

    #[test]
    fn an_overrun_wakes_every_waiter() {
        let dispatch = Dispatch::default();
        let (_, one) = dispatch.subscribe(Some("a"));
        let (_, two) = dispatch.subscribe(None);
        dispatch.resync();
        assert!(matches!(one.try_recv(), Ok(Notice::Resync)));
        assert!(matches!(two.try_recv(), Ok(Notice::Resync)));
        assert_eq!(dispatch.counters().resyncs, 2);
    }
}
