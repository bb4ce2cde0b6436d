//! A socket that the kernel uses for a connection, and that this process holds too.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use super::unread::Unread;
use crate::error::{Error, ErrorKind, Result};

/// The socket of a connection that this process holds.
#[derive(Debug)]
pub(super) struct HeldSocket {
    pub(super) socket: OwnedFd,
    pub(super) unread: Unread,
    /// Whether the kernel's receiver of this connection may still begin. If the connection has
    /// ended by then, its receiver reads the next socket of its slot.
    pub(super) receiver_may_begin_later: bool,
}

impl From<OwnedFd> for HeldSocket {
    fn from(socket: OwnedFd) -> Self {
        Self {
            socket,
            unread: Unread::default(),
            receiver_may_begin_later: true,
        }
    }
}

impl HeldSocket {
    /// Whether the connection has ended.
    pub(super) fn has_hung_up(&self) -> bool {
        // nix has no name for POLLRDHUP. Otherwise poll reports only hang-ups and errors
        // here, so any event means that the connection has ended.
        let peer_closed = PollFlags::from_bits_retain(nix::libc::POLLRDHUP);
        let mut polled = [PollFd::new(self.socket.as_fd(), peer_closed)];
        matches!(poll(&mut polled, PollTimeout::ZERO), Ok(1..))
    }

    pub(super) fn shut_down(&self) {
        // ENOTCONN: the connection is dead already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }
}

/// Duplicates the sockets for the kernel to take over.
pub(crate) fn duplicate<'a>(
    sockets: impl IntoIterator<Item = &'a OwnedFd>,
) -> Result<Vec<OwnedFd>> {
    sockets
        .into_iter()
        .map(OwnedFd::try_clone)
        .collect::<std::io::Result<_>>()
        .map_err(|error| {
            let message = format!("cannot duplicate a socket: {error}");
            Error::new(ErrorKind::Io, message)
        })
}
