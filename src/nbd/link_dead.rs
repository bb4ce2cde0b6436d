//! The kernel's notices that a connection of a device has died.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};

use lunbd_sys::nbd as abi;
use netlink_packet_generic::GenlFamily;
use parking_lot::Mutex;

use super::message::{Attribute, Message};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::id::NbdIndex;
use crate::kernel::genl::{Listener, Notification};

/// How many notices a subscriber may leave unread. After more, it is told to
/// look again, so a slow subscriber costs bounded memory and misses nothing.
const QUEUE: usize = 64;

/// Listens to the kernel's `NBD_CMD_LINK_DEAD`. The kernel sends it once for
/// each socket that dies while its device is connected, and only in the initial
/// network namespace (`drivers/block/nbd.c`, `nbd_mcast_index`). The thread
/// ends when this and all of its [`LinkWatch`]es are dropped.
///
/// A notice is a hint and no state. The kernel sends none for a silent peer on
/// an idle connection, or when it has no memory for it.
#[derive(Debug)]
pub struct DeadLinks {
    subscribers: Arc<Subscribers>,
    listener: Arc<Listener>,
}

/// What a [`LinkWatch`] delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkNotice {
    /// A connection of this device has died; others may live.
    Dead(NbdIndex),
    /// Notices may be missing: look at the connections again.
    Resync,
}

/// A subscription to notices.
#[derive(Debug)]
pub struct LinkWatch {
    subscribers: Arc<Subscribers>,
    id: u64,
    notices: Receiver<LinkNotice>,
    // The thread must run as long as the subscription.
    _listener: Arc<Listener>,
}

#[derive(Debug, Default)]
struct Subscribers(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    by_id: BTreeMap<u64, Subscriber>,
}

#[derive(Debug)]
struct Subscriber {
    /// With `None` the subscriber wants the notices of every device.
    index: Option<NbdIndex>,
    notices: SyncSender<LinkNotice>,
    lost: AtomicBool,
}

/// Resolves the family by its name.
struct Family;

impl GenlFamily for Family {
    fn family_name() -> &'static str {
        abi::FAMILY_NAME
    }

    fn command(&self) -> u8 {
        abi::CMD_LINK_DEAD
    }

    fn version(&self) -> u8 {
        abi::FAMILY_VERSION
    }
}

impl DeadLinks {
    /// Starts the thread. It also hears a `nbd` module that is loaded later.
    ///
    /// # Errors
    /// `Io`; `TimedOut` at stage `resolve`.
    pub fn listen(deadline: Deadline) -> Result<Self> {
        let subscribers = Arc::<Subscribers>::default();
        let deliver = {
            let subscribers = Arc::clone(&subscribers);
            move |heard| subscribers.deliver(heard)
        };
        let listener = Listener::start::<Family>(abi::MULTICAST_GROUP, deadline, deliver)?;
        Ok(Self {
            subscribers,
            listener: Arc::new(listener),
        })
    }

    /// Subscribes to one device, or to all. Subscribe before you act.
    #[must_use]
    pub fn watch(&self, index: Option<NbdIndex>) -> LinkWatch {
        let (id, notices) = self.subscribers.add(index);
        LinkWatch {
            subscribers: Arc::clone(&self.subscribers),
            id,
            notices,
            _listener: Arc::clone(&self.listener),
        }
    }
}

impl LinkWatch {
    /// Waits for the next notice; `None` when the deadline has passed.
    pub fn next(&mut self, deadline: Deadline) -> Option<LinkNotice> {
        if let Ok(notice) = self.notices.try_recv() {
            return Some(notice);
        }
        // The queue is empty, so now report what it had no room for.
        if self.subscribers.take_lost(self.id) {
            return Some(LinkNotice::Resync);
        }
        // The sender lives as long as this subscription.
        loop {
            match self.notices.recv_timeout(deadline.max_sleep()) {
                Err(RecvTimeoutError::Timeout) if !deadline.has_passed() => {}
                notice => return notice.ok(),
            }
        }
    }
}

impl LinkWatch {
    /// A handle that ends a wait from another thread, by a
    /// [`LinkNotice::Resync`].
    #[must_use]
    pub fn waker(&self) -> LinkWaker {
        let (subscribers, id) = (Arc::clone(&self.subscribers), self.id);
        LinkWaker { subscribers, id }
    }
}

/// Ends the waits of a [`LinkWatch`].
#[derive(Debug)]
pub struct LinkWaker {
    subscribers: Arc<Subscribers>,
    id: u64,
}

impl LinkWaker {
    /// Sends the watch a [`LinkNotice::Resync`].
    pub fn wake(&self) {
        if let Some(subscriber) = self.subscribers.0.lock().by_id.get(&self.id) {
            // A full queue already ends the wait.
            let _ = subscriber.notices.try_send(LinkNotice::Resync);
        }
    }
}

impl Drop for LinkWatch {
    fn drop(&mut self) {
        self.subscribers.0.lock().by_id.remove(&self.id);
    }
}

impl Subscribers {
    fn add(&self, index: Option<NbdIndex>) -> (u64, Receiver<LinkNotice>) {
        let (notices, receiver) = sync_channel(QUEUE);
        let table = &mut *self.0.lock();
        let id = table.next;
        table.next += 1;
        let subscriber = Subscriber {
            index,
            notices,
            lost: AtomicBool::new(false),
        };
        table.by_id.insert(id, subscriber);
        (id, receiver)
    }

    fn deliver(&self, heard: Notification) {
        let notice = match heard {
            Notification::Missed => LinkNotice::Resync,
            Notification::Message(message) if message.command != abi::CMD_LINK_DEAD => return,
            Notification::Message(message) => {
                // A malformed notice still means that something died.
                let index = dead_index(message.command, &message.attributes);
                index.map_or(LinkNotice::Resync, LinkNotice::Dead)
            }
        };
        for subscriber in self.0.lock().by_id.values() {
            let wanted = match (notice, subscriber.index) {
                (LinkNotice::Dead(dead), Some(index)) => dead == index,
                _ => true,
            };
            if wanted && subscriber.notices.try_send(notice).is_err() {
                subscriber.lost.store(true, Ordering::Relaxed);
            }
        }
    }

    fn take_lost(&self, id: u64) -> bool {
        let table = self.0.lock();
        let subscriber = table.by_id.get(&id);
        subscriber.is_some_and(|subscriber| subscriber.lost.swap(false, Ordering::Relaxed))
    }
}

fn dead_index(command: u8, attributes: &[u8]) -> Option<NbdIndex> {
    let message = Message::decode(command, attributes).ok()?;
    message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            Attribute::Index(index) => NbdIndex::new(*index),
            _ => None,
        })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::kernel::genl::Payload;

    fn dead(index: u32) -> Notification {
        let message = Message {
            command: abi::CMD_LINK_DEAD,
            attributes: vec![Attribute::Index(index)],
        };
        Notification::Message(Payload {
            command: message.command,
            version: 1,
            attributes: message.encode(),
        })
    }

    fn links() -> DeadLinks {
        DeadLinks::listen(Deadline::after(Duration::from_secs(10))).unwrap()
    }

    fn read(watch: &mut LinkWatch) -> Option<LinkNotice> {
        watch.next(Deadline::after(Duration::ZERO))
    }

    fn index(number: u32) -> NbdIndex {
        NbdIndex::new(number).unwrap()
    }

    #[test]
    fn a_dead_link_is_reported_to_the_watchers_of_the_device_alone() {
        let links = links();
        let mut mine = links.watch(Some(index(3)));
        let mut other = links.watch(Some(index(4)));
        let mut all = links.watch(None);
        links.subscribers.deliver(dead(3));
        assert_eq!(read(&mut mine), Some(LinkNotice::Dead(index(3))));
        assert_eq!(read(&mut all), Some(LinkNotice::Dead(index(3))));
        assert_eq!(read(&mut other), None);
    }

    #[test]
    fn a_watcher_that_does_not_read_gets_one_notice_to_look_again() {
        let links = links();
        let mut watch = links.watch(None);
        for number in 0..70 {
            links.subscribers.deliver(dead(number));
        }
        for number in 0..64 {
            assert_eq!(read(&mut watch), Some(LinkNotice::Dead(index(number))));
        }
        assert_eq!(read(&mut watch), Some(LinkNotice::Resync));
        assert_eq!(read(&mut watch), None);
    }

    #[test]
    fn a_missed_or_unreadable_message_makes_every_watcher_look_again() {
        let links = links();
        let mut watches = [links.watch(Some(index(3))), links.watch(None)];
        links.subscribers.deliver(Notification::Missed);
        links.subscribers.deliver(Notification::Message(Payload {
            command: abi::CMD_LINK_DEAD,
            version: 1,
            attributes: vec![9],
        }));
        for watch in &mut watches {
            assert_eq!(read(watch), Some(LinkNotice::Resync));
            assert_eq!(read(watch), Some(LinkNotice::Resync));
            assert_eq!(read(watch), None);
        }
    }
}
