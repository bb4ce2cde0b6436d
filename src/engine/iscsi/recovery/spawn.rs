//! The threads of the recovery.

use std::thread;

use crate::error::{Error, ErrorKind, Result, Stage};

/// Runs `work` on a detached thread.
pub(super) fn spawn(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let span = tracing::Span::current();
    let run = move || {
        let _entered = span.entered();
        work();
    };
    let thread = thread::Builder::new().name("lunbd-recovery".to_owned());
    thread.spawn(run).map(drop).map_err(|error| {
        let message = format!("cannot start a thread: {error}");
        Error::new(ErrorKind::Io, message).at(Stage::Session)
    })
}
