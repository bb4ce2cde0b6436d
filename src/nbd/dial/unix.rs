//! Unix sockets.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};

/// # Errors
/// `Unreachable` where nobody listens, `NotPermitted`, `TimedOut` at stage
/// `dial` where the server's queue stays full.
pub(super) fn connect(path: &Path, deadline: Deadline) -> Result<OwnedFd> {
    let failed = |errno: Errno| {
        let error = Error::io("cannot connect to the NBD server", path, &errno.into());
        match errno {
            // Not there, no socket, or one that nobody listens on.
            Errno::ENOENT | Errno::ECONNREFUSED | Errno::ENOTDIR => {
                error.with_kind(ErrorKind::Unreachable)
            }
            _ => error,
        }
    };
    let address = UnixAddr::new(path).map_err(failed)?;
    let family = AddressFamily::Unix;
    let socket =
        socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).map_err(failed)?;
    loop {
        // A nonblocking connect could not wait for a place in the server's
        // queue; one with a send timeout does (unix(7), EAGAIN).
        let remaining = deadline.remaining();
        if remaining.is_zero() {
            return Err(timed_out(path, deadline));
        }
        limit_connect(&socket, remaining).map_err(failed)?;
        match socket::connect(socket.as_raw_fd(), &address) {
            Ok(()) => break,
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(errno) => return Err(failed(errno)),
        }
    }
    // An idle link would die of it.
    limit_connect(&socket, Duration::ZERO).map_err(failed)?;
    Ok(socket)
}

/// A limit of zero is none.
fn limit_connect(socket: &OwnedFd, limit: Duration) -> nix::Result<()> {
    const LONGEST: Duration = Duration::from_secs(3600);
    let microseconds = limit.min(LONGEST).as_micros();
    let rounded_to_none = microseconds == 0 && !limit.is_zero();
    let microseconds = i64::try_from(microseconds).unwrap_or(i64::MAX);
    let limit = TimeVal::microseconds(microseconds + i64::from(rounded_to_none));
    setsockopt(socket, sockopt::SendTimeout, &limit)
}

fn timed_out(path: &Path, deadline: Deadline) -> Error {
    let what = "a place in the NBD server's queue";
    Error::timed_out(Stage::Dial, deadline.elapsed(), what).with_path(path)
}
