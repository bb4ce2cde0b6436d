//! The other end of a stream, read exactly and never past the deadline.

use std::io::{self, Read, Write};

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};

/// A peer that is spoken with over a stream whose own reads and writes end at
/// the deadline, as those of [`DeadlineStream`](super::stream::DeadlineStream)
/// do.
pub(crate) struct Peer<S> {
    stream: S,
    name: &'static str,
    stage: Stage,
    deadline: Deadline,
}

impl<S: Read + Write> Peer<S> {
    /// `name` ("the NBD server") and `stage` are for errors.
    pub(crate) fn new(stream: S, name: &'static str, stage: Stage, deadline: Deadline) -> Self {
        Self {
            stream,
            name,
            stage,
            deadline,
        }
    }

    /// What is done now.
    pub(crate) fn enter(&mut self, stage: Stage) {
        self.stage = stage;
    }

    /// Reads so many bytes of `what` and not one more.
    ///
    /// # Errors
    /// `Unreachable` where the peer closes or the connection breaks; `TimedOut`
    /// at the stage.
    pub(crate) fn fill(&mut self, what: &str, buffer: &mut [u8]) -> Result<()> {
        let length = buffer.len();
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            // A peer that dribbles is never the one that waits.
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

    /// Sends all of `bytes`, which are `what`.
    ///
    /// # Errors
    /// As of [`fill`](Self::fill).
    pub(crate) fn write(&mut self, what: &str, bytes: &[u8]) -> Result<()> {
        let done = self.stream.write_all(bytes);
        done.and_then(|()| self.stream.flush())
            .map_err(|error| self.failed(&format!("{} to take {what}", self.name), &error))
    }

    /// A connection that timed out by itself is not our deadline.
    fn failed(&self, what: &str, error: &io::Error) -> Error {
        if self.deadline.has_passed() {
            return Error::timed_out(self.stage, self.deadline, what);
        }
        let message = format!("the connection broke while waiting for {what}: {error}");
        Error::new(ErrorKind::Unreachable, message)
    }
}
