//! Notices of the kernel about iSCSI sessions.

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::iscsi::pdu::{AsyncMessage, HEADER, Response};
use crate::kernel::Roots;
use crate::kernel::iscsi_netlink::{self, Listener, Notification};

/// A notice of a [`SessionWatch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionNotice {
    /// A connection of this session is lost, now or earlier. The kernel reports a loss up
    /// to three times, and the report may be older than the session's current connection.
    Lost(SessionId),
    /// The target has sent an asynchronous message.
    AsyncMessage(SessionId, AsyncMessage),
    /// There is a new session, which does not have its names yet.
    Created(SessionId),
    /// Notices may be missing: read the sessions again.
    Resync,
}

/// Reports events of all sessions of this machine, whichever process made them, from its
/// opening on. It needs root and the initial network namespace. A notice is a hint and not
/// a state: the kernel drops notices when it is out of memory.
#[derive(Debug)]
pub struct SessionWatch {
    roots: Roots,
    /// `None` while the kernel has no iSCSI.
    listener: Option<Listener>,
    wake: UnixStream,
    waker: SessionWaker,
}

/// Ends the waits of a [`SessionWatch`].
#[derive(Debug, Clone)]
pub struct SessionWaker(Arc<UnixStream>);

impl SessionWaker {
    /// Ends the current wait, or the next.
    pub fn wake(&self) {
        // If the socket is full, it already holds the byte that ends the wait.
        let _ = (&*self.0).write(&[0]);
    }
}

impl SessionWatch {
    /// Begins to listen. It also reports events after a later load of the module
    /// `iscsi_tcp`.
    ///
    /// # Errors
    /// `NotPermitted` without root; `NotSupported` in another network namespace.
    pub fn open(roots: &Roots) -> Result<Self> {
        let pair = || {
            let (wake, waker) = UnixStream::pair()?;
            waker.set_nonblocking(true)?;
            Ok((wake, SessionWaker(Arc::new(waker))))
        };
        let (wake, waker) = pair().map_err(|error| failed(&error))?;
        let mut watch = Self {
            roots: roots.clone(),
            listener: None,
            wake,
            waker,
        };
        watch.listen_if_possible()?;
        Ok(watch)
    }

    /// A handle that ends a wait from another thread.
    #[must_use]
    pub fn waker(&self) -> SessionWaker {
        self.waker.clone()
    }

    /// Waits for the next notice; `None` after the deadline or a wake.
    ///
    /// # Errors
    /// `Io`.
    pub fn next(&mut self, deadline: Deadline) -> Result<Option<SessionNotice>> {
        if self.listen_if_possible()? {
            return Ok(Some(SessionNotice::Resync));
        }
        loop {
            let Some(listener) = &mut self.listener else {
                self.take_wakes(deadline)?;
                return Ok(None);
            };
            let Some(notification) = listener.next_or(Some(self.wake.as_fd()), deadline)? else {
                // The byte that woke the wait is already in the socket.
                self.take_wakes(Deadline::after(std::time::Duration::ZERO))?;
                return Ok(None);
            };
            if let Some(notice) = notice(notification) {
                return Ok(Some(notice));
            }
        }
    }

    /// Opens the listener if the kernel has iSCSI. Returns whether it has just done so.
    fn listen_if_possible(&mut self) -> Result<bool> {
        if self.listener.is_some() || !iscsi_netlink::has_driver(&self.roots) {
            return Ok(false);
        }
        self.listener = Some(Listener::open()?);
        Ok(true)
    }

    /// Waits for a wake until `deadline`, and reads all that are there.
    fn take_wakes(&mut self, deadline: Deadline) -> Result<()> {
        // The standard library refuses a timeout of zero.
        let shortest = std::time::Duration::from_micros(1);
        let limit = deadline.remaining().max(shortest);
        let read = self
            .wake
            .set_read_timeout(Some(limit))
            .and_then(|()| self.wake.read(&mut [0; 4096]));
        match read.map_err(|error| (error.kind(), error)) {
            Ok(_) | Err((io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted, _)) => Ok(()),
            Err((_, error)) => Err(failed(&error)),
        }
    }
}

fn failed(error: &io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("a pair of sockets: {error}")).at(Stage::Session)
}

fn notice(notification: Notification) -> Option<SessionNotice> {
    match notification {
        Notification::ConnectionLost { session, .. } => Some(SessionNotice::Lost(session)),
        Notification::Pdu { session, pdu } => {
            match Response::decode(pdu.first_chunk::<HEADER>()?) {
                Ok(Response::Async(message)) => Some(SessionNotice::AsyncMessage(session, message)),
                _ => None,
            }
        }
        Notification::Created(session) => Some(SessionNotice::Created(session)),
        Notification::Missed => Some(SessionNotice::Resync),
        Notification::Unbound(_) | Notification::Destroyed(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn async_messages_and_lost_connections_are_news_and_a_logout_answer_is_not() {
        let session = SessionId(4);
        let mut pdu = vec![0; HEADER];
        (pdu[0], pdu[36], pdu[43]) = (0x32, 1, 9);
        let said = AsyncMessage {
            event: 1,
            parameters: [0, 0, 9],
        };
        let notification = |pdu: &[u8]| {
            let pdu = pdu.to_vec();
            notice(Notification::Pdu { session, pdu })
        };
        assert_eq!(
            notification(&pdu),
            Some(SessionNotice::AsyncMessage(session, said))
        );
        assert_eq!(notification(&pdu[..47]), None);
        // This is the answer to a logout by another process.
        pdu[0] = 0x26;
        assert_eq!(notification(&pdu), None);
        let lost = Notification::ConnectionLost {
            session,
            error: 1020,
        };
        assert_eq!(notice(lost), Some(SessionNotice::Lost(session)));
        assert_eq!(notice(Notification::Missed), Some(SessionNotice::Resync));
    }

    #[test]
    fn a_wake_ends_the_current_or_the_next_wait_if_the_kernel_has_no_iscsi() {
        let root = tempfile::tempdir().unwrap();
        let mut watch = SessionWatch::open(&Roots::below(root.path())).unwrap();
        let waker = watch.waker();
        for _ in 0..1000 {
            waker.wake();
        }
        let long = Deadline::after(Duration::from_secs(60));
        assert_eq!(watch.next(long).unwrap(), None);
        std::thread::scope(|scope| {
            scope.spawn(|| waker.wake());
            assert_eq!(watch.next(long).unwrap(), None);
        });
        assert!(!long.has_passed());
        let short = Deadline::after(Duration::from_millis(20));
        assert_eq!(watch.next(short).unwrap(), None);
        assert!(short.has_passed(), "an earlier wake is left");
    }
}
