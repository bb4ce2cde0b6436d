//! The threads of the command.

use std::thread::{self, JoinHandle};

use lunbd::{Error, ErrorKind, Result};

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
