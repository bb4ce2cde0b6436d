//! The record of a flush that failed.
//!
//! The kernel reports a failed write once. After that its pages count as clean, and the
//! next `fsync` succeeds although data is lost. So the failure is recorded for as long as
//! this instance of the disk lasts, and no later flush of it, by any process, counts as a proof. A
//! failure of an NBD device counts until the device is connected anew.
//! A map that could not be flushed has a record too, until a flush of it succeeds. So has a path
//! whose pages are in the unit's cache alone.

mod note;
mod unit_behind_disk;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::crash::crash_point;
use crate::engine::lock::run_dir;
use crate::engine::usage::failed_flush::note::{
    CACHE_UNFLUSHED, NO_FAILURE, Note, UNCOUNTED, UNFLUSHED, UNSEEN,
};
use crate::engine::usage::failed_flush::unit_behind_disk::{UnitBehindDisk, nbd_connection};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Wwid;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, sysfs, worker};
use crate::scsi::Identity;

/// The mark on one instance of a disk, `run/lunbd/lost-NAME-INSTANCE`.
#[derive(Debug, Clone)]
pub(in crate::engine) struct FailedFlush {
    path: PathBuf,
    disk: BlockDevice,
}

impl FailedFlush {
    pub(in crate::engine) fn of(roots: &Roots, disk: &BlockDevice) -> Result<Self> {
        let (name, instance) = (disk.name(), disk.instance()?);
        let path = run_dir::path(roots).join(format!("lost-{name}-{instance}"));
        let disk = disk.clone();
        Ok(Self { path, disk })
    }

    /// Why an earlier flush failed, or may have failed: its process ended during the flush, and
    /// the device has failed commands since, or would not have counted them. `None` if no flush
    /// failed, and where the result of one [was not seen](FlushUnderWay::unseen).
    pub(in crate::engine) fn read(&self) -> Result<Option<String>> {
        Ok(self.note()?.and_then(|note| self.failure_in(note)))
    }

    /// Whether a flush of the disk is under way, or its process ended in it.
    pub(in crate::engine) fn is_under_way(roots: &Roots, disk: &BlockDevice) -> Result<bool> {
        let note = Self::of(roots, disk)?.note()?;
        let may_go_on = |note: Note| {
            note.under_way().is_some() || [UNCOUNTED, UNSEEN].contains(&note.why.as_str())
        };
        Ok(note.is_some_and(may_go_on))
    }

    fn failure_in(&self, note: Note) -> Option<String> {
        match note.under_way() {
            Some(errors) if UnitBehindDisk::read(&self.disk).failed_commands() == errors => None,
            None if !note.is_failure() => None,
            _ => Some(note.why),
        }
    }

    fn note(&self) -> Result<Option<Note>> {
        let text = sysfs::read_if_there(&self.path)?;
        // The flush of a process that was killed before it wrote the mark had not begun.
        let text = text.filter(|text| !text.is_empty());
        let note = text.map(|text| Note::parse(&text));
        Ok(note.filter(|note| !self.is_of_another_connection(note)))
    }

    /// Whether the NBD device was connected anew since. That does not change its disk sequence
    /// number. A mark that names no connection counts for each.
    fn is_of_another_connection(&self, note: &Note) -> bool {
        let Some(then) = note.connection.as_deref() else {
            return false;
        };
        nbd_connection(&self.disk).is_ok_and(|now| now.as_deref() != Some(then))
    }

    /// As [`read`](Self::read), for a disk that may be gone: then the answer is `None`.
    pub(in crate::engine) fn read_of(roots: &Roots, disk: &BlockDevice) -> Result<Option<String>> {
        match Self::of(roots, disk).and_then(|mark| mark.read()) {
            Err(error) if error.kind() == ErrorKind::Vanished => Ok(None),
            read => read.map_err(|error| error.at(Stage::Flush)),
        }
    }

    /// Marks that a flush begins, unless an earlier one has failed: the kernel reports a
    /// loss only to the flushing process, which may die before it records the loss. The mark
    /// also keeps the room for that of a failure.
    ///
    /// # Errors
    /// Those of reading and writing a file: without the mark the next flush would hide a failure
    /// of this one.
    pub(in crate::engine) fn begin(self) -> Result<FlushUnderWay> {
        let in_flush = |error: Error| error.at(Stage::Flush);
        let note = self.note().map_err(in_flush)?;
        let why = note.as_ref().map(|note| note.why.as_str());
        let no_failure = NO_FAILURE.into_iter().find(|it| why == Some(*it));
        let failure = note.and_then(|note| self.failure_in(note));
        let is_first = no_failure != Some(UNSEEN) && failure.is_none();
        let unit = is_first.then(|| UnitBehindDisk::read(&self.disk));
        if let Some(unit) = &unit {
            let begins = Note::of_begin(unit.failed_commands());
            self.write_for(&begins, unit).map_err(in_flush)?;
        }
        Ok(FlushUnderWay {
            mark: self,
            unit,
            removes_mark: is_first,
            no_failure,
        })
    }

    /// Records that a flush failed, unless the disk is gone: then its instance has ended.
    pub(in crate::engine) fn set(&self, error: &Error) {
        let why = error.to_string().replace('\n', " ");
        let written = self.write(&why);
        self.report(why, written);
    }

    /// Records that a detach could not flush the disk, unless another mark is there. A later flush
    /// of this instance of the disk removes the mark. If the disk goes first, data may be lost.
    pub(in crate::engine) fn set_unflushed(&self) {
        let written = match self.note() {
            Ok(Some(_)) => return,
            Ok(None) => self.write(UNFLUSHED),
            Err(error) => Err(error),
        };
        self.report(UNFLUSHED.to_owned(), written);
    }

    /// Records that no path flushed the unit's cache after the pages of this one were written, unless
    /// a write of them has failed. The mark stays until a path flushes the cache, or until a caller
    /// accepts the loss.
    pub(in crate::engine) fn set_cache_unflushed(&self) {
        let written = match self.note() {
            Ok(Some(note)) if note.is_failure() => return,
            Ok(_) => self.write(CACHE_UNFLUSHED),
            Err(error) => Err(error),
        };
        self.report(CACHE_UNFLUSHED.to_owned(), written);
    }

    fn report(&self, why: String, written: Result<()>) {
        if let Err(failure) = written {
            let path = self.path.clone();
            worker::emit(move || {
                tracing::error!(why, %failure, path = %path.display(), "cannot record the outcome of a flush");
            });
        }
    }

    fn write(&self, why: &str) -> Result<()> {
        self.write_for(why, &UnitBehindDisk::read(&self.disk))
    }

    fn write_for(&self, why: &str, unit: &UnitBehindDisk) -> Result<()> {
        if !self.disk.dir().exists() {
            return Ok(());
        }
        let note = Note {
            why: why.to_owned(),
            connection: unit.connection().map(str::to_owned),
            names: unit.names(),
        };
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        crash_point!(FailedFlushToWrite);
        let written = match note.write(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                run_dir::make(folder)?;
                note.write(&self.path)
            }
            written => written,
        };
        written.map_err(|error| Error::io("cannot write", &self.path, &error))?;
        crash_point!(FailedFlushWritten);
        Ok(())
    }

    /// Removes the mark: the flush, or this instance of the disk, has ended.
    pub(in crate::engine) fn clear(&self) {
        crash_point!(FailedFlushToClear);
        let _never_written = fs::remove_file(&self.path);
        crash_point!(FailedFlushCleared);
    }

    /// Removes the mark, unless it says that the data may be in the unit's cache alone: neither the
    /// removal of the disk nor a late write of its pages flushes that cache.
    pub(in crate::engine) fn clear_unless_cache_unflushed(&self) {
        if !self.is_cache_unflushed() {
            self.clear();
        }
    }

    /// Removes the mark that the data may be in the unit's cache alone, and no other.
    pub(in crate::engine) fn clear_cache_unflushed(&self) {
        if self.is_cache_unflushed() {
            self.clear();
        }
    }

    /// Whether the mark says that the data may be in the unit's cache alone.
    pub(in crate::engine) fn is_cache_unflushed(&self) -> bool {
        matches!(self.note(), Ok(Some(note)) if note.why == CACHE_UNFLUSHED)
    }
}

/// A flush that is marked as under way. The mark goes with this value, unless an earlier flush
/// has failed or its result was not seen. It stays if this flush fails, or if its thread panics. A
/// mark of data in the unit's cache alone stays too.
#[derive(Debug)]
pub(in crate::engine) struct FlushUnderWay {
    mark: FailedFlush,
    /// The unit behind the disk. `None` if an earlier flush has failed or may have failed, or if the
    /// result of one was not seen: then this flush leaves the mark as it is, unless it fails.
    unit: Option<UnitBehindDisk>,
    removes_mark: bool,
    /// The mark from before this flush, if it is one of `NO_FAILURE`.
    no_failure: Option<&'static str>,
}

impl FlushUnderWay {
    /// Runs the flush, and marks it as failed if `has_lost_data` says so of its error.
    pub(in crate::engine) fn run<T>(
        mut self,
        has_lost_data: impl FnOnce(&Error) -> bool,
        flush: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<T> {
        self.removes_mark = false;
        let flushed = flush(&self);
        match &flushed {
            Err(error) if has_lost_data(error) => self.mark.set(error),
            Err(_) => self.put_back(),
            // Only the caller knows whether it has flushed the unit's cache.
            Ok(_) if self.no_failure == Some(CACHE_UNFLUSHED) => self.put_back(),
            Ok(_) => self.removes_mark = self.unit.is_some(),
        }
        flushed
    }

    /// Writes the mark from before this flush again, or removes that of the flush.
    fn put_back(&mut self) {
        match (self.no_failure, &self.unit) {
            (Some(before), Some(unit)) => {
                let written = self.mark.write_for(before, unit);
                self.mark.report(before.to_owned(), written);
            }
            _ => self.removes_mark = self.unit.is_some(),
        }
    }

    /// Why a success of this flush proves nothing: the process of an earlier one ended before it
    /// saw the result, and the server may report a failure once. `None` if each result was seen.
    pub(in crate::engine) fn unseen(&self) -> Option<&'static str> {
        self.no_failure.filter(|why| *why == UNSEEN)
    }

    /// Marks, on a device whose failed commands the kernel does not count, that nobody sees the
    /// result of the rest of this flush if its process ends. The kernel keeps the error of a
    /// failed write until a call takes it, and no error of a flush of the server's cache.
    pub(in crate::engine) fn mark_as_unseen(&self) -> Result<()> {
        let unit = self.unit.as_ref();
        let Some(unit) = unit.filter(|unit| !unit.counts_failed_commands()) else {
            return Ok(());
        };
        let marked = self.mark.write_for(UNSEEN, unit);
        marked.map_err(|error| error.at(Stage::Flush))
    }

    /// Marks that the count of failed commands does not show whether this flush fails.
    pub(in crate::engine) fn mark_as_uncounted(&self) -> Result<()> {
        let Some(unit) = &self.unit else {
            return Ok(());
        };
        let marked = self.mark.write_for(UNCOUNTED, unit);
        marked.map_err(|error| error.at(Stage::Flush))
    }
}

impl Drop for FlushUnderWay {
    fn drop(&mut self) {
        if self.removes_mark {
            self.mark.clear_unless_cache_unflushed();
        }
    }
}

/// Whether to keep the marks of a loss that was reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum LossMarks {
    /// The next detach reports the loss again.
    Keep,
    /// The caller accepts the loss: an abandoning detach, or a new attach.
    Remove,
}

/// Removes the marks of data that was in this unit's cache alone, since a path has flushed it. A mark
/// stays if its names do not prove that it is of this unit.
pub(in crate::engine) fn clear_cache_marks(roots: &Roots, unit: &Identity) {
    let folder = run_dir::path(roots);
    for file in sysfs::names(&folder).unwrap_or_default() {
        let path = folder.join(&file);
        if !file.starts_with("lost-") {
            continue;
        }
        let note = Note::parse(&sysfs::read(&path).unwrap_or_default());
        let of_unit = Identity::of(note.names).compare(unit).is_proven_same();
        if of_unit && note.why == CACHE_UNFLUSHED {
            let _removed_by_another = fs::remove_file(path);
        }
    }
}

/// Returns what the marks say of ended instances of this unit, whose disks are gone, as after
/// `dev_loss_tmo`. Marks that name no unit are removed in any case.
pub(in crate::engine) fn purge_stale(
    roots: &Roots,
    unit: &[Wwid],
    marks: LossMarks,
) -> Vec<String> {
    let folder = run_dir::path(roots);
    let unit = Identity::of(unit.iter().cloned());
    let mut losses = Vec::new();
    for file in sysfs::names(&folder).unwrap_or_default() {
        let named = file.strip_prefix("lost-");
        let Some((name, _)) = named.and_then(|named| named.rsplit_once('-')) else {
            continue;
        };
        let path = folder.join(&file);
        let disk = BlockDevice::at(&roots.sysfs.join("block").join(name));
        let is_current = match disk {
            Ok(Some(disk)) => FailedFlush::of(roots, &disk).is_ok_and(|mark| mark.path == path),
            Ok(None) => false,
            Err(_) => true,
        };
        let note = Note::parse(&sysfs::read(&path).unwrap_or_default());
        let is_shared = note.names.iter().any(|name| unit.is(name));
        let is_different = Identity::of(note.names.iter().cloned())
            .compare(&unit)
            .is_different();
        let of_unit = is_shared && !is_different;
        if is_current {
            continue;
        }
        losses.extend(of_unit.then(|| note.loss(name)));
        if note.names.is_empty() || (of_unit && marks == LossMarks::Remove) {
            crash_point!(FailedFlushToSweep);
            let _swept_by_another = fs::remove_file(path);
            crash_point!(FailedFlushSwept);
        }
    }
    losses
}

/// The error in place of a flush that would prove nothing.
pub(in crate::engine) fn lost_data_error(disk: &BlockDevice, earlier: &str) -> Error {
    let message = format!(
        "an earlier flush of {} failed or may have failed, and data written before may be lost \
         ({earlier}): a later flush proves nothing; to detach it anyway, abandon unwritten data",
        disk.name()
    );
    Error::new(ErrorKind::Io, message).at(Stage::Flush)
}

#[cfg(test)]
mod tests;
