//! The threads of the recovery.

use crate::error::{Result, Stage};
use crate::kernel::threads;

/// Runs `work` on a detached thread.
pub(super) fn spawn(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let span = tracing::Span::current();
    let run = move || {
        let _entered = span.entered();
        work();
    };
    let started = threads::start("lunbd-recovery", run);
    started.map(drop).map_err(|error| error.at(Stage::Session))
}
