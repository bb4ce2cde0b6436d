//! The sockets of a connected device that this process holds, and which of them are
//! dead.

mod receivers;

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::command::NewTimeouts;
use super::held_socket::HeldSocket;
use super::known_content::KnownContent;
use super::served::Slots;
use super::tls_info::TlsInfo;
use super::unread::Unread;
use crate::crash::crash_point;
use crate::id::{BackendId, ContentName, NbdServer, NbdUri};

/// The sockets that this process has handed over for a connected device. It keeps them
/// to see which connections have ended, and to shut them down. The kernel keeps each
/// socket in a slot of its own (`drivers/block/nbd.c`, `struct nbd_sock`).
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) uri: NbdUri,
    pub(crate) backend: BackendId,
    /// The known timeouts. Another process may have connected the device with unknown
    /// ones.
    pub(crate) timeouts: NewTimeouts,
    /// The content that was read from the volume before the kernel was connected to it.
    pub(crate) content: Option<KnownContent>,
    /// The name that each server's content must have.
    pub(crate) expected: Option<ContentName>,
    /// The TLS of the last connection that this process made.
    pub(crate) tls: Option<TlsInfo>,
    slots: Slots,
    held_sockets: Vec<HeldSocket>,
    /// The sockets of the connections that were replaced last. The kernel's receiver may
    /// still read one: `nbd_reconnect_socket` does not wait for it, and holds no reference
    /// for it.
    replaced: Vec<OwnedFd>,
    /// The thread that connected the device; a reconnect does not change it. `None` if
    /// it could not be read.
    connected_by: Option<u32>,
}

/// What is known about the connections in the kernel's slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkState {
    /// Live connections of this process.
    pub(crate) live: usize,
    /// Dead connections of this process.
    pub(crate) dead: usize,
    /// Connections of another process. This process cannot see whether they live.
    pub(crate) unknown: usize,
    /// Whether other processes may have more connections than `unknown` counts.
    pub(crate) may_have_more: bool,
}

impl LinkState {
    /// The state of a device that another process has connected.
    pub(crate) fn of_another(slots: Slots) -> Self {
        Self {
            live: 0,
            dead: 0,
            unknown: slots.count,
            may_have_more: !slots.exact,
        }
    }

    /// Whether every slot has a live connection of this process.
    pub(crate) fn is_whole(self) -> bool {
        self.dead == 0 && self.unknown == 0 && !self.may_have_more
    }

    /// Whether every slot has a connection of this process, and all of them are dead.
    pub(crate) fn is_dead(self) -> bool {
        self.live == 0 && self.unknown == 0 && self.dead > 0
    }

    /// Whether the device has more than one connection, live or dead.
    pub(crate) fn has_several(self) -> bool {
        self.live + self.dead + self.unknown > 1
    }
}

impl Link {
    /// The connections of a device that this process has connected.
    pub(crate) fn new(
        uri: NbdUri,
        backend: BackendId,
        sockets: Vec<OwnedFd>,
        timeouts: NewTimeouts,
        connected_by: Option<u32>,
    ) -> Self {
        let slots = Slots {
            count: sockets.len(),
            exact: true,
        };
        Self {
            held_sockets: sockets.into_iter().map(HeldSocket::from).collect(),
            ..Self::of_another(uri, backend, slots, timeouts, connected_by)
        }
    }

    /// The connections of a device that another process has connected.
    pub(crate) fn of_another(
        uri: NbdUri,
        backend: BackendId,
        slots: Slots,
        timeouts: NewTimeouts,
        connected_by: Option<u32>,
    ) -> Self {
        Self {
            uri,
            backend,
            timeouts,
            content: None,
            expected: None,
            tls: None,
            slots,
            held_sockets: Vec::new(),
            replaced: Vec::new(),
            connected_by,
        }
    }

    /// Whether the device at this index was connected anew since, by the thread `now`.
    pub(crate) fn is_of_an_earlier_device(&self, now: Option<u32>) -> bool {
        let both = self.connected_by.zip(now);
        both.is_some_and(|(then, now)| then != now)
    }

    pub(crate) fn state(&self) -> LinkState {
        let dead = self
            .held_sockets
            .iter()
            .filter(|held| held.has_hung_up())
            .count();
        LinkState {
            live: self.held_sockets.len() - dead,
            dead,
            unknown: self.slots.count.saturating_sub(self.held_sockets.len()),
            may_have_more: !self.slots.exact,
        }
    }

    /// Ends the connections. Requests in flight wait for new ones.
    pub(crate) fn shut_down(&self) {
        crash_point!(NbdToEndLink);
        self.held_sockets.iter().for_each(HeldSocket::shut_down);
        crash_point!(NbdLinkEnded);
    }

    /// Looks at each live connection, and returns how long a reply has stayed unread in one:
    /// the longest time. Unread replies of TLS connections are not visible.
    pub(crate) fn unread_for(&mut self) -> Duration {
        if matches!(self.uri.server(), NbdServer::Tls { .. }) {
            return Duration::ZERO;
        }
        let live = self
            .held_sockets
            .iter_mut()
            .filter(|held| !held.has_hung_up());
        let since = live.filter_map(|held| held.unread.look(&held.socket)).min();
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Whether a reply stays unread in a connection that has ended. Unread replies of TLS
    /// connections are not visible.
    pub(crate) fn has_unread_of_dead(&mut self) -> bool {
        let is_tls = matches!(self.uri.server(), NbdServer::Tls { .. });
        let mut dead = self
            .held_sockets
            .iter_mut()
            .filter(|held| held.has_hung_up());
        !is_tls && dead.any(|held| held.unread.look(&held.socket).is_some())
    }

    /// Ends the connections without an unread reply, if the last look has found one in
    /// another connection.
    pub(crate) fn shut_down_connections_without_unread_reply(&mut self) {
        let (read, unread): (Vec<&HeldSocket>, Vec<&HeldSocket>) = self
            .held_sockets
            .iter()
            .partition(|held| held.unread.since().is_none());
        if unread.is_empty() {
            return;
        }
        read.into_iter().for_each(HeldSocket::shut_down);
        for held in &mut self.held_sockets {
            held.unread = Unread::default();
        }
    }

    /// Whether every connection of the device has ended. It is false if another process
    /// has made some of them.
    pub(crate) fn is_dead(&self) -> bool {
        self.state().is_dead()
    }

    /// Records that the kernel has put a new connection into the slot of a dead one.
    pub(crate) fn replace_dead(&mut self, new: OwnedFd) {
        if let Some(dead) = self.held_sockets.iter().position(HeldSocket::has_hung_up) {
            let dead = self.held_sockets.remove(dead);
            self.keep_replaced([dead]);
        }
        self.held_sockets.push(new.into());
        self.slots.count = self.slots.count.max(self.held_sockets.len());
    }

    /// Records that the kernel has no more slots than were counted.
    pub(crate) fn set_slots_exact(&mut self) {
        self.slots.exact = true;
    }

    /// Whether another process has made the device's present connections: those of this
    /// process were replaced.
    pub(crate) fn is_of_another_now(&self) -> bool {
        self.held_sockets.is_empty() && !self.replaced.is_empty()
    }

    /// Records that another process has put connections into the slots of the dead ones.
    pub(crate) fn forget_dead(&mut self) {
        let (dead, live) = std::mem::take(&mut self.held_sockets)
            .into_iter()
            .partition::<Vec<_>, _>(HeldSocket::has_hung_up);
        self.held_sockets = live;
        self.keep_replaced(dead);
    }

    /// Keeps the sockets until as many others were replaced.
    fn keep_replaced(&mut self, dead: impl IntoIterator<Item = HeldSocket>) {
        for held in dead {
            held.shut_down();
            self.replaced.push(held.socket);
        }
        let surplus = self.replaced.len().saturating_sub(self.slots.count.max(1));
        self.replaced.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    pub(super) fn link(sockets: Vec<OwnedFd>) -> Link {
        let (uri, backend) = ("nbd://h/x".parse().unwrap(), BackendId::derived("x"));
        Link::new(uri, backend, sockets, NewTimeouts::default(), Some(7))
    }

    #[test]
    fn a_link_belongs_to_an_earlier_device_if_another_thread_connected_the_present_device() {
        let link = link(Vec::new());
        assert!(link.is_of_an_earlier_device(Some(8)));
        assert!(!link.is_of_an_earlier_device(Some(7)));
        assert!(!link.is_of_an_earlier_device(None));
    }

    #[test]
    fn a_link_is_dead_when_every_connection_has_ended() {
        let (one, peer_of_one) = UnixStream::pair().unwrap();
        let (two, _peer_of_two) = UnixStream::pair().unwrap();
        let link = link(vec![one.into(), two.into()]);
        assert!(link.state().is_whole());
        drop(peer_of_one);
        assert!(!link.is_dead() && !link.state().is_whole());
        link.shut_down();
        assert!(link.is_dead());
    }

    #[test]
    fn a_new_connection_takes_the_place_of_a_dead_one_and_of_none_that_lives() {
        let (one, peer_of_one) = UnixStream::pair().unwrap();
        let (two, _peer_of_two) = UnixStream::pair().unwrap();
        let (new, _peer_of_new) = UnixStream::pair().unwrap();
        let mut link = link(vec![one.into(), two.into()]);
        drop(peer_of_one);
        link.replace_dead(new.into());
        let whole = LinkState {
            live: 2,
            dead: 0,
            unknown: 0,
            may_have_more: false,
        };
        assert_eq!(link.state(), whole);
    }

    #[test]
    fn the_sockets_of_the_connections_that_were_replaced_last_stay_open() {
        let (one, mut peer) = UnixStream::pair().unwrap();
        let mut link = link(vec![one.into()]);
        for _ in 0..3 {
            let (new, peer_of_new) = UnixStream::pair().unwrap();
            drop(std::mem::replace(&mut peer, peer_of_new));
            link.replace_dead(new.into());
            assert!(link.state().is_whole());
            assert_eq!(link.replaced.len(), 1);
        }
    }

    #[test]
    fn if_replies_stay_unread_in_one_connection_the_others_are_shut_down() {
        let (one, mut peer_of_one) = UnixStream::pair().unwrap();
        let (two, _peer_of_two) = UnixStream::pair().unwrap();
        let mut link = link(vec![one.into(), two.into()]);
        assert_eq!(link.unread_for(), Duration::ZERO);
        link.shut_down_connections_without_unread_reply();
        assert!(link.state().is_whole());
        peer_of_one.write_all(b"reply").unwrap();
        link.unread_for();
        assert!(link.unread_for() > Duration::ZERO);
        link.shut_down_connections_without_unread_reply();
        let state = link.state();
        assert_eq!((state.live, state.dead), (1, 1));
        // A new connection is given time to be read.
        link.shut_down_connections_without_unread_reply();
        assert_eq!(link.state().live, 1);
    }

    #[test]
    fn a_reply_on_a_connection_that_has_ended_is_unread_until_it_is_read() {
        let (mut one, mut peer) = UnixStream::pair().unwrap();
        let mut link = link(vec![one.try_clone().unwrap().into()]);
        peer.write_all(b"reply").unwrap();
        assert!(!link.has_unread_of_dead());
        drop(peer);
        assert!(link.has_unread_of_dead());
        one.read_exact(&mut [0; 5]).unwrap();
        assert!(!link.has_unread_of_dead());
    }

    #[test]
    fn a_connection_of_another_process_does_not_count_as_dead() {
        let (one, peer_of_one) = UnixStream::pair().unwrap();
        let mut link = link(vec![one.into()]);
        drop(peer_of_one);
        assert!(link.is_dead());
        link.forget_dead();
        assert!(!link.is_dead());
        assert_eq!(link.state().unknown, 1);
    }
}
