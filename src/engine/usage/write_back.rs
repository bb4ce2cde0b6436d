//! The write-back of a disk.

use std::fs::File;
use std::sync::Arc;

use nix::errno::Errno;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::receipt::Flush;
use crate::engine::usage::claim::{Claim, FlushPolicy, claim_disk, host_queue_of, run_in_queue};
use crate::engine::usage::failed_flush::{self, FailedFlush, FlushUnderWay};
use crate::engine::usage::refused_flush::PathBeforeFlush;
use crate::engine::usage::{Extent, NotLookedAt, UsageSnapshot};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::{BlockDevice, OpenDisk};
use crate::kernel::worker::{self, NoteThread};
use crate::kernel::{Roots, sysfs};
use crate::uevent::Watch;

/// A disk that is claimed and flushed.
#[derive(Debug)]
pub(in crate::engine) struct Claimed {
    pub(in crate::engine) claim: Claim,
    pub(in crate::engine) flush: Flush,
    /// The places where a process may write to it unseen.
    pub(in crate::engine) not_looked_at: Vec<NotLookedAt>,
}

/// Claims the disk, makes sure that no process writes to it beside the claim, and writes
/// it back. The claim holds until it is dropped.
///
/// # Errors
/// Those of [`claim_disk`] and [`write_back`].
pub(in crate::engine) fn claim_and_flush(
    engine: &Engine,
    disk: &BlockDevice,
    policy: FlushPolicy,
    watch: &mut Watch,
    call: &mut CallContext,
) -> Result<Claimed> {
    let deadline = call.deadline;
    call.enter(Stage::Claim);
    let claim = claim_disk(engine, disk, policy, watch, deadline)?;
    let snapshot = UsageSnapshot::take(engine, &[disk], Extent::NotExcludedByClaim, deadline)?;
    snapshot.refuse_writers(engine)?;
    call.enter(Stage::Flush);
    let flush = write_back(engine, &claim, disk, policy, deadline)?;
    snapshot.recheck_if_old(engine, deadline)?;
    Ok(Claimed {
        claim,
        flush,
        not_looked_at: snapshot.not_looked_at(),
    })
}

/// Writes the disk back under its claim.
///
/// # Errors
/// `Io` if a write failed, and then its pages are lost: a second flush would succeed and
/// prove nothing. [`Flush::PagesWritten`] and [`Flush::Unproven`] are no errors. With
/// [`FlushPolicy::Abandon`], neither a failed write nor a flush that takes half of the time is an
/// error.
pub(in crate::engine) fn write_back(
    engine: &Engine,
    claim: &Claim,
    disk: &BlockDevice,
    policy: FlushPolicy,
    deadline: Deadline,
) -> Result<Flush> {
    let abandon = policy == FlushPolicy::Abandon;
    let file = match claim {
        Claim::Held(file) => Arc::clone(file),
        Claim::Unreachable(why) => return Ok(Flush::Unreachable(why.clone())),
        Claim::Stuck(why) => return Ok(Flush::Abandoned(why.clone())),
    };
    let limit = if abandon { deadline.half() } else { deadline };
    let mark = FailedFlush::of(engine.roots(), disk)?;
    let earlier = mark.read()?;
    if let Some(earlier) = earlier.as_ref().filter(|_| !abandon) {
        return Err(failed_flush::lost_data_error(disk, earlier));
    }
    let (roots, own) = (engine.roots().clone(), disk.clone());
    let flushed = run_in_queue(
        host_queue_of(engine, disk),
        Stage::Flush,
        &format!("{} to write back", disk.name()),
        limit,
        || disk.describe(),
        move |note_thread| flush(roots, file, own, mark, note_thread),
    );
    match (flushed, earlier) {
        (Ok(_), Some(earlier)) => Ok(Flush::Abandoned(earlier)),
        (Ok(Flush::PagesWritten(why) | Flush::Unproven(why)), None) if abandon => {
            Ok(Flush::Abandoned(why))
        }
        (Ok(flush), None) => Ok(flush),
        (Err(error), _) if abandon => Ok(Flush::Abandoned(error.to_string())),
        (Err(error), _) => Err(error),
    }
}

/// Writes back a path that was below its map. The flush of the map is done, and so is that of
/// the path's own pages. A failed flush of the unit's cache is not recorded here, since another path
/// may flush it. An earlier failed write to the path itself was not the map's, and counts.
///
/// # Errors
/// `Io` if there was such a failure, and those of [`FailedFlush::begin`], with
/// [`FlushPolicy::Require`].
pub(in crate::engine) fn write_back_below_map(
    engine: &Engine,
    claim: &Claim,
    disk: &BlockDevice,
    policy: FlushPolicy,
    deadline: Deadline,
) -> Result<Flush> {
    let abandon = policy == FlushPolicy::Abandon;
    match FailedFlush::read_of(engine.roots(), disk)? {
        Some(earlier) if abandon => return Ok(Flush::Abandoned(earlier)),
        Some(earlier) => return Err(failed_flush::lost_data_error(disk, &earlier)),
        None => {}
    }
    let Claim::Held(file) = claim else {
        return write_back(engine, claim, disk, policy, deadline);
    };
    let mark = match FailedFlush::of(engine.roots(), disk) {
        Ok(mark) => mark,
        // The disk is gone.
        Err(error) => return Ok(Flush::ThroughMap(error.to_string())),
    };
    let (file, own, roots) = (Arc::clone(file), disk.clone(), engine.roots().clone());
    let written = move |file: &File| {
        let disk = own.to_write_back(&roots, file)?;
        let mut dropped = Ok(());
        // Both may make a write fail.
        let written = mark.clone().begin()?.run(is_failed_write, |_| {
            dropped = disk.drop_pages();
            disk.write_pages()
        });
        match written {
            Err(error) if is_failed_write(&error) => Err(error),
            _ => {
                let flushed = dropped.and_then(|()| disk.flush());
                // The caller may have given up this flush, and marked the path.
                if flushed.is_ok() {
                    clear_if_in_cache(&mark, &own);
                }
                Ok(flushed)
            }
        }
    };
    let flushed = run_in_queue(
        host_queue_of(engine, disk),
        Stage::Flush,
        &format!("{} to write back", disk.name()),
        deadline,
        || disk.describe(),
        move |note_thread| {
            worker::run_with_own_fd_table_and(Stage::Flush, file, move |file| {
                note_thread();
                Ok(written(file))
            })
        },
    );
    match flushed {
        Ok(Ok(Ok(()))) => Ok(Flush::Done),
        Ok(Ok(Err(error))) | Err(error) => Ok(Flush::ThroughMap(error.to_string())),
        Ok(Err(error)) if abandon => Ok(Flush::Abandoned(error.to_string())),
        Ok(Err(error)) => Err(error.at(Stage::Flush)),
    }
}

/// Removes the mark of data in the unit's cache alone after a flush of the disk, if the kernel has sent
/// the flush.
fn clear_if_in_cache(mark: &FailedFlush, disk: &BlockDevice) {
    if mark.is_cache_unflushed() && sends_cache_flushes(disk) == Some(true) {
        mark.clear();
    }
}

/// Whether the kernel sends flushes of the unit's cache over this path. The kernel takes the cache
/// of a path that did not answer MODE SENSE for write-through (`drivers/scsi/sd.c`,
/// `sd_read_cache_type`), and then completes a flush without a command. `None` if it cannot be
/// read, as when the disk is gone.
pub(in crate::engine) fn sends_cache_flushes(disk: &BlockDevice) -> Option<bool> {
    let cache = sysfs::read(&disk.dir().join("queue/write_cache")).ok()?;
    Some(cache != "write through")
}

/// Writes the pages of an open disk and of its partitions back, records a failed write, also one
/// that comes after the caller has gone, and closes them.
///
/// # Errors
/// `Io` if a write failed; those of [`FailedFlush::begin`]; `TimedOut`, and then the write and
/// the close go on; `Quarantined`; `Vanished`.
pub(in crate::engine) fn write_pages_of(
    engine: &Engine,
    disk: &BlockDevice,
    files: OpenDisk,
    deadline: Deadline,
) -> Result<()> {
    let mark = FailedFlush::of(engine.roots(), disk)?;
    let write = move |note_thread| {
        let flush = mark.begin()?;
        flush.run(is_failed_write, |_| files.write_back(note_thread))
    };
    let what = format!("{} to write back", disk.name());
    let queue = host_queue_of(engine, disk);
    run_in_queue(
        queue,
        Stage::Flush,
        &what,
        deadline,
        || disk.describe(),
        write,
    )
}

/// Flushes, and records a failure, also one that comes after the caller has gone. If the
/// process dies during the flush, the record says that the flush may have failed, or that nobody
/// has seen its result.
///
/// The kernel may hold the thread for as long as a link is dead. So the thread has none of
/// the process's other files, and a killed process releases the locks on those. The file is closed
/// after the record: a detach waits for the last close of an NBD device, and then clears the
/// record. The flushing thread runs `note_thread` first.
pub(in crate::engine) fn flush(
    roots: Roots,
    file: Arc<File>,
    disk: BlockDevice,
    mark: FailedFlush,
    note_thread: NoteThread,
) -> Result<Flush> {
    // A process that may not drop the pages has lost nothing.
    let has_failed = |error: &Error| error.kind() != ErrorKind::NotPermitted;
    worker::run_with_own_fd_table_and(Stage::Flush, file, move |file| {
        note_thread();
        let flush = mark.clone().begin()?;
        let unseen = flush.unseen();
        let flushed = flush.run(has_failed, |flush| {
            flush_pages_and_cache(&roots, &disk, file, flush)
        })?;
        if flushed == Flush::Done {
            clear_if_in_cache(&mark, &disk);
        }
        Ok(match unseen {
            Some(why) if flushed == Flush::Done => Flush::Unproven(why.to_owned()),
            _ => flushed,
        })
    })
}

/// A device that is gone, or that a process may not write to, is no failed write.
fn is_failed_write(error: &Error) -> bool {
    error.kind() == ErrorKind::Io
}

/// Whether the map refused `BLKFLSBUF` before it wrote a page.
fn is_refused_by_map(disk: &BlockDevice, error: &Error) -> bool {
    let is_suspended = error.errno() == Some(Errno::EAGAIN as i32);
    disk.is_mapped() && (is_suspended || error.kind() == ErrorKind::Vanished)
}

/// If all pages are written, a flush of the unit's cache that the path's ALUA access state
/// refuses has lost nothing.
fn flush_pages_and_cache(
    roots: &Roots,
    disk: &BlockDevice,
    file: &File,
    flush: &FlushUnderWay,
) -> Result<Flush> {
    let unwritten = disk.to_write_back(roots, file)?;
    match unwritten.drop_pages() {
        // Before Linux 5.11 a map passes this call on to one path, which may be dead
        // (`block/ioctl.c`, `blkdev_flushbuf`). There the map also refuses the call while it is
        // suspended, as when multipathd changes the paths (`drivers/md/dm.c`, `dm_prepare_ioctl`).
        // The next calls take another path, or wait. They also take the kernel's report of a failed
        // write, so the mark of a process that dies in them must not depend on the commands that
        // failed: a dead path rejects them uncounted.
        Err(error) if is_refused_by_map(disk, &error) => {
            let disk = disk.name().to_owned();
            worker::emit(move || tracing::debug!(%error, disk, "the pages are not dropped"));
            flush.mark_as_uncounted()?;
        }
        dropped => {
            dropped?;
            flush.mark_as_unseen()?;
        }
    }
    let all_written = unwritten.write_pages()?;
    let path = all_written
        .then(|| PathBeforeFlush::look_at(disk))
        .flatten();
    let Err(error) = unwritten.flush() else {
        return Ok(Flush::Done);
    };
    match path.and_then(|path| path.refusal(roots, file, &error)) {
        Some(why) => Ok(Flush::PagesWritten(format!("{why}: {error}"))),
        None => Err(error),
    }
}

#[cfg(test)]
mod tests;
