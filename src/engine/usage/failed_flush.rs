//! The record of a flush that failed.
//!
//! The kernel reports a failed write once. After that its pages count as clean, and the
//! next `fsync` succeeds although data is lost. So the failure is recorded for as long as
//! this life of the disk lasts, and no later flush of it, by any process, counts as a proof.

mod note;
mod unit_behind_disk;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::crash::crash_point;
use crate::engine::lock::run_dir;
use crate::engine::usage::failed_flush::note::{Note, UNCOUNTED, UNSEEN};
use crate::engine::usage::failed_flush::unit_behind_disk::UnitBehindDisk;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Wwid;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, sysfs, worker};
use crate::scsi::Identity;

/// The mark on one life of a disk, `run/lunbd/lost-NAME-LIFE`.
#[derive(Debug, Clone)]
pub(in crate::engine) struct FailedFlush {
    path: PathBuf,
    disk: BlockDevice,
}

impl FailedFlush {
    pub(in crate::engine) fn of(roots: &Roots, disk: &BlockDevice) -> Result<Self> {
        let (name, life) = (disk.name(), disk.life()?);
        let path = run_dir::path(roots).join(format!("lost-{name}-{life}"));
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
            _ if note.why == UNSEEN => None,
            _ => Some(note.why),
        }
    }

    fn note(&self) -> Result<Option<Note>> {
        let text = sysfs::read_if_there(&self.path)?;
        // The flush of a process that was killed before it wrote the mark had not begun.
        let text = text.filter(|text| !text.is_empty());
        Ok(text.map(|text| Note::parse(&text)))
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
        let is_unseen = note.as_ref().is_some_and(|note| note.why == UNSEEN);
        let failure = note.and_then(|note| self.failure_in(note));
        let is_first = !is_unseen && failure.is_none();
        if is_first {
            let unit = UnitBehindDisk::read(&self.disk);
            let begins = Note::of_begin(unit.failed_commands());
            self.write_for(&begins, &unit).map_err(in_flush)?;
        }
        Ok(FlushUnderWay {
            mark: self,
            is_first,
            removes_mark: is_first,
            is_unseen,
        })
    }

    /// Records that a flush failed, unless the disk is gone, since no process can ask then.
    pub(in crate::engine) fn set(&self, error: &Error) {
        let why = error.to_string().replace('\n', " ");
        if let Err(failure) = self.write(&why) {
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

    /// Removes the mark: the flush, or this life of the disk, has ended.
    pub(in crate::engine) fn clear(&self) {
        crash_point!(FailedFlushToClear);
        let _never_written = fs::remove_file(&self.path);
        crash_point!(FailedFlushCleared);
    }
}

/// A flush that is marked as under way. The mark goes with this value, unless an earlier flush
/// has failed or its result was not seen. It stays if this flush fails, or if its thread panics.
#[derive(Debug)]
pub(in crate::engine) struct FlushUnderWay {
    mark: FailedFlush,
    /// No earlier flush has failed, and the result of each was seen.
    is_first: bool,
    removes_mark: bool,
    is_unseen: bool,
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
            _ => self.removes_mark = self.is_first,
        }
        flushed
    }

    /// Why a success of this flush proves nothing: the process of an earlier one ended before it
    /// saw the result, and the server may report a failure once. `None` if each result was seen.
    pub(in crate::engine) fn unseen(&self) -> Option<&'static str> {
        self.is_unseen.then_some(UNSEEN)
    }

    /// Marks, on a device whose failed commands the kernel does not count, that nobody sees the
    /// result of the rest of this flush if its process ends. The kernel keeps the error of a
    /// failed write until a call takes it, and no error of a flush of the server's cache.
    pub(in crate::engine) fn mark_as_unseen(&self) -> Result<()> {
        let unit = UnitBehindDisk::read(&self.mark.disk);
        if !self.is_first || unit.counts_failed_commands() {
            return Ok(());
        }
        let marked = self.mark.write_for(UNSEEN, &unit);
        marked.map_err(|error| error.at(Stage::Flush))
    }

    /// Marks that the count of failed commands does not show whether this flush fails.
    pub(in crate::engine) fn mark_as_uncounted(&self) -> Result<()> {
        if !self.is_first {
            return Ok(());
        }
        let marked = self.mark.write(UNCOUNTED);
        marked.map_err(|error| error.at(Stage::Flush))
    }
}

impl Drop for FlushUnderWay {
    fn drop(&mut self) {
        if self.removes_mark {
            self.mark.clear();
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

/// Returns what the marks say of ended lives of this unit, whose disks the kernel removed
/// by itself, as after `dev_loss_tmo`. Marks that name no unit are removed in any case.
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
        losses.extend(of_unit.then(|| format!("an earlier flush failed: {}", note.why)));
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
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::note::FILE_SIZE;
    use super::*;

    #[test]
    fn a_reason_that_is_longer_than_the_room_is_cut_between_two_characters() {
        let note = Note {
            why: format!("a{}", "é".repeat(FILE_SIZE)),
            names: Vec::new(),
        };
        let text = String::from_utf8(note.padded()).unwrap();
        assert_eq!(text.len(), FILE_SIZE);
        assert!(text.starts_with("aé"), "{text}");
    }

    fn disk(roots: &Roots) -> BlockDevice {
        let dir = roots.sysfs.join("block/sda");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("dev"), "8:0\n").unwrap();
        fs::write(dir.join("diskseq"), "7\n").unwrap();
        BlockDevice::at(&dir).unwrap().unwrap()
    }

    #[test]
    fn the_end_of_another_flush_takes_no_mark_of_a_flush_that_begins() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let mark = FailedFlush::of(&roots, &disk(&roots)).unwrap();
        let has_ended = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    purge_stale(&roots, &[], LossMarks::Remove);
                }
            });
            let begun: Vec<Result<bool>> = (0..2000)
                .map(|_| mark.clone().begin().map(|flush| flush.removes_mark))
                .collect();
            has_ended.store(true, Ordering::Relaxed);
            assert!(begun.into_iter().all(Result::unwrap));
        });
    }

    #[test]
    fn an_empty_mark_is_that_of_a_flush_that_has_not_begun() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let mark = FailedFlush::of(&roots, &disk(&roots)).unwrap();
        fs::create_dir_all(mark.path.parent().unwrap()).unwrap();
        fs::write(&mark.path, "").unwrap();
        assert_eq!(mark.read().unwrap(), None);
        let flush = mark.clone().begin().unwrap();
        assert!(flush.removes_mark);
        assert_eq!(fs::metadata(&mark.path).unwrap().len(), 4096);
        assert_eq!(mark.read().unwrap(), None);
        drop(flush);
        assert!(!mark.path.exists());
    }

    #[test]
    fn a_flush_whose_thread_panics_may_have_failed() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let mark = FailedFlush::of(&roots, &disk(&roots)).unwrap();
        let flush = mark.clone().begin().unwrap();
        let run = || flush.run(|_| false, |_| -> Result<()> { panic!("on purpose") });
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_err();
        assert!(mark.path.exists());
    }

    #[test]
    fn a_flush_of_a_server_whose_process_ends_in_it_leaves_the_next_ones_without_proof() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let mark = FailedFlush::of(&roots, &disk(&roots)).unwrap();
        let first = mark.clone().begin().unwrap();
        first.mark_as_unseen().unwrap();
        // The process is killed.
        std::mem::forget(first);
        for _ in 0..2 {
            let flush = mark.clone().begin().unwrap();
            flush.mark_as_unseen().unwrap();
            assert!(flush.unseen().is_some());
            flush.run(|_| true, |_| Ok(())).unwrap();
            assert_eq!(mark.read().unwrap(), None);
        }
        mark.clear();
        let flush = mark.clone().begin().unwrap();
        assert_eq!(flush.unseen(), None);
        flush.mark_as_unseen().unwrap();
        flush.run(|_| true, |_| Ok(())).unwrap();
        assert!(!mark.path.exists());
    }

    #[test]
    fn a_failure_is_remembered_for_one_life_of_the_disk() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let (disk, dir) = (disk(&roots), roots.sysfs.join("block/sda"));
        let mark = || FailedFlush::of(&roots, &disk).unwrap();
        assert_eq!(mark().read().unwrap(), None);
        mark().set(&Error::new(ErrorKind::Io, "no"));
        assert_eq!(mark().read().unwrap().as_deref(), Some("no"));
        fs::write(dir.join("diskseq"), "8\n").unwrap();
        assert_eq!(mark().read().unwrap(), None);
        fs::write(dir.join("diskseq"), "7\n").unwrap();
        mark().clear();
        assert_eq!(mark().read().unwrap(), None);
        mark().set(&Error::new(ErrorKind::Io, "no"));
        purge_stale(&roots, &[], LossMarks::Keep);
        assert_eq!(mark().read().unwrap().as_deref(), Some("no"));
        let seventh = mark();
        fs::write(dir.join("diskseq"), "8\n").unwrap();
        purge_stale(&roots, &[], LossMarks::Keep);
        assert_eq!(seventh.read().unwrap(), None);
        seventh.set(&Error::new(ErrorKind::Io, "no"));
        fs::remove_dir_all(&dir).unwrap();
        purge_stale(&roots, &[], LossMarks::Keep);
        assert_eq!(seventh.read().unwrap(), None);
        // A process that dies during its flush cannot report a loss: the commands that
        // failed since then show it.
        let device = roots.sysfs.join("devices/2:0:0:1");
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("dev"), "8:0\n").unwrap();
        fs::write(dir.join("diskseq"), "9\n").unwrap();
        std::os::unix::fs::symlink(&device, dir.join("device")).unwrap();
        fs::write(device.join("ioerr_cnt"), "0x1f\n").unwrap();
        // The process is killed.
        std::mem::forget(mark().begin().unwrap());
        assert_eq!(mark().read().unwrap(), None);
        fs::write(device.join("ioerr_cnt"), "0x20\n").unwrap();
        assert!(mark().read().unwrap().unwrap().contains("31 commands"));
        drop(mark().begin().unwrap());
        assert!(
            mark().read().unwrap().is_some(),
            "what may be lost is not forgotten"
        );
        mark().clear();
        fs::remove_dir_all(&dir).unwrap();
        let gone = FailedFlush {
            path: roots.run.join("lunbd/lost-sda-7"),
            disk,
        };
        gone.set(&Error::new(ErrorKind::Io, "no"));
        assert_eq!(gone.read().unwrap(), None);
    }
}
