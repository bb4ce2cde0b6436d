//! A connection to a target, which carries one PDU after the other.

use std::io::{Read, Write};

use super::pdu::{DEFAULT_DATA, HEADER, Lengths, NO_TAG, NopOut, Response};
use super::{PEER, violation};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::peer::Peer;

/// The most pings that a target may send before an answer.
const MAX_PINGS: usize = 16;

pub(super) struct Wire<S> {
    peer: Peer<S>,
    /// The longest data segment that we declared, in bytes.
    limit: u32,
    pub(super) cmd_sn: u32,
    /// The `StatSN` that is expected next.
    pub(super) exp_stat_sn: u32,
}

impl<S: Read + Write> Wire<S> {
    /// A connection on which nothing was sent yet.
    pub(super) fn new(stream: S, cmd_sn: u32, deadline: Deadline) -> Self {
        Self {
            peer: Peer::new(stream, PEER, Stage::Login, deadline),
            limit: DEFAULT_DATA,
            cmd_sn,
            exp_stat_sn: 0,
        }
    }

    /// Ends the login. From now on the target may send `limit` bytes of data in one PDU.
    pub(super) fn enter(&mut self, stage: Stage, limit: u32) {
        self.peer.enter(stage);
        self.limit = limit;
    }

    pub(super) fn send(&mut self, what: &str, pdu: &[u8]) -> Result<()> {
        self.peer.write(what, pdu)
    }

    /// Reads the next PDU and its data.
    pub(super) fn receive(&mut self, what: &str) -> Result<(Response, Vec<u8>)> {
        let mut header = [0; HEADER];
        self.peer.fill(what, &mut header)?;
        // The header is checked before any wait for the bytes that it announces.
        let response = Response::decode(&header)?;
        let lengths = Lengths::decode(&header, self.limit)?;
        let mut data = vec![0; lengths.following()];
        self.peer.fill(what, &mut data)?;
        lengths.keep_data(&mut data);
        Ok((response, data))
    }

    /// As [`receive`](Self::receive), after a login. It answers the target's pings. An
    /// asynchronous message or a reject is an error.
    pub(super) fn receive_answer(&mut self, what: &str) -> Result<(Response, Vec<u8>)> {
        for _ in 0..=MAX_PINGS {
            match self.receive(what)? {
                (Response::NopIn(nop), _) => {
                    if nop.transfer_tag == NO_TAG {
                        continue;
                    }
                    self.exp_stat_sn = nop.stat_sn;
                    let pong = NopOut {
                        lun: nop.lun,
                        transfer_tag: nop.transfer_tag,
                        cmd_sn: self.cmd_sn,
                        exp_stat_sn: self.exp_stat_sn,
                    };
                    self.send("a NOP-Out", &pong.encode())?;
                }
                (Response::Async(message), _) => {
                    let event = message.event;
                    let message = format!("{PEER} ends the session (asynchronous event {event})");
                    return Err(Error::new(ErrorKind::Unreachable, message));
                }
                (Response::Reject(reject), _) => return Err(rejected(reject.reason)),
                answer => return Ok(answer),
            }
        }
        Err(violation(
            "the number of NOP-Ins",
            "too large",
            "at most 16 before an answer",
        ))
    }
}

/// The error for a PDU of ours that the target rejected.
pub(super) fn rejected(reason: u8) -> Error {
    let message = format!("{PEER} rejected a request (reason {reason:#04x})");
    Error::new(ErrorKind::Refused, message)
}
