//! Delivers an event to the waiters for it, in time that does not depend on the number of
//! other waiters.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::changed_names::ChangedNames;
use super::counters::{Counters, Counts};
use super::event::{Event, LONGEST_TEXT};
use super::queue::Queue;

pub(super) type WaiterId = u64;

/// Which events a waiter gets.
#[derive(Debug, Clone)]
pub(super) enum Interest {
    /// Events whose device path has this between two slashes.
    Component(Arc<str>),
    /// Every event.
    Everything,
    /// Unit attentions that arrays report.
    UnitAttentionEvent,
}

/// The waiters, grouped by their interest.
#[derive(Debug, Default)]
pub(super) struct Dispatch {
    waiters: Mutex<Waiters>,
    counts: Counts,
}

/// Ordered, so that a waiter leaves among ten thousand as fast as it came, and the first
/// waiter gets an event first.
type Group = BTreeMap<WaiterId, Arc<Queue>>;

#[derive(Debug, Default)]
struct Waiters {
    next: WaiterId,
    count: u64,
    by_component: HashMap<Arc<str>, Group>,
    of_everything: Group,
    of_unit_attentions: Group,
    /// Subscribers to the names of devices that have events.
    name_subscribers: Vec<Weak<ChangedNames>>,
    closed: bool,
}

impl Dispatch {
    pub(super) fn subscribe(&self, interest: &Interest) -> (WaiterId, Arc<Queue>) {
        let queue = Arc::<Queue>::default();
        let waiters = &mut *self.waiters.lock();
        let id = waiters.next;
        waiters.next += 1;
        waiters.count += 1;
        if waiters.closed {
            queue.close();
        }
        let group = match interest {
            Interest::Component(component) => waiters
                .by_component
                .entry(Arc::clone(component))
                .or_default(),
            Interest::Everything => &mut waiters.of_everything,
            Interest::UnitAttentionEvent => &mut waiters.of_unit_attentions,
        };
        group.insert(id, Arc::clone(&queue));
        (id, queue)
    }

    pub(super) fn unsubscribe(&self, interest: &Interest, id: WaiterId) {
        let waiters = &mut *self.waiters.lock();
        waiters.count -= 1;
        match interest {
            Interest::Component(component) => {
                if let Some(group) = waiters.by_component.get_mut(component) {
                    group.remove(&id);
                    if group.is_empty() {
                        waiters.by_component.remove(component);
                    }
                }
            }
            Interest::Everything => drop(waiters.of_everything.remove(&id)),
            Interest::UnitAttentionEvent => drop(waiters.of_unit_attentions.remove(&id)),
        }
    }

    /// Records the names of the devices that have events until the subscription is
    /// dropped.
    pub(super) fn subscribe_to_names(&self, names: &Arc<ChangedNames>) {
        self.waiters
            .lock()
            .name_subscribers
            .push(Arc::downgrade(names));
    }

    /// Like [`deliver`](Self::deliver), for an event of the kernel. It also records the
    /// device's name.
    pub(super) fn deliver_of_kernel(
        &self,
        devpath: &str,
        is_unit_attention: impl FnOnce() -> bool,
        event: impl FnOnce() -> Option<Event>,
    ) {
        self.each_name_subscriber(|names| names.event(devpath));
        self.deliver(devpath, is_unit_attention, event);
    }

    fn each_name_subscriber(&self, call: impl Fn(&ChangedNames)) {
        self.waiters
            .lock()
            .name_subscribers
            .retain(|names| match names.upgrade() {
                Some(names) => {
                    call(&names);
                    true
                }
                None => false,
            });
    }

    #[cfg(test)]
    pub(super) fn name_subscriber_count(&self) -> usize {
        self.waiters.lock().name_subscribers.len()
    }

    /// Delivers the event to the waiters that watch a component of `devpath`, to those
    /// that watch everything, and a unit attention to those that watch unit attentions.
    /// `is_unit_attention` is called only if a waiter watches those, and `event` only if a
    /// waiter gets the event.
    pub(super) fn deliver(
        &self,
        devpath: &str,
        is_unit_attention: impl FnOnce() -> bool,
        event: impl FnOnce() -> Option<Event>,
    ) {
        if devpath.len() > LONGEST_TEXT {
            return self.counts.foreign_message();
        }
        self.counts.event();
        let waiters = self.waiters.lock();
        let attentions = (!waiters.of_unit_attentions.is_empty() && is_unit_attention())
            .then_some(&waiters.of_unit_attentions);
        let mut watching = waiters
            .of_components(devpath)
            .chain([&waiters.of_everything])
            .chain(attentions)
            .flat_map(BTreeMap::values)
            .peekable();
        if watching.peek().is_none() {
            return;
        }
        let Some(event) = event().map(Arc::new) else {
            return self.counts.foreign_message();
        };
        if event.cut {
            self.counts.cut();
        }
        let resyncs = watching.filter(|queue| queue.push(&event)).count();
        self.counts.resyncs(resyncs as u64);
    }

    /// Records that events are lost: every waiter must look again.
    pub(super) fn resync(&self) {
        self.counts.overrun();
        self.each_name_subscriber(ChangedNames::mark_lost);
        let resyncs = self
            .waiters
            .lock()
            .all()
            .filter(|queue| queue.resync())
            .count();
        self.counts.resyncs(resyncs as u64);
        tracing::warn!(resyncs, "uevents were lost; every waiter looks again");
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    pub(super) fn counters(&self) -> Counters {
        let watches = self.waiters.lock().count;
        self.counts.read(watches)
    }

    /// Ends every watch, because no more events come.
    pub(super) fn close(&self) {
        self.each_name_subscriber(ChangedNames::mark_lost);
        let waiters = &mut *self.waiters.lock();
        waiters.closed = true;
        waiters.all().for_each(|queue| queue.close());
    }
}

impl Waiters {
    /// The waiters that watch a component of the path. `.../2:0:0:3/scsi_disk/2:0:0:3` has
    /// one component twice, and its watches get the event once.
    fn of_components<'a>(&'a self, devpath: &'a str) -> impl Iterator<Item = &'a Group> {
        let components = devpath.split('/').enumerate();
        components.filter_map(move |(at, component)| {
            let group = self.by_component.get(component)?;
            let mut before = devpath.split('/').take(at);
            (!before.any(|earlier| earlier == component)).then_some(group)
        })
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Queue>> {
        self.by_component
            .values()
            .chain([&self.of_everything, &self.of_unit_attentions])
            .flat_map(BTreeMap::values)
    }
}

#[cfg(test)]
mod tests;
