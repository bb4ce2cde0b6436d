//! The other end of a stream: exact reads that never last past the deadline.

use std::io::{self, Read, Write};

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};

/// A peer on a stream whose own reads and writes end at the deadline, like
/// those of [`DeadlineStream`](super::stream::DeadlineStream).
pub(crate) struct Peer<S> {
    stream: S,
    name: &'static str,
    stage: Stage,
    deadline: Deadline,
}

impl<S: Read + Write> Peer<S> {
    /// Errors use `name` ("the NBD server") and `stage`.
    pub(crate) fn new(stream: S, name: &'static str, stage: Stage, deadline: Deadline) -> Self {
        Self {
            stream,
            name,
            stage,
            deadline,
        }
    }

    /// Sets the stage for later errors.
    pub(crate) fn enter(&mut self, stage: Stage) {
        self.stage = stage;
    }

    /// Reads exactly as many bytes as `buffer` holds. Errors call them `what`.
    ///
    /// # Errors
    /// `Unreachable` if the peer closes or the connection breaks; `TimedOut` at
    /// the stage.
    pub(crate) fn fill(&mut self, what: &str, buffer: &mut [u8]) -> Result<()> {
        let length = buffer.len();
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            // Check here: with a peer that sends byte by byte, no read times
            // out by itself.
            let result = if self.deadline.has_passed() {
                Err(io::ErrorKind::TimedOut.into())
            } else {
                self.stream.read(rest)
            };
            match result {
                Ok(0) => {
                    let message = format!(
                        "{} closed the connection after {filled} of {length} bytes of {what}",
                        self.name
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

    /// Sends all of `bytes`. Errors call them `what`.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub(crate) fn write(&mut self, what: &str, bytes: &[u8]) -> Result<()> {
        let done = self.stream.write_all(bytes);
        done.and_then(|()| self.stream.flush())
            .map_err(|error| self.failed(&format!("{} to take {what}", self.name), &error))
    }

    /// A timeout of the connection itself is no timeout of our deadline.
    fn failed(&self, what: &str, error: &io::Error) -> Error {
        if self.deadline.has_passed() {
            return Error::timed_out(self.stage, self.deadline, what);
        }
        let message = format!("the connection broke while waiting for {what}: {error}");
        Error::new(ErrorKind::Unreachable, message)
    }
}
