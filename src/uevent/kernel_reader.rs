//! The kernel's socket. The hub's thread reads it, and so does a caller that must
//! know at once what it holds.

use std::os::fd::{AsFd, BorrowedFd};

use super::dispatch::Dispatch;
use super::event::{Event, Origin};
use super::message::Message;
use super::socket::{DropCount, KernelSocket, Received};
use crate::error::Result;

pub(super) struct KernelReader {
    socket: KernelSocket,
    drops: DropCount,
}

impl std::fmt::Debug for KernelReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KernelReader")
    }
}

impl KernelReader {
    pub(super) fn open(receive_buffer: usize) -> Result<Self> {
        let socket = KernelSocket::open(receive_buffer)?;
        // The first check counts what was lost so far.
        let drops = DropCount::default();
        Ok(Self { socket, drops })
    }

    /// Delivers what the socket holds, but at most `most` datagrams. Returns whether
    /// this was all, without an unreported loss.
    pub(super) fn read(&mut self, most: usize, dispatch: &Dispatch) -> bool {
        let mut is_empty = false;
        for _ in 0..most {
            match self.socket.receive() {
                Received::Datagram(datagram) => match Message::parse(datagram) {
                    Ok(message) => feed(dispatch, &message),
                    Err(malformed) => {
                        tracing::debug!(%malformed, "a datagram that is no uevent");
                        dispatch.counts().foreign_message();
                    }
                },
                Received::Foreign => dispatch.counts().foreign_message(),
                // The check below counts this.
                Received::Overrun => {}
                Received::Nothing => {
                    is_empty = true;
                    break;
                }
            }
        }
        let rose = self.drops.rose(&self.socket);
        if rose == Some(true) {
            dispatch.resync();
        }
        is_empty && rose.is_some()
    }

    /// Delivers all that the kernel had sent before the call. `false` if that is not
    /// certain, because more comes than is read.
    pub(super) fn catch_up(&mut self, dispatch: &Dispatch) -> bool {
        /// More than the socket's buffer holds.
        const MOST: usize = 1 << 16;
        self.read(MOST, dispatch)
    }
}

impl AsFd for KernelReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

pub(super) fn feed(dispatch: &Dispatch, message: &Message<'_>) {
    let is_unit_attention = || message.action == "change" && message.property("SDEV_UA").is_some();
    let event = || Some(Event::of(Origin::Kernel, message));
    dispatch.deliver_of_kernel(message.devpath, is_unit_attention, event);
}
