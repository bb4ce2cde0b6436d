//! What the kernel's iSCSI says of its own accord.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use lunbd_sys::iscsi::{self, KernelEvent};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ISCSI};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};

use super::socket::failed;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::id::SessionId;

/// What a [`Listener`] hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notification {
    /// The session's connection is lost, by `enum iscsi_err`: 1020 closed, 1022
    /// silent. Up to three come of one loss, and none says of which connection of
    /// the session's life it is.
    ConnectionLost {
        /// Of this session.
        session: SessionId,
        /// Why.
        error: u32,
    },
    /// A PDU that is not for the kernel: an answer to one of ours, or the target's
    /// own word. Header and data; padded with anything.
    Pdu {
        /// Of this session.
        session: SessionId,
        /// The PDU says its own length.
        pdu: Vec<u8>,
    },
    /// There is a new session.
    Created(SessionId),
    /// The session's target and devices are gone.
    Unbound(SessionId),
    /// The session is gone.
    Destroyed(SessionId),
    /// Messages are lost: sysfs has to be looked at.
    Missed,
}

/// Hears what is said to all, from when it is opened.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: Socket,
    buffer: Vec<u8>,
    heard: VecDeque<Notification>,
}

impl Listener {
    /// # Errors
    /// `NotPermitted` without root; `NotSupported` without the kernel's iSCSI.
    pub(crate) fn open() -> Result<Self> {
        /// The default holds some hundred messages.
        const RECEIVE_BUFFER: usize = 1 << 20;
        /// What a target may send in one PDU before a login has agreed on more,
        /// twice.
        const LONGEST: usize = 32 << 10;
        let open = || {
            let mut socket = Socket::new(NETLINK_ISCSI)?;
            socket.set_non_blocking(true)?;
            setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)
                .or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_BUFFER))?;
            socket.bind(&SocketAddr::new(0, iscsi::GROUP))?;
            Ok(socket)
        };
        open()
            .map(|socket| Self {
                socket,
                buffer: Vec::with_capacity(LONGEST),
                heard: VecDeque::new(),
            })
            .map_err(|error: io::Error| failed("cannot listen to the kernel's iSCSI", &error))
    }

    /// The next; `None` where nothing comes until `deadline`.
    pub(crate) fn next(&mut self, deadline: Deadline) -> Result<Option<Notification>> {
        self.next_or(None, deadline)
    }

    /// As [`next`](Self::next); `None` also as soon as `other` can be read.
    pub(crate) fn next_or(
        &mut self,
        other: Option<BorrowedFd<'_>>,
        deadline: Deadline,
    ) -> Result<Option<Notification>> {
        loop {
            if let Some(heard) = self.heard.pop_front() {
                return Ok(Some(heard));
            }
            if !self.receive()? && !self.wait(other, deadline)? {
                return Ok(None);
            }
        }
    }

    /// `false` where nothing is there.
    fn receive(&mut self) -> Result<bool> {
        self.buffer.clear();
        // With MSG_TRUNC the true length comes back, also of what was cut.
        let flags = nix::libc::MSG_TRUNC;
        match self.socket.recv_from(&mut self.buffer, flags) {
            Ok((_, sender)) if sender.port_number() != 0 => {
                tracing::debug!(%sender, "a netlink message from an unknown sender");
            }
            Ok((length, _)) if length != self.buffer.len() => {
                self.heard.push_back(Notification::Missed);
            }
            Ok(_) => {
                let news = iscsi::messages(&self.buffer).filter_map(iscsi::event);
                self.heard.extend(news.filter_map(heard));
            }
            Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EAGAIN) => return Ok(false),
                Some(Errno::EINTR) => {}
                Some(Errno::ENOBUFS) => self.heard.push_back(Notification::Missed),
                _ => return Err(failed("cannot hear the kernel's iSCSI", &error)),
            },
        }
        Ok(true)
    }

    /// `false` where `deadline` passes first, or `other` can be read.
    fn wait(&self, other: Option<BorrowedFd<'_>>, deadline: Deadline) -> Result<bool> {
        let both = [other, Some(self.socket.as_fd())].into_iter().flatten();
        let mut polled: Vec<_> = both.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let left = deadline.max_sleep();
        // A part of a millisecond would be none, and this a loop that spins.
        let milliseconds = left.as_micros().div_ceil(1000);
        let timeout = i32::try_from(milliseconds).ok().map(PollTimeout::try_from);
        let timeout = timeout
            .and_then(std::result::Result::ok)
            .unwrap_or(PollTimeout::MAX);
        match poll(&mut polled, timeout) {
            Ok(0) => Ok(!deadline.has_passed()),
            Ok(_) => {
                let others = polled.first().filter(|_| other.is_some());
                Ok(!others.and_then(PollFd::any).unwrap_or(false))
            }
            Err(Errno::EINTR) => Ok(true),
            Err(errno) => Err(failed("cannot wait for the kernel's iSCSI", &errno.into())),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn heard(news: KernelEvent<'_>) -> Option<Notification> {
    Some(match news {
        KernelEvent::ReceivedPdu { sid, pdu, .. } => Notification::Pdu {
            session: SessionId(sid),
            pdu: pdu.to_vec(),
        },
        KernelEvent::ConnectionError { sid, error, .. } => Notification::ConnectionLost {
            session: SessionId(sid),
            error,
        },
        KernelEvent::SessionCreated { sid } => Notification::Created(SessionId(sid)),
        KernelEvent::SessionUnbound { sid } => Notification::Unbound(SessionId(sid)),
        KernelEvent::SessionDestroyed { sid } => Notification::Destroyed(SessionId(sid)),
        KernelEvent::Other(_) => return None,
    })
}
