//! `apply --watch` takes in each change of its file.

use std::io::{self, Write};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use lunbd::reconcile::{Desired, Reconciler};
use lunbd::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::detach_limit::{self, DetachLimit};
use crate::envelope::{self, Type};
use crate::followed_file::FollowedFile;
use crate::progress::BARS;
use crate::{arguments, threads};

/// The pause before the file is read again after it could not be read or compared with
/// the attached volumes.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Takes in the file whenever it changes. A file that is broken, or that would detach too
/// many volumes, changes nothing.
pub(crate) struct Follower {
    file: FollowedFile,
    /// What was taken in last.
    wanted: Desired,
    limit: Option<DetachLimit>,
    last_error: LastError,
    json: bool,
}

impl Follower {
    pub(crate) fn new(
        what: &arguments::Apply,
        file: FollowedFile,
        wanted: Desired,
        json: bool,
    ) -> Self {
        Self {
            file,
            wanted,
            limit: what.allow_detach,
            last_error: LastError::default(),
            json,
        }
    }

    /// Follows the file on a thread of its own until the reconciler is gone. If the file can
    /// no longer be followed, it stops the reconciler and sends the error. It first reports
    /// `refused`, the error of the present file.
    ///
    /// # Errors
    /// `Io` if no thread can be started.
    pub(crate) fn start(
        mut self,
        reconciler: &Arc<Reconciler>,
        refused: Option<&Error>,
    ) -> Result<Receiver<Error>> {
        if let Some(error) = refused {
            self.refuse(error);
        }
        let reconciler = Arc::downgrade(reconciler);
        let (ended, watch_error) = mpsc::channel();
        threads::start("lunbd-follow", move || {
            if let Err(error) = self.follow(&reconciler) {
                let _the_command_has_ended = ended.send(error);
                if let Some(reconciler) = reconciler.upgrade() {
                    reconciler.stop();
                }
            }
        })?;
        Ok(watch_error)
    }

    /// # Errors
    /// `Io` if the file can no longer be watched.
    fn follow(&mut self, reconciler: &Weak<Reconciler>) -> Result<()> {
        let mut again_after = None;
        loop {
            self.file.wait(again_after.take())?;
            let read = self.file.read()?;
            let Some(reconciler) = reconciler.upgrade() else {
                return Ok(());
            };
            match read.and_then(|now| self.apply_change(&reconciler, now)) {
                Ok(Some(now)) => {
                    self.wanted = now;
                    self.last_error = LastError::default();
                    FileEvent::TakenIn.print(self.json);
                }
                Ok(None) => self.last_error = LastError::default(),
                Err(error) => {
                    self.refuse(&error);
                    if error.kind() != ErrorKind::InvalidInput {
                        again_after = Some(AGAIN_AFTER);
                    }
                }
            }
        }
    }

    /// Sets the volumes of the file, unless they are wanted already.
    fn apply_change(
        &self,
        reconciler: &Reconciler,
        read: Option<Desired>,
    ) -> Result<Option<Desired>> {
        let is_new = |now: &Desired| *now != self.wanted || !now.is_spelt_as(&self.wanted);
        let Some(now) = read.filter(is_new) else {
            return Ok(None);
        };
        let before = reconciler.preview(&self.wanted)?;
        let known = reconciler.journal().records().len();
        detach_limit::check(&reconciler.preview(&now)?, &now, &before, known, self.limit)?;
        reconciler.set(now.clone());
        Ok(Some(now))
    }

    fn refuse(&mut self, error: &Error) {
        if self.last_error.is_new(error) {
            FileEvent::Refused { error }.print(self.json);
        }
    }
}

/// The last reported error. A repeated error is reported once.
#[derive(Default)]
struct LastError(Option<String>);

impl LastError {
    fn is_new(&mut self, error: &Error) -> bool {
        let text = Some(format!("{error:#}"));
        let is_new = self.0 != text;
        self.0 = text;
        is_new
    }
}

/// The result of a change of the file.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum FileEvent<'a> {
    #[serde(rename = "file_taken_in")]
    TakenIn,
    #[serde(rename = "file_refused")]
    Refused { error: &'a Error },
}

#[derive(Serialize)]
struct Timed<'a> {
    time: String,
    #[serde(flatten)]
    event: FileEvent<'a>,
}

impl FileEvent<'_> {
    /// Writes it among the events on standard output for `--json`, and on standard error
    /// otherwise.
    fn print(self, json: bool) {
        // A failed write is ignored: the thread that prints the events notices that the
        // reader is gone.
        let _told = BARS.suspend(|| match self {
            event if json => {
                let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
                let mut out = io::stdout().lock();
                envelope::write(&mut out, Type::FileEvent, &Timed { time, event })
                    .and_then(|()| out.flush())
            }
            Self::TakenIn => writeln!(io::stderr(), "lunbd: the file has changed"),
            Self::Refused { error } => {
                writeln!(io::stderr(), "lunbd: the file is refused: {error:#}")
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_error_is_reported_once() {
        let error = |text| Error::new(ErrorKind::Io, text);
        let mut told = LastError::default();
        let is_new = ["full", "full", "gone", "full"].map(|text| told.is_new(&error(text)));
        assert_eq!(is_new, [true, false, true, true]);
    }
}
