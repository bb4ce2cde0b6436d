//! Starts threads.

use std::io;
use std::thread::{Builder, JoinHandle};

use crate::error::{Error, ErrorKind, Result};

/// Starts a thread.
///
/// # Errors
/// `Io` if the machine starts no further thread.
pub(crate) fn start<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let thread = Builder::new().name(name.to_owned());
    thread.spawn(run).map_err(|error| not_started(&error))
}

pub(crate) fn not_started(error: &io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot start a thread: {error}"))
}
