//! A socket to the families of generic netlink.

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage};
use netlink_packet_generic::GenlMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_GENERIC};
use nix::errno::Errno;

use super::conversation::{Conversation, Payload, Progress};
use crate::error::{Error, ErrorKind, Result};

/// A socket for consecutive requests.
pub(super) struct Connection {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Connection {
    pub(super) fn open() -> Result<Self> {
        /// Longer than any message that the kernel can frame in one attribute
        /// (`struct nlattr`, `nla_len` is 16 bits).
        const LONGEST: usize = 128 * 1024;
        let open = || {
            let mut socket = Socket::new(NETLINK_GENERIC)?;
            socket.bind_auto()?;
            // A connected socket receives from no other sender.
            socket.connect(&SocketAddr::new(0, 0))?;
            // Only the text of a refusal depends on these (Linux 4.12, 4.3).
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

    pub(super) fn exchange(&mut self, family: u16, payload: &Payload) -> Result<Vec<Payload>> {
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
            // With MSG_TRUNC the true length is returned, even if the message
            // was cut.
            let received = self
                .socket
                .recv_from(&mut self.buffer, nix::libc::MSG_TRUNC);
            match received {
                Ok((_, sender)) if sender.port_number() != 0 => {
                    tracing::debug!(%sender, "a netlink message from an unknown sender");
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

pub(super) fn failed(what: &str, error: &io::Error) -> Error {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(errno) => Error::of_errno(what, errno),
        None => Error::new(ErrorKind::Io, format!("{what}: {error}")),
    }
}
