//! The sockets of a connected device that this process holds, and which of them are
//! dead.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use super::command::NewTimeouts;
use super::known_content::KnownContent;
use super::served::Slots;
use crate::crash::point;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BackendId, NbdUri};

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
    slots: Slots,
    sockets: Vec<OwnedFd>,
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
    pub(crate) more: bool,
}

impl LinkState {
    /// The state of a device that another process has connected.
    pub(crate) fn of_another(slots: Slots) -> Self {
        Self {
            live: 0,
            dead: 0,
            unknown: slots.count,
            more: !slots.exact,
        }
    }

    /// Whether every slot has a live connection of this process.
    pub(crate) fn is_whole(self) -> bool {
        self.dead == 0 && self.unknown == 0 && !self.more
    }

    /// Whether every slot has a connection of this process, and all of them are dead.
    pub(crate) fn is_dead(self) -> bool {
        self.live == 0 && self.unknown == 0 && self.dead > 0
    }

    /// Whether I/O may continue although one connection is dead.
    pub(crate) fn is_redundant(self) -> bool {
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
            sockets,
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
            slots,
            sockets: Vec::new(),
            connected_by,
        }
    }

    /// Whether the device at this index was connected anew since, by the thread `now`.
    pub(crate) fn is_of_an_earlier_device(&self, now: Option<u32>) -> bool {
        let both = self.connected_by.zip(now);
        both.is_some_and(|(then, now)| then != now)
    }

    pub(crate) fn state(&self) -> LinkState {
        let dead = self.sockets.iter().filter(|end| has_hung_up(end)).count();
        LinkState {
            live: self.sockets.len() - dead,
            dead,
            unknown: self.slots.count.saturating_sub(self.sockets.len()),
            more: !self.slots.exact,
        }
    }

    /// Ends the connections. Requests in flight wait for new ones.
    pub(crate) fn shut_down(&self) {
        point!(NbdToEndLink);
        for socket in &self.sockets {
            // ENOTCONN: the connection is dead already.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
        point!(NbdLinkEnded);
    }

    /// Whether every connection of the device has ended. It is false if another process
    /// has made some of them.
    pub(crate) fn is_dead(&self) -> bool {
        self.state().is_dead()
    }

    /// Records that the kernel has put a new connection into the slot of a dead one.
    pub(crate) fn replace_dead(&mut self, new: OwnedFd) {
        if let Some(dead) = self.sockets.iter().position(has_hung_up) {
            self.sockets.remove(dead);
        }
        self.sockets.push(new);
        self.slots.count = self.slots.count.max(self.sockets.len());
    }

    /// Records that the kernel has no more slots than were counted.
    pub(crate) fn set_slots_exact(&mut self) {
        self.slots.exact = true;
    }

    /// Records that another process has put connections into the slots of the dead ones.
    pub(crate) fn forget_dead(&mut self) {
        self.sockets.retain(|socket| !has_hung_up(socket));
    }
}

fn has_hung_up(socket: &OwnedFd) -> bool {
    // nix has no name for POLLRDHUP. Otherwise poll reports only hang-ups and errors
    // here, so any event means that the connection has ended.
    let peer_closed = PollFlags::from_bits_retain(nix::libc::POLLRDHUP);
    let mut polled = [PollFd::new(socket.as_fd(), peer_closed)];
    matches!(poll(&mut polled, PollTimeout::ZERO), Ok(1..))
}

/// Duplicates the sockets for the kernel to take over.
pub(crate) fn duplicate(sockets: &[OwnedFd]) -> Result<Vec<OwnedFd>> {
    sockets
        .iter()
        .map(OwnedFd::try_clone)
        .collect::<std::io::Result<_>>()
        .map_err(|error| {
            let message = format!("cannot duplicate a socket: {error}");
            Error::new(ErrorKind::Io, message)
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn link(sockets: Vec<OwnedFd>) -> Link {
        let (uri, backend) = ("nbd://h/x".parse().unwrap(), BackendId::derived("x"));
        Link::new(uri, backend, sockets, NewTimeouts::default(), Some(7))
    }

    #[test]
    fn a_link_is_of_an_earlier_device_where_another_thread_connected_that_of_now() {
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
            more: false,
        };
        assert_eq!(link.state(), whole);
    }

    #[test]
    fn what_another_process_serves_is_not_called_dead() {
        let (one, peer_of_one) = UnixStream::pair().unwrap();
        let mut link = link(vec![one.into()]);
        drop(peer_of_one);
        assert!(link.is_dead());
        link.forget_dead();
        assert!(!link.is_dead());
        assert_eq!(link.state().unknown, 1);
    }
}
