//! The two netlink sockets of the hub's thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_KOBJECT_UEVENT};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};

use crate::error::{Error, ErrorKind, Result};

/// The multicast group of the kernel.
const KERNEL_GROUP: u32 = 1;

/// A socket in the kernel group.
pub(super) struct KernelSocket {
    socket: Socket,
    buffer: Vec<u8>,
}

/// The result of one receive.
pub(super) enum Received<'a> {
    /// A datagram from the kernel.
    Datagram(&'a [u8]),
    /// A message to pass over: from another sender, or longer than any uevent.
    Foreign,
    /// The socket's buffer was full and messages are lost.
    Overrun,
    /// No message is waiting.
    Nothing,
}

impl KernelSocket {
    pub(super) fn open(receive_buffer: usize) -> Result<Self> {
        /// Twice what the kernel puts into one uevent (`UEVENT_BUFFER_SIZE` and the
        /// path before it).
        const LONGEST: usize = 8192;
        let open = || {
            let mut socket = Socket::new(NETLINK_KOBJECT_UEVENT)?;
            socket.set_non_blocking(true)?;
            enlarge(socket.as_fd(), receive_buffer)?;
            socket.bind(&SocketAddr::new(0, KERNEL_GROUP))?;
            Ok(socket)
        };
        open()
            .map(|socket| Self {
                socket,
                buffer: Vec::with_capacity(LONGEST),
            })
            .map_err(|error: io::Error| {
                let message = format!("cannot open the kernel's uevent socket: {error}");
                Error::new(ErrorKind::Io, message)
            })
    }

    pub(super) fn receive(&mut self) -> Received<'_> {
        self.buffer.clear();
        // With MSG_TRUNC the true length is returned, even if the message was cut.
        let flags = nix::libc::MSG_TRUNC;
        match self.socket.recv_from(&mut self.buffer, flags) {
            Ok((length, sender)) if sender.port_number() != 0 || length != self.buffer.len() => {
                Received::Foreign
            }
            Ok(_) => Received::Datagram(&self.buffer),
            Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::ENOBUFS) => Received::Overrun,
                Some(Errno::EINTR) => Received::Foreign,
                _ => Received::Nothing,
            },
        }
    }
}

impl AsFd for KernelSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A socket in the udev group, for block devices. libudev checks that root sent the
/// events that it returns.
pub(super) fn open_udev(receive_buffer: usize) -> Result<udev::MonitorSocket> {
    let open = || {
        let socket = udev::MonitorBuilder::new()?
            .match_subsystem("block")?
            .listen()?;
        enlarge(socket.as_fd(), receive_buffer)?;
        Ok(socket)
    };
    open().map_err(|error: io::Error| {
        let message = format!("cannot open udev's monitor: {error}");
        Error::new(ErrorKind::Io, message)
    })
}

/// Sets the receive buffer, past the machine's limit if permitted
/// (`CAP_NET_ADMIN`).
fn enlarge(socket: BorrowedFd<'_>, bytes: usize) -> nix::Result<()> {
    setsockopt(&socket, sockopt::RcvBufForce, &bytes)
        .or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &bytes))
}

/// Counts what a socket lost since the last check. `ENOBUFS` alone is not enough,
/// because libudev swallows it.
#[derive(Debug, Default)]
pub(super) struct DropCount(u32);

impl DropCount {
    /// Whether messages were lost since the last call; `None` if the kernel does
    /// not report it.
    pub(super) fn rose(&mut self, socket: impl AsFd) -> Option<bool> {
        let now = lunbd_sys::socket::dropped_messages(socket).ok()?;
        Some(std::mem::replace(&mut self.0, now) != now)
    }
}
