//! The notifications of the kernel's iSCSI.

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

/// What a [`Listener`] receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notification {
    /// The session's connection is lost, with a number of `enum iscsi_err`: 1020 closed, 1022
    /// silent. Up to three come for one loss, and none says which of the session's
    /// connections it was.
    ConnectionLost {
        /// The session.
        session: SessionId,
        /// The number of the error.
        error: u32,
    },
    /// A PDU that is not for the kernel: an answer to one of ours, or one that the target
    /// sends by itself. Header and data, with any padding.
    Pdu {
        /// The session.
        session: SessionId,
        /// The PDU, which says its own length.
        pdu: Vec<u8>,
    },
    /// There is a new session.
    Created(SessionId),
    /// The session's target and devices are gone.
    Unbound(SessionId),
    /// The session is gone.
    Destroyed(SessionId),
    /// Notifications are lost: the receiver must read sysfs.
    Missed,
}

/// Receives the kernel's multicasts from when it is opened.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: Socket,
    buffer: Vec<u8>,
    queue: VecDeque<Notification>,
}

impl Listener {
    /// # Errors
    /// `NotPermitted` without root; `NotSupported` without the kernel's iSCSI.
    pub(crate) fn open() -> Result<Self> {
        /// The default holds some hundred messages.
        const RECEIVE_BUFFER: usize = 1 << 20;
        /// Twice what a target may send in one PDU before a login has agreed on more.
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
                queue: VecDeque::new(),
            })
            .map_err(|error: io::Error| failed("cannot listen to the kernel's iSCSI", &error))
    }

    /// The next notification; `None` if none comes until `deadline`.
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
            if let Some(notification) = self.queue.pop_front() {
                return Ok(Some(notification));
            }
            if !self.receive()? && !self.wait(other, deadline)? {
                return Ok(None);
            }
        }
    }

    /// Receives what is queued; `false` if nothing is.
    fn receive(&mut self) -> Result<bool> {
        self.buffer.clear();
        // With MSG_TRUNC the kernel returns the true length, also of a message that it cut.
        let flags = nix::libc::MSG_TRUNC;
        match self.socket.recv_from(&mut self.buffer, flags) {
            Ok((_, sender)) if sender.port_number() != 0 => {
                tracing::debug!(%sender, "a netlink message from an unknown sender");
            }
            Ok((length, _)) if length != self.buffer.len() => {
                self.queue.push_back(Notification::Missed);
            }
            Ok(_) => {
                let events = iscsi::messages(&self.buffer).filter_map(iscsi::event);
                self.queue.extend(events.filter_map(notification_of));
            }
            Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EAGAIN) => return Ok(false),
                Some(Errno::EINTR) => {}
                Some(Errno::ENOBUFS) => self.queue.push_back(Notification::Missed),
                _ => return Err(failed("cannot hear the kernel's iSCSI", &error)),
            },
        }
        Ok(true)
    }

    /// Waits until a notification comes; `false` if `deadline` passes first, or `other` can
    /// be read.
    fn wait(&self, other: Option<BorrowedFd<'_>>, deadline: Deadline) -> Result<bool> {
        let both = [other, Some(self.socket.as_fd())].into_iter().flatten();
        let mut polled: Vec<_> = both.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let left = deadline.max_sleep();
        // Rounded up: a part of a millisecond would be 0, and the caller's loop would spin.
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

fn notification_of(event: KernelEvent<'_>) -> Option<Notification> {
    Some(match event {
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
