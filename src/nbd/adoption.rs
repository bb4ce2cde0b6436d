//! Whether the kernel has taken an offered connection.

use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use super::command::NewTimeouts;
use crate::error::{Error, Result};

/// Whether the kernel took a socket that was offered with
/// [`Reconfigure`](super::Reconfigure), whose answer does not say whether the kernel took
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adoption {
    /// The kernel put the connection into a slot whose connection was dead.
    Taken,
    /// No slot was dead.
    NotTaken,
    /// This process does not know the device's request timeout. For a device without one
    /// the kernel leaves no mark on a socket.
    Unseen,
}

/// The timeouts with which a connection is offered to a device that will have `wanted`.
/// With a request timeout of zero the kernel would leave no mark on the socket that it
/// takes. So such a device gets 30 s until the offer is answered. After 30 s the kernel
/// checks a request without a timeout anyway (`drivers/block/nbd.c`,
/// `nbd_set_cmd_timeout`).
pub(crate) fn timeouts_that_mark(wanted: NewTimeouts) -> NewTimeouts {
    const MARK: Duration = Duration::from_secs(30);
    NewTimeouts {
        request: wanted.request.map(|limit| match limit {
            Duration::ZERO => MARK,
            limit => limit,
        }),
        ..wanted
    }
}

/// The request timeout of the device whose kernel took this socket; `None` if the socket has
/// no mark. The kernel shows the timeout nowhere else for certain: `queue/io_timeout` is 30 s
/// for a device without one too, and anyone may write it.
pub(crate) fn request_timeout_of(taken: &OwnedFd) -> Option<Duration> {
    let limit = getsockopt(taken, sockopt::SendTimeout).ok()?;
    let limit = u64::try_from(limit.num_microseconds()).ok()?;
    Some(Duration::from_micros(limit)).filter(|limit| !limit.is_zero())
}

/// Removes the mark, so that the connection has no timeout of its own.
///
/// # Errors
/// By the errno.
pub(crate) fn unmark(taken: &OwnedFd) -> Result<()> {
    setsockopt(taken, sockopt::SendTimeout, &TimeVal::zero())
        .map_err(|errno| Error::of_errno("cannot take a socket's send timeout away", errno))
}

/// Checks an offered socket after the command has returned: the kernel has decided by
/// then. It sets the send timeout of a socket that it takes to the device's request
/// timeout, unless that is zero (`drivers/block/nbd.c`, `nbd_reconnect_socket`). Dialled
/// sockets have no send timeout.
pub(crate) fn adoption(offered: &OwnedFd, timeouts: NewTimeouts) -> Adoption {
    let limit = getsockopt(offered, sockopt::SendTimeout);
    if limit.is_ok_and(|limit| limit.num_microseconds() > 0) {
        return Adoption::Taken;
    }
    match timeouts.request {
        Some(request) if !request.is_zero() => Adoption::NotTaken,
        _ => Adoption::Unseen,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_send_timeout_shows_that_the_kernel_took_the_socket() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        let request = |seconds| NewTimeouts {
            request: Some(Duration::from_secs(seconds)),
            ..NewTimeouts::default()
        };
        let seen =
            |socket: &UnixStream, timeouts| adoption(&socket.try_clone().unwrap().into(), timeouts);
        assert_eq!(seen(&socket, request(30)), Adoption::NotTaken);
        assert_eq!(seen(&socket, request(0)), Adoption::Unseen);
        assert_eq!(seen(&socket, NewTimeouts::default()), Adoption::Unseen);
        // The kernel sets this timeout.
        socket
            .set_write_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        for timeouts in [request(30), request(0), NewTimeouts::default()] {
            assert_eq!(seen(&socket, timeouts), Adoption::Taken);
        }
        let shown = || request_timeout_of(&socket.try_clone().unwrap().into());
        assert_eq!(shown(), Some(Duration::from_secs(30)));
        unmark(&socket.try_clone().unwrap().into()).unwrap();
        assert_eq!(seen(&socket, request(30)), Adoption::NotTaken);
        assert_eq!(socket.write_timeout().unwrap(), None);
        assert_eq!(shown(), None);
    }

    #[test]
    fn only_a_device_whose_request_timeout_is_not_known_leaves_an_adoption_unseen() {
        let dead_connection = Some(Duration::from_secs(7));
        let of = |request: Option<u64>| NewTimeouts {
            request: request.map(Duration::from_secs),
            dead_connection,
        };
        let (socket, _peer) = UnixStream::pair().unwrap();
        let socket = OwnedFd::from(socket);
        for (wanted, offered, seen) in [
            (Some(0), Some(30), Adoption::NotTaken),
            (Some(5), Some(5), Adoption::NotTaken),
            (None, None, Adoption::Unseen),
        ] {
            let offered = of(offered);
            assert_eq!(timeouts_that_mark(of(wanted)), offered);
            assert_eq!(adoption(&socket, offered), seen, "{wanted:?}");
        }
    }
}
