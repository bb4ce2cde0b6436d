//! The block devices behind the paths that mounts and swap areas were made from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::file_servers::FileServers;
use super::{Roots, file_server_lookup};
use crate::deadline::Deadline;
use crate::id::DevNo;

/// Looks up each path once, in our own mount namespace.
pub(super) struct MountSourceLookup<'a> {
    roots: &'a Roots,
    servers: FileServers,
    deadline: Deadline,
    known: BTreeMap<PathBuf, Option<DevNo>>,
    unknown: Vec<PathBuf>,
}

impl<'a> MountSourceLookup<'a> {
    pub(super) fn new(roots: &'a Roots, servers: FileServers, deadline: Deadline) -> Self {
        Self {
            roots,
            servers,
            deadline,
            known: BTreeMap::new(),
            unknown: Vec::new(),
        }
    }

    /// The block device at a path; `None` if there is none or if the path is on a file
    /// server. Also `None` if the lookup gets no answer in time; the path is then unknown.
    pub(super) fn number_at(&mut self, path: &Path) -> Option<DevNo> {
        if !path.is_absolute() || self.servers.contains(path) {
            return None;
        }
        if let Some(known) = self.known.get(path) {
            return *known;
        }
        let (name, devices) = (path.display().to_string(), self.roots.devices.clone());
        let lookup_deadline = file_server_lookup::lookup_deadline(self.deadline);
        let own = path.to_owned();
        let found =
            file_server_lookup::lookup(name, lookup_deadline, move || devices.number_at(&own));
        if matches!(&found, Err(error) if error.kind() == std::io::ErrorKind::TimedOut) {
            self.unknown.push(path.to_owned());
        }
        let number = found.ok().flatten();
        self.known.insert(path.to_owned(), number);
        number
    }

    /// The paths whose lookup got no answer in time.
    pub(super) fn unknown(self) -> Vec<PathBuf> {
        self.unknown
    }
}
