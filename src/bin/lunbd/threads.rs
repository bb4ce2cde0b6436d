//! The threads of the command.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};

use lunbd::{Deadline, Error, ErrorKind, Result};

/// # Errors
/// `Io` if no thread can be started.
pub(crate) fn start<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(run).map_err(|error| {
        let message = format!("cannot start a thread: {error}");
        Error::new(ErrorKind::Io, message)
    })
}

/// A call on a thread of its own, such as one that a hung file server may hold.
pub(crate) struct Call<T>(Receiver<Result<T>>);

impl<T: Send + 'static> Call<T> {
    /// # Errors
    /// `Io` if no thread can be started.
    pub(crate) fn start(
        name: &str,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let (done, result) = mpsc::sync_channel(1);
        let _runs_on = start(name, move || {
            // After a timeout no caller waits for the result.
            let _ = done.send(call());
        })?;
        Ok(Self(result))
    }

    /// The result; `None` if the call has not returned by `deadline`.
    pub(crate) fn wait(&self, deadline: Deadline) -> Option<Result<T>> {
        match self.0.recv_timeout(deadline.remaining()) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                let message = "the thread of a call died";
                Some(Err(Error::new(ErrorKind::Io, message)))
            }
        }
    }
}
