//! Our end of a connected device's links, and what a server that comes back is
//! measured by.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use super::command::NewTimeouts;
use crate::crash::point;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BackendId, NbdUri};

/// The sockets of a connected device, kept to be able to shut them down: the
/// kernel takes a new socket only for a link that is dead, and has no command
/// that makes one so.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) uri: NbdUri,
    pub(crate) backend: BackendId,
    /// What is known of them: another process may have connected the device.
    pub(crate) timeouts: NewTimeouts,
    sockets: Vec<OwnedFd>,
}

impl Link {
    pub(crate) fn new(
        uri: NbdUri,
        backend: BackendId,
        sockets: Vec<OwnedFd>,
        timeouts: NewTimeouts,
    ) -> Self {
        Self {
            uri,
            backend,
            timeouts,
            sockets,
        }
    }

    /// Ends the connections: the kernel then knows the links for dead. What is
    /// in flight waits for new ones.
    pub(crate) fn shut_down(&self) {
        point!(NbdToEndLink);
        for socket in &self.sockets {
            // ENOTCONN: it is dead already.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
        point!(NbdLinkEnded);
    }

    /// Whether every connection has ended; not so where they are another's.
    pub(crate) fn is_dead(&self) -> bool {
        !self.sockets.is_empty() && self.sockets.iter().all(has_hung_up)
    }

    /// The device is served over connections of another: ours say nothing of it.
    pub(crate) fn let_go(&mut self) {
        self.sockets.clear();
    }
}

fn has_hung_up(socket: &OwnedFd) -> bool {
    // nix does not name POLLRDHUP. Beside it only hang-ups and errors are ever
    // reported, so that any answer is a yes.
    let peer_closed = PollFlags::from_bits_retain(nix::libc::POLLRDHUP);
    let mut polled = [PollFd::new(socket.as_fd(), peer_closed)];
    matches!(poll(&mut polled, PollTimeout::ZERO), Ok(1..))
}

/// Duplicates, for the kernel to take over.
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

    #[test]
    fn a_link_is_dead_when_every_connection_has_ended() {
        let (one, peer_of_one) = UnixStream::pair().unwrap();
        let (two, _peer_of_two) = UnixStream::pair().unwrap();
        let link = Link::new(
            "nbd://h/x".parse().unwrap(),
            BackendId::derived("x"),
            vec![one.into(), two.into()],
            NewTimeouts::default(),
        );
        assert!(!link.is_dead());
        drop(peer_of_one);
        assert!(!link.is_dead());
        link.shut_down();
        assert!(link.is_dead());
    }

    #[test]
    fn a_link_is_not_dead_once_another_serves_its_device() {
        let (one, peer_of_one) = UnixStream::pair().unwrap();
        let mut link = Link::new(
            "nbd://h/x".parse().unwrap(),
            BackendId::derived("x"),
            vec![one.into()],
            NewTimeouts::default(),
        );
        drop(peer_of_one);
        assert!(link.is_dead());
        link.let_go();
        assert!(!link.is_dead());
    }
}
