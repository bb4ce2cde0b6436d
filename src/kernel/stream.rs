//! A socket whose calls all end at the deadline. It changes no setting of the
//! socket, so there is nothing to restore.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};

use crate::deadline::{Backoff, Deadline};

pub(crate) struct DeadlineStream<'a> {
    socket: BorrowedFd<'a>,
    deadline: Deadline,
}

impl<'a> DeadlineStream<'a> {
    pub(crate) fn new(socket: BorrowedFd<'a>, deadline: Deadline) -> Self {
        Self { socket, deadline }
    }

    /// Repeats `call` until the socket is ready for it.
    fn when_ready(
        &self,
        ready: PollFlags,
        mut call: impl FnMut() -> nix::Result<usize>,
    ) -> io::Result<usize> {
        // The kernel's TLS before Linux 6.6 reports a record as readable that it has not
        // received whole (`net/tls`, which has no poll of its own before).
        let (mut was_ready, mut backoff) = (false, Backoff::for_kernel_state());
        loop {
            // Check here: with a peer that always has more data, no call ever
            // waits.
            if self.deadline.has_passed() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match call() {
                Err(Errno::EAGAIN) => {
                    if was_ready {
                        self.deadline.pause(backoff.pause());
                    }
                    wait_until_ready(self.socket, ready, self.deadline)?;
                    was_ready = true;
                }
                Err(Errno::EINTR) => {}
                result => return result.map_err(io::Error::from),
            }
        }
    }
}

/// Waits until the socket is `ready`.
///
/// # Errors
/// `TimedOut`; otherwise by the errno.
pub(super) fn wait_until_ready(
    socket: BorrowedFd<'_>,
    ready: PollFlags,
    deadline: Deadline,
) -> io::Result<()> {
    while !deadline.has_passed() {
        // Whole milliseconds, so a little longer than what remains.
        let milliseconds = deadline.max_sleep().as_millis().saturating_add(1);
        let timeout = i32::try_from(milliseconds)
            .ok()
            .and_then(|milliseconds| PollTimeout::try_from(milliseconds).ok())
            .unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(socket, ready)], timeout) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let socket = self.socket.as_raw_fd();
        self.when_ready(PollFlags::POLLIN, || {
            recv(socket, buffer, MsgFlags::MSG_DONTWAIT)
        })
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A server that went away causes an error and no signal.
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let socket = self.socket.as_raw_fd();
        self.when_ready(PollFlags::POLLOUT, || send(socket, bytes, flags))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_read_and_a_write_that_would_block_end_at_the_deadline() {
        let (near, _far) = UnixStream::pair().unwrap();
        let deadline = || Deadline::after(Duration::from_millis(20));
        let read = DeadlineStream::new(near.as_fd(), deadline()).read(&mut [0]);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let mut stream = DeadlineStream::new(near.as_fd(), deadline());
        let written = stream.write_all(&vec![0; 16 << 20]);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_socket_that_is_reported_ready_and_is_not_costs_few_calls() {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(b"half").unwrap();
        let deadline = Deadline::after(Duration::from_millis(200));
        let mut calls = 0;
        let never = || {
            calls += 1;
            Err(Errno::EAGAIN)
        };
        let read = DeadlineStream::new(near.as_fd(), deadline).when_ready(PollFlags::POLLIN, never);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(calls < 100, "{calls} calls");
    }

    #[test]
    fn a_write_to_a_server_that_went_away_is_an_error() {
        let (near, far) = UnixStream::pair().unwrap();
        drop(far);
        let deadline = Deadline::after(Duration::from_secs(5));
        let written = DeadlineStream::new(near.as_fd(), deadline).write(b"x");
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
