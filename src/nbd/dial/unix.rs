//! Unix sockets.

use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::UnixAddr;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::unix_socket;

/// # Errors
/// `Unreachable` if no server listens; `NotPermitted`; `TimedOut` at stage
/// `dial` if the server's queue stays full.
pub(super) fn connect(path: &Path, deadline: Deadline) -> Result<OwnedFd> {
    let failed = |errno: Errno| {
        let error = Error::io("cannot connect to the NBD server", path, &errno.into());
        match errno {
            // There is no such file, no socket, or no listener on it.
            Errno::ENOENT | Errno::ECONNREFUSED | Errno::ENOTDIR => {
                error.with_kind(ErrorKind::Unreachable)
            }
            _ => error,
        }
    };
    let address = UnixAddr::new(path).map_err(failed)?;
    let connected = unix_socket::connect(&address, deadline).map_err(failed)?;
    connected.ok_or_else(|| {
        let what = "a place in the NBD server's queue";
        Error::timed_out(Stage::Dial, deadline, what).with_path(path)
    })
}
