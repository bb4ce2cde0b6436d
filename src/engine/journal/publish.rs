//! Publishes the failing volumes for other readers of the journal.

use std::fs;
use std::io;
use std::path::Path;

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
    /// `Io`; `TimedOut` at stage `journal`, also while an earlier call has not returned.
    pub(crate) fn publish_failures(&self, failing: Vec<Failing>, deadline: Deadline) -> Result<()> {
        let what = "the failures to be written";
        let published = &self.shared.published_failures;
        let Some(published) = published.try_lock_for(deadline.remaining()) else {
            return Err(Error::timed_out(Stage::Journal, deadline, what));
        };
        if failing.is_empty() && published.is_none() {
            return Ok(());
        }
        drop(published);
        let shared = self.shared.clone();
        worker::run(
            Stage::Journal,
            what,
            deadline,
            || "the journal's file system has not returned".to_owned(),
            move || {
                // A write that hangs keeps the lock, so that no later one is overtaken by it.
                let mut published = shared.published_failures.lock();
                let path = shared.directory.join(FAILING);
                let written = if failing.is_empty() {
                    remove_if_there(&path).map(|()| None)
                } else {
                    write(&path, failing).map(Some)
                };
                let failed = |error| Error::io("cannot publish the failures", &path, &error);
                *published = written.map_err(failed)?;
                Ok(())
            },
        )
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
