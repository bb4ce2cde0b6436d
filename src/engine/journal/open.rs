//! Opens a journal: locks it, reads its records, and sets aside files that are not records.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::crash::crash_point;
use crate::engine::journal::failing::{self, FAILING};
use crate::engine::journal::file::{BEING_WRITTEN, RECORD, SET_ASIDE, name_of, set_aside, sync};
use crate::engine::journal::format::{Fault, FaultKind, LONGEST, Problem};
use crate::engine::journal::record::Record;
use crate::engine::journal::view::JournalView;
use crate::engine::lock::lock_file::{self, Locked};
use crate::error::{Error, ErrorKind, Result};
use crate::id::VolumeId;
use crate::kernel::sysfs;

/// The file that the holder of the journal locks. It stays, because it marks a directory as
/// a journal.
const LOCK: &str = "journal.lock";
/// How often another process may remove the lock file while this one locks it.
const TRIES: u32 = 16;

/// What was found in the directory.
pub(super) struct Found {
    pub(super) lock: Flock<File>,
    pub(super) records: BTreeMap<VolumeId, Record>,
    /// The records whose detach is proven.
    pub(super) detached: BTreeMap<VolumeId, Record>,
    pub(super) problems: Vec<Problem>,
}

/// Locks the journal and reads it. **Blocks** for as long as the file system does.
///
/// # Errors
/// `NotSupported` if a record is of a later version: without that record the process could
/// give its device to another volume, and would never detach it. Nothing is touched then.
pub(super) fn open(directory: &Path) -> Result<Found> {
    let lock = lock_journal(directory)?;
    let mut found = Found {
        lock,
        records: BTreeMap::new(),
        detached: BTreeMap::new(),
        problems: Vec::new(),
    };
    let names = names(directory)?;
    let mut files = Vec::new();
    for name in &names {
        let (path, text) = (directory.join(name), name.to_string_lossy());
        if !is_beside_records(&text) {
            let record =
                read(&path).and_then(|bytes| require_own_name(Record::parse(&bytes)?, &text));
            files.push((path, record));
        }
    }
    for (path, record) in &files {
        if let Err(Fault { kind, text }) = record
            && *kind == FaultKind::Newer
        {
            let message = format!(
                "a later version of lunbd wrote a record: {text}; run that version, or detach \
                 the volume with it first"
            );
            return Err(Error::new(ErrorKind::NotSupported, message).with_path(path));
        }
    }
    for name in &names {
        found.handle_other_file(directory, name);
    }
    for (path, record) in files {
        found.add_record(path, record);
    }
    sync(directory)?;
    Ok(found)
}

/// Whether the name is one that the journal gives to a file other than a record.
fn is_beside_records(name: &str) -> bool {
    let unfinished = name.strip_suffix(BEING_WRITTEN);
    let is_unfinished = unfinished.is_some_and(|of| of.ends_with(RECORD) || of == FAILING);
    name == LOCK || name == FAILING || is_unfinished || is_set_aside(name)
}

pub(super) fn is_set_aside(name: &str) -> bool {
    let number = name.rsplit_once(SET_ASIDE);
    number.is_some_and(|(_, number)| number.parse::<u64>().is_ok())
}

/// Reads the journal and changes nothing. **Blocks** as [`open`] does.
pub(super) fn read_view(directory: &Path) -> Result<JournalView> {
    let mut view = JournalView::default();
    match fs::metadata(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(view),
        found => found.map_err(|error| {
            Error::io("cannot look for the journal's directory", directory, &error)
        })?,
    };
    let names = names(directory)?;
    refuse_foreign_directory(directory, &names)?;
    for name in names {
        let path = directory.join(&name);
        let text = name.to_string_lossy();
        if text == LOCK || text == FAILING || text.ends_with(BEING_WRITTEN) {
            continue;
        }
        let record = if is_set_aside(&text) {
            Err(set_aside_earlier())
        } else {
            read(&path).and_then(|bytes| require_own_name(Record::parse(&bytes)?, &text))
        };
        match record {
            Ok(record) if record.detached.is_some() => view.detached.push(record),
            Ok(record) => view.records.push(record),
            // Its holder has removed it meanwhile.
            Err(_) if is_gone(&path) => {}
            Err(Fault { kind, text }) => {
                let file = path;
                view.problems.push(Problem { file, kind, text });
            }
        }
    }
    view.failing = failing::read(directory);
    for records in [&mut view.records, &mut view.detached] {
        records.sort_by(|a, b| a.volume.cmp(&b.volume));
    }
    Ok(view)
}

fn is_gone(path: &Path) -> bool {
    let found = path.symlink_metadata();
    found.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// # Errors
/// `InvalidInput` where the directory holds something and is no journal.
fn refuse_foreign_directory(directory: &Path, names: &[OsString]) -> Result<()> {
    if names.is_empty() || names.iter().any(|name| name == LOCK) {
        return Ok(());
    }
    let message = format!("the directory is no journal: it is not empty and has no {LOCK}");
    Err(Error::new(ErrorKind::InvalidInput, message).with_path(directory))
}

/// # Errors
/// `InvalidInput` if the directory holds something and is no journal, since its files would
/// be set aside; `InUse` if another process holds the journal.
fn lock_journal(directory: &Path) -> Result<Flock<File>> {
    let failed =
        |error: &std::io::Error| Error::io("cannot make the journal's directory", directory, error);
    if !directory.exists() {
        let parent = directory
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let mut private = DirBuilder::new();
        private.recursive(true).mode(0o700);
        private.create(parent).map_err(|error| failed(&error))?;
        crash_point!(JournalToMake);
        private.create(directory).map_err(|error| failed(&error))?;
        sync(parent)?;
        crash_point!(JournalMade);
    }
    let path = directory.join(LOCK);
    refuse_foreign_directory(directory, &names(directory)?)?;
    let failed = |error: &std::io::Error| Error::io("cannot lock the journal", &path, error);
    // If another process removes the file before this one locks it, the next try creates
    // another file.
    for _ in 0..TRIES {
        let file = lock_file::open(&path).map_err(|error| failed(&error))?;
        let locked = lock_file::lock(&path, file, FlockArg::LockExclusiveNonblock);
        match locked.map_err(|error| failed(&error))? {
            Locked::Ours(mut file, _) => {
                // The id is for the error of the next process; the lock itself is the flock.
                let _ = file
                    .set_len(0)
                    .and_then(|()| file.rewind())
                    .and_then(|()| write!(file, "{}", std::process::id()));
                crash_point!(JournalLocked);
                return Ok(file);
            }
            Locked::Removed => {}
            Locked::HeldByAnother => {
                let holder = sysfs::read_if_there(&path).ok().flatten();
                let holder = holder.filter(|pid| !pid.is_empty());
                let message = "another process holds the journal";
                let error = Error::new(ErrorKind::InUse, message).with_path(path);
                return Err(match holder {
                    Some(pid) => error.with_last_seen(format!("held by process {pid}")),
                    None => error,
                });
            }
        }
    }
    let message = "another process keeps removing the journal's lock";
    Err(Error::new(ErrorKind::InUse, message).with_path(path))
}

/// The names in the directory, sorted, also those that are not UTF-8.
fn names(directory: &Path) -> Result<Vec<OsString>> {
    let failed = |error: &std::io::Error| Error::io("cannot list the journal", directory, error);
    let entries = fs::read_dir(directory).map_err(|error| failed(&error))?;
    let names: std::io::Result<Vec<_>> = entries
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect();
    let mut names = names.map_err(|error| failed(&error))?;
    names.sort();
    Ok(names)
}

impl Found {
    /// Removes a file that a dead writer left beside the records, and reports one that was
    /// set aside.
    fn handle_other_file(&mut self, directory: &Path, name: &OsStr) {
        let (path, text) = (directory.join(name), name.to_string_lossy());
        if is_set_aside(&text) {
            return self.report(path, set_aside_earlier());
        }
        if text == LOCK || !is_beside_records(&text) {
            return;
        }
        if text.starts_with(FAILING) {
            // Its writer is gone, so the file no longer counts.
            let _ = fs::remove_file(&path);
            return;
        }
        // Its writer died before the rename, so the file was never the record, and no caller was
        // told that it is. If the removal fails, the next write replaces the file.
        crash_point!(JournalToDropUnfinished);
        let _ = fs::remove_file(&path);
        crash_point!(JournalUnfinishedDropped);
    }

    fn add_record(&mut self, path: PathBuf, record: Result<Record, Fault>) {
        match record {
            Ok(record) => {
                let records = match record.detached {
                    Some(_) => &mut self.detached,
                    None => &mut self.records,
                };
                records.insert(record.volume.clone(), record);
            }
            // It may be a good record, which a later start can read.
            Err(fault) if fault.kind == FaultKind::Unreadable => self.report(path, fault),
            Err(fault) => match set_aside(&path) {
                Ok(aside) => self.report(aside, fault),
                Err(error) => {
                    let text = format!("{}; {error}", fault.text);
                    self.report(path, Fault { text, ..fault });
                }
            },
        }
    }

    fn report(&mut self, file: PathBuf, fault: Fault) {
        let Fault { kind, text } = fault;
        tracing::warn!(file = %file.display(), %text, "no record of the journal");
        self.problems.push(Problem { file, kind, text });
    }
}

impl Problem {
    /// Whether the file has the name of this volume's record, or was set aside from it. A
    /// record of the volume may also be in a file with another name.
    #[must_use]
    pub fn may_be_of(&self, volume: &VolumeId) -> bool {
        let name = self.file.file_name().and_then(OsStr::to_str);
        let record = name_of(volume);
        name.and_then(|name| name.strip_prefix(&record))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(SET_ASIDE))
    }
}

fn set_aside_earlier() -> Fault {
    Fault::new(FaultKind::SetAsideEarlier, "it was set aside earlier")
}

/// Refuses a record whose file has not the name of its volume, such as a copy.
fn require_own_name(record: Record, name: &str) -> Result<Record, Fault> {
    if name_of(&record.volume) == name {
        return Ok(record);
    }
    let text = format!(
        "it is the record of volume {}, under another name",
        record.volume
    );
    Err(Fault::new(FaultKind::Foreign, text))
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, Fault> {
    let unreadable = |error: std::io::Error| Fault::new(FaultKind::Unreadable, error.to_string());
    let metadata = fs::symlink_metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(Fault::new(FaultKind::Foreign, "it is no file"));
    }
    let mut bytes = Vec::new();
    let limit = u64::try_from(LONGEST).unwrap_or(u64::MAX);
    File::open(path)
        .and_then(|file| file.take(limit + 1).read_to_end(&mut bytes))
        .map_err(unreadable)?;
    if bytes.len() > LONGEST {
        return Err(Fault::new(
            FaultKind::Foreign,
            "it is longer than any record",
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
