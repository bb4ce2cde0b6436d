//! The commands to multipathd about the paths of one unit, and its answers.

use std::collections::{BTreeMap, BTreeSet};

use crate::deadline::Deadline;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::multipath::{Answer, Daemon};

#[derive(Debug, Default)]
pub(in crate::engine) struct Answers {
    /// The paths that multipathd puts into no map, by the name of the disk.
    pub(in crate::engine) refused: BTreeMap<String, Error>,
    /// multipathd makes the map, and waits for udev.
    pub(in crate::engine) delayed: bool,
}

impl Answers {
    /// Tells multipathd of each path.
    ///
    /// # Errors
    /// Those of [`Daemon::add_path`] that concern more than one path.
    pub(in crate::engine) fn add_paths(
        daemon: &Daemon,
        paths: &[ProbedPath],
        deadline: Deadline,
    ) -> Result<Self> {
        let mut answers = Self::default();
        for path in paths {
            let name = path.disk.name();
            match daemon.add_path(name, deadline) {
                Ok(Answer::Excluded) => {
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

    /// Tells multipathd to make the map of the paths that it accepts and has not mapped.
    /// Returns its reason where it makes none.
    ///
    /// # Errors
    /// Those of [`Daemon::wwids`] and [`Daemon::add_map`], except `Refused`.
    pub(super) fn request_map(
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
            Ok(Answer::Excluded) => Ok(Some(format!(
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
            // device-mapper cannot take a path that another user holds exclusively.
            Err(error) if error.kind() == ErrorKind::Refused => Ok(Some(format!(
                "{error}: its log says why; a path that is mounted or claimed is in no map"
            ))),
            Err(error) => Err(error),
        }
    }
}
