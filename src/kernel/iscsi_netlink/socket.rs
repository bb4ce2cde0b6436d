//! A socket to the kernel's iSCSI.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ISCSI};
use nix::errno::Errno;

use crate::error::{Error, ErrorKind, Result};

/// Opens a socket with this port number; for 0 the kernel chooses one.
pub(super) fn open_as(port: u32) -> Result<Socket> {
    let open = || {
        let mut socket = Socket::new(NETLINK_ISCSI)?;
        socket.bind(&SocketAddr::new(port, 0))?;
        // The kernel keeps other senders away from a connected socket.
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(socket)
    };
    open().map_err(|error: io::Error| failed("cannot open a socket to the kernel's iSCSI", &error))
}

pub(super) fn failed(what: &str, error: &io::Error) -> Error {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ECONNREFUSED) => {
            let message = format!("{what}: it is in the initial network namespace alone");
            Error::new(ErrorKind::NotSupported, message)
        }
        Some(Errno::EPROTONOSUPPORT) => {
            let message = format!("{what}: the module iscsi_tcp is not loaded");
            Error::new(ErrorKind::NotSupported, message)
        }
        Some(errno) => Error::of_errno(what, errno),
        None => Error::new(ErrorKind::Io, format!("{what}: {error}")),
    }
}
