//! Publishes the failing volumes for other readers of the journal.

use std::fs::{self};

use crate::deadline::Deadline;
use crate::engine::journal::Journal;
use crate::engine::journal::failing::{FAILING, Failing, write};
use crate::error::{Error, Result, Stage};
use crate::kernel::worker;

impl Journal {
    /// Publishes which volumes fail, for processes that read the journal while this one
    /// holds it.
    ///
    /// # Errors
    /// `Io`; `TimedOut` at stage `journal`.
    pub(crate) fn publish_failures(&self, failing: Vec<Failing>, deadline: Deadline) -> Result<()> {
        if failing.is_empty() && self.shared.published_failures.lock().is_none() {
            return Ok(());
        }
        let shared = self.shared.clone();
        worker::run(
            Stage::Journal,
            "the failures to be written",
            deadline,
            || "the journal's file system has not returned".to_owned(),
            move || {
                let path = shared.directory.join(FAILING);
                let written = if failing.is_empty() {
                    fs::remove_file(&path).map(|()| None)
                } else {
                    write(&path, failing).map(Some)
                };
                let failed = |error| Error::io("cannot publish the failures", &path, &error);
                *shared.published_failures.lock() = written.map_err(failed)?;
                Ok(())
            },
        )
    }
}
