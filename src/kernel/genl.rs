//! Generic netlink: one request to a family of the kernel's and its answers,
//! on a socket of its own.
//!
//! The kernel does the work of a command inside `sendmsg(2)` and under one
//! mutex for most families (`net/netlink/genetlink.c`, `genl_mutex`), the
//! resolution of names included: a command that hangs, hangs those of others,
//! and no receive timeout helps. So each runs on a [`worker`].

mod conversation;
mod family;
mod listener;

use std::io;
use std::os::fd::OwnedFd;

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage};
use netlink_packet_generic::GenlMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_GENERIC};
use nix::errno::Errno;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::worker;
pub(crate) use conversation::Payload;
use conversation::{Conversation, Progress};
pub(crate) use listener::{Listener, Notification};

/// One command to a family.
#[derive(Debug)]
pub(crate) struct Request {
    /// The family's name; the kernel gives its number anew at each load.
    pub(crate) family: &'static str,
    /// Command, version and attributes.
    pub(crate) payload: Payload,
    /// The descriptors that the attributes name by number. They stay open
    /// until the kernel has returned, also when the caller no longer waits:
    /// else a number could by then be another file's.
    pub(crate) keep_open: Vec<OwnedFd>,
}

/// Sends `request` and returns the kernel's answers once it has acknowledged
/// it.
///
/// After a timeout the command may still be done or refused: what it is about
/// has to be looked at.
///
/// # Errors
/// By the kernel's errno, with its own words where it gave some;
/// `NotSupported` where the family does not exist; `TimedOut` at `stage`.
pub(crate) fn call(
    request: Request,
    stage: Stage,
    what: &str,
    deadline: Deadline,
    last_seen: impl FnOnce() -> String,
) -> Result<Vec<Payload>> {
    worker::run(stage, what, deadline, last_seen, move || {
        // Named, so that all of it moves to this thread and lasts as long.
        let Request {
            family,
            payload,
            keep_open,
        } = request;
        let result = exchange(family, &payload);
        drop(keep_open);
        result
    })
}

fn exchange(family: &'static str, payload: &Payload) -> Result<Vec<Payload>> {
    let mut connection = Connection::open()?;
    if let Some(id) = family::known(family) {
        match connection.exchange(id, payload) {
            // No family has this number: the module was loaded anew, and
            // nothing was done.
            Err(error) if error.errno() == Some(nix::libc::ENOENT) => {}
            result => return result,
        }
    }
    let id = family::resolve(&mut connection, family)?;
    connection.exchange(id, payload)
}

/// A socket for one request after another.
pub(super) struct Connection {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Connection {
    fn open() -> Result<Self> {
        /// Longer than any message that the kernel can frame in one attribute
        /// (`struct nlattr`, `nla_len` is 16 bits).
        const LONGEST: usize = 128 * 1024;
        let open = || {
            let mut socket = Socket::new(NETLINK_GENERIC)?;
            socket.bind_auto()?;
            // Of a connected socket the kernel keeps other senders away.
            socket.connect(&SocketAddr::new(0, 0))?;
            // Only the words of a refusal depend on these (Linux 4.12, 4.3).
            let _ = socket.set_ext_ack(true);
            let _ = socket.set_cap_ack(true);
            Ok(socket)
        };
        open()
            .map(|socket| Self {
                socket,
                sequence: 0,
                buffer: Vec::with_capacity(LONGEST),
            })
            .map_err(|error| failed("cannot open a generic netlink socket", &error))
    }

    fn exchange(&mut self, family: u16, payload: &Payload) -> Result<Vec<Payload>> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = frame(family, self.sequence, payload);
        let sent = self.socket.send(&request, 0);
        match sent.map_err(|error| failed("cannot send to the kernel", &error))? {
            sent if sent == request.len() => {}
            _ => return Err(Error::new(ErrorKind::Io, "the request was cut short")),
        }
        // The kernel has queued its answers by now.
        let mut conversation = Conversation::new(family, self.sequence);
        loop {
            let datagram = self.receive()?;
            match conversation.take(datagram)? {
                Progress::Open => {}
                Progress::Done(answers) => return Ok(answers),
            }
        }
    }

    fn receive(&mut self) -> Result<&[u8]> {
        loop {
            self.buffer.clear();
            // With MSG_TRUNC the true length comes back, also of what was cut.
            let received = self
                .socket
                .recv_from(&mut self.buffer, nix::libc::MSG_TRUNC);
            match received {
                Ok((_, sender)) if sender.port_number() != 0 => {
                    tracing::debug!(%sender, "a netlink message of a stranger");
                }
                Ok((length, _)) if length != self.buffer.len() => {
                    let message = format!("the kernel's answer of {length} bytes was truncated");
                    return Err(Error::new(ErrorKind::Io, message));
                }
                Ok(_) => return Ok(&self.buffer),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed("cannot read the kernel's answer", &error)),
            }
        }
    }
}

fn frame(family: u16, sequence: u32, payload: &Payload) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_ACK;
    header.sequence_number = sequence;
    let mut message = GenlMessage::from_payload(payload.clone());
    message.set_resolved_family_id(family);
    let mut message = NetlinkMessage::new(header, message.into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn failed(what: &str, error: &io::Error) -> Error {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(errno) => Error::of_errno(what, errno),
        None => Error::new(ErrorKind::Io, format!("{what}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ask(family: &'static str) -> Result<Vec<Payload>> {
        let request = Request {
            family,
            payload: family::get_family("nlctrl"),
            keep_open: Vec::new(),
        };
        let deadline = Deadline::after(Duration::from_secs(10));
        call(request, Stage::Resolve, "an answer", deadline, String::new)
    }

    #[test]
    fn the_controller_answers_about_itself_and_its_number_is_remembered() {
        for _ in 0..2 {
            let answers = ask("nlctrl").unwrap();
            assert_eq!(answers.len(), 1);
            assert_eq!(family::id_in(&answers[0]), Some(16));
        }
        assert_eq!(family::known("nlctrl"), Some(16));
    }

    #[test]
    fn a_number_that_no_family_has_any_more_is_resolved_again() {
        family::remember("lunbd-none", 0x3ff);
        let error = ask("lunbd-none").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported);
        assert!(error.to_string().contains("lunbd-none"), "{error}");
        assert_eq!(family::known("lunbd-none"), None);
    }
}
