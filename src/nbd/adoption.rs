//! Whether the kernel has taken a connection that it was offered.

use std::os::fd::OwnedFd;

use nix::sys::socket::{getsockopt, sockopt};
use nix::sys::time::TimeValLike;

use super::command::NewTimeouts;

/// What a socket itself shows after it was offered with
/// [`Reconfigure`](super::Reconfigure), whose answer does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adoption {
    /// The kernel put it into a slot whose connection was dead.
    Taken,
    /// No slot was dead.
    NotTaken,
    /// The device has no request timeout, or one that nobody knows: there the kernel
    /// leaves no mark on a socket.
    Unseen,
}

/// Offered sockets are looked at when the command has returned: the kernel has decided by
/// then. It sets the send timeout of each that it takes to the device's request timeout,
/// where that is not zero (`drivers/block/nbd.c`, `nbd_reconnect_socket`). Dialled sockets
/// have none.
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
    use std::time::Duration;

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
        // As the kernel does.
        socket
            .set_write_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        for timeouts in [request(30), request(0), NewTimeouts::default()] {
            assert_eq!(seen(&socket, timeouts), Adoption::Taken);
        }
    }
}
