//! The server at the other end of a stream, with exact reads.

use std::io::{Read, Write};

use super::wire::{self, OptionCode, ReplyHeader};
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::kernel::peer::Peer;

pub(super) struct Server<'a, S>(Peer<&'a mut S>);

impl<'a, S: Read + Write> Server<'a, S> {
    pub(super) fn new(stream: &'a mut S, deadline: Deadline) -> Self {
        Self(Peer::new(
            stream,
            "the NBD server",
            Stage::Handshake,
            deadline,
        ))
    }

    pub(super) fn read<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the payload after a header, whose length is already checked.
    pub(super) fn payload(&mut self, what: &str, reply: ReplyHeader) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(reply.length).unwrap_or(0)];
        self.0.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn write(&mut self, what: &str, bytes: &[u8]) -> Result<()> {
        self.0.write(what, bytes)
    }

    /// Tells the server that the client leaves, as the protocol requires. It
    /// does not wait for the answer, and ignores a server that is gone.
    pub(super) fn abort(&mut self) {
        let _ = self.write("OPT_ABORT", &wire::option(OptionCode::Abort, &[]));
    }
}
