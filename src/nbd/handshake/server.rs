//! The server at the other end of a stream, read exactly.

use std::io::{self, Read, Write};

use super::wire::{self, OptionCode, ReplyHeader};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};

pub(super) struct Server<'a, S> {
    stream: &'a mut S,
    deadline: Deadline,
}

impl<'a, S: Read + Write> Server<'a, S> {
    pub(super) fn new(stream: &'a mut S, deadline: Deadline) -> Self {
        Self { stream, deadline }
    }

    /// Reads so many bytes and not one more.
    pub(super) fn read<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads what follows a header, whose length has been checked.
    pub(super) fn payload(&mut self, what: &str, reply: ReplyHeader) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(reply.length).unwrap_or(0)];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn write(&mut self, what: &str, bytes: &[u8]) -> Result<()> {
        let done = self.stream.write_all(bytes);
        done.and_then(|()| self.stream.flush())
            .map_err(|error| self.failed(&format!("the server to take {what}"), &error))
    }

    /// Takes leave, as the protocol wants it. Who is going does not wait for
    /// the answer, and does not mind when the server is gone.
    pub(super) fn abort(&mut self) {
        let _ = self.write("OPT_ABORT", &wire::option(OptionCode::Abort, &[]));
    }

    fn fill(&mut self, what: &str, buffer: &mut [u8]) -> Result<()> {
        let length = buffer.len();
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            // A server that dribbles is never the one that waits.
            let result = if self.deadline.has_passed() {
                Err(io::ErrorKind::TimedOut.into())
            } else {
                self.stream.read(rest)
            };
            match result {
                Ok(0) => {
                    let message = format!(
                        "the NBD server closed the connection after {filled} of {length} bytes of {what}"
                    );
                    return Err(Error::new(ErrorKind::Unreachable, message));
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let seen = format!("{filled} of {length} bytes");
                    return Err(self.failed(what, &error).with_last_seen(seen));
                }
            }
        }
        Ok(())
    }

    /// A connection that timed out by itself is not our deadline.
    fn failed(&self, what: &str, error: &io::Error) -> Error {
        if self.deadline.has_passed() {
            return Error::timed_out(Stage::Handshake, self.deadline.elapsed(), what);
        }
        let message = format!("the connection broke while waiting for {what}: {error}");
        Error::new(ErrorKind::Unreachable, message)
    }
}
