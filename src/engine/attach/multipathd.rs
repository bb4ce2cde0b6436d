//! What multipathd is told about the paths of one unit, and what it answers.

use std::collections::{BTreeMap, BTreeSet};

use crate::deadline::Deadline;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::multipath::{Answer, Daemon};

/// The answers about the paths of one unit.
#[derive(Debug, Default)]
pub(in crate::engine) struct Answers {
    /// The paths that it takes into no map, by the name of the disk.
    pub(in crate::engine) refused: BTreeMap<String, Error>,
    /// It makes the map, and waits for udev.
    pub(in crate::engine) delayed: bool,
}

impl Answers {
    /// Tells it of each path.
    ///
    /// # Errors
    /// Those of [`Daemon::add_path`] that are not about one path.
    pub(in crate::engine) fn about(
        daemon: &Daemon,
        paths: &[ProbedPath],
        deadline: Deadline,
    ) -> Result<Self> {
        let mut answers = Self::default();
        for path in paths {
            let name = path.disk.name();
            match daemon.add_path(name, deadline) {
                Ok(Answer::NotWanted) => {
                    let message = format!("multipathd's configuration excludes {name}");
                    answers.refuse(name, Error::new(ErrorKind::Refused, message));
                }
                Ok(Answer::Delayed) => answers.delayed = true,
                Ok(Answer::Done) => {}
                Err(error) if error.kind() == ErrorKind::Refused => answers.refuse(name, error),
                Err(error) => return Err(error),
            }
        }
        Ok(answers)
    }

    fn refuse(&mut self, name: &str, error: Error) {
        self.refused.insert(name.to_owned(), error.at(Stage::Map));
    }

    /// Has it make the map of those paths that it takes, which it has left without one.
    /// Returns why it makes none, where it says so.
    ///
    /// # Errors
    /// Those of [`Daemon::wwids`] and [`Daemon::add_map`], but `Refused`.
    pub(super) fn have_map_made(
        &mut self,
        daemon: &Daemon,
        paths: &[ProbedPath],
        deadline: Deadline,
    ) -> Result<Option<String>> {
        let names = paths.iter().map(|path| path.disk.name());
        let taken: Vec<&str> = names
            .filter(|name| !self.refused.contains_key(*name))
            .collect();
        if taken.is_empty() {
            let reasons: BTreeSet<String> = self.refused.values().map(Error::to_string).collect();
            return Ok(Some(Vec::from_iter(reasons).join("; ")));
        }
        let known = daemon.wwids(deadline)?;
        let of_paths = taken.iter().filter_map(|name| known.get(*name));
        let units: BTreeSet<&str> = of_paths.map(String::as_str).collect();
        let Some(wwid) = units.first() else {
            let taken = taken.join(", ");
            return Ok(Some(format!("multipathd has read no WWID of {taken}")));
        };
        if units.len() > 1 {
            let units = Vec::from_iter(units).join(", ");
            return Ok(Some(format!(
                "multipathd takes the paths for different units: {units}"
            )));
        }
        match daemon.add_map(wwid, deadline) {
            Ok(Answer::NotWanted) => Ok(Some(format!(
                "multipathd's configuration excludes the unit {wwid}"
            ))),
            Ok(Answer::Delayed) => {
                self.delayed = true;
                Ok(None)
            }
            Ok(Answer::Done) => Ok(Some(format!(
                "multipathd reports that it created the map of {wwid}, but the map does not \
                 exist"
            ))),
            // Whoever has a path for himself keeps device-mapper from taking it.
            Err(error) if error.kind() == ErrorKind::Refused => Ok(Some(format!(
                "{error}: its log says why; a path that is mounted or claimed is in no map"
            ))),
            Err(error) => Err(error),
        }
    }
}
