//! The content of a mark on a disk.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::id::Wwid;

/// The beginning of the mark of a flush that is under way; a number follows it.
const UNDER_WAY: &str = "its process died while it was under way, when ";

/// The mark of a flush whose failure only its process can see.
pub(super) const UNCOUNTED: &str = "its process ended while it was under way, and a dead path does not count \
                         the commands that it rejects";

/// The mark of a flush whose result nobody has seen, on a device whose failed commands the kernel
/// does not count: an NBD device, or the map of a partition.
pub(super) const UNSEEN: &str = "the process of an earlier flush ended in it, and the kernel keeps \
                                 no error of a flush of the cache behind the device";

/// The mark of a map that no detach could flush. The kernel keeps the error of its failed writes
/// for the next flush of the same map, so that flush is a proof, unless another process took the
/// error before: with `fsync`, or with a mount of the map (`fs/ext4/super.c`,
/// `errseq_check_and_advance`).
pub(super) const UNFLUSHED: &str = "no earlier detach has seen that it was flushed to its unit";

/// The mark of a path whose pages are in the unit's cache alone.
pub(super) const CACHE_UNFLUSHED: &str = "no path flushed the unit's cache after the pages of this \
                                          one were written";

/// The marks of data that is not stored yet, or not for certain. No flush has failed.
pub(super) const NO_FAILURE: [&str; 3] = [UNSEEN, UNFLUSHED, CACHE_UNFLUSHED];

/// The size of a mark's file: a page of most file systems in memory.
pub(super) const FILE_SIZE: usize = 4096;

/// The beginning of the line of an NBD device's connection. Earlier versions skip the line.
const CONNECTION: &str = "connection ";

/// The content of a mark: the reason, and then the connection of an NBD device, or the names of the
/// unit, one a line.
pub(super) struct Note {
    pub(super) why: String,
    /// `None` if it is not known, as in the mark of an earlier version.
    pub(super) connection: Option<String>,
    pub(super) names: Vec<Wwid>,
}

impl Note {
    pub(super) fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let why = lines.next().unwrap_or_default().to_owned();
        let connection = lines.clone().find_map(|line| line.strip_prefix(CONNECTION));
        let connection = connection.map(str::to_owned);
        let names = lines.filter_map(|name| name.parse().ok()).collect();
        Self {
            why,
            connection,
            names,
        }
    }

    /// Makes the file, or writes over it, which needs no more room. One write within a page is
    /// whole, or it is not there: a process that is killed before it leaves an empty file.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        let mut options = File::options();
        let (file, is_new) = match options.write(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                (options.create(true).truncate(false).open(path)?, true)
            }
            opened => (opened?, false),
        };
        let written = file.write_all_at(&self.padded(), 0);
        if is_new && written.is_err() {
            let _removed_by_another = fs::remove_file(path);
        }
        written
    }

    /// The text in a file of [`FILE_SIZE`] bytes. A reason that is too long loses its end.
    pub(super) fn padded(&self) -> Vec<u8> {
        let rest = self.rest();
        let room = FILE_SIZE.saturating_sub(rest.len() + 1);
        let why = &self.why[..self.why.floor_char_boundary(room)];
        let mut text = format!("{why}\n{rest}").into_bytes();
        text.resize(FILE_SIZE, b'\n');
        text
    }

    /// The lines after the reason.
    fn rest(&self) -> String {
        let connection = self.connection.iter();
        let connection = connection.map(|connection| format!("{CONNECTION}{connection}\n"));
        let names = self.names.iter().map(|name| format!("{name}\n"));
        connection.chain(names).collect()
    }

    /// The mark of a flush that begins, after this many commands had failed.
    pub(super) fn of_begin(errors: u64) -> String {
        format!("{UNDER_WAY}{errors} commands had failed before")
    }

    /// What may be lost, if the disk of this kernel name went away with this mark.
    pub(super) fn loss(&self, disk: &str) -> String {
        let what = match self.why.as_str() {
            UNFLUSHED | CACHE_UNFLUSHED => {
                format!("{disk} went away and may not have been flushed")
            }
            UNCOUNTED | UNSEEN => "an earlier flush may have failed".to_owned(),
            _ if self.under_way().is_some() => "an earlier flush may have failed".to_owned(),
            _ => "an earlier flush failed".to_owned(),
        };
        format!("{what}: {}", self.why)
    }

    /// Whether a flush has failed, or may have.
    pub(super) fn is_failure(&self) -> bool {
        self.under_way().is_none() && !NO_FAILURE.contains(&self.why.as_str())
    }

    /// How many commands had failed before the flush, if the flush is under way.
    pub(super) fn under_way(&self) -> Option<u64> {
        let (errors, _) = self.why.strip_prefix(UNDER_WAY)?.split_once(' ')?;
        errors.parse().ok()
    }
}
