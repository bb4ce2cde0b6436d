//! The proof that no process uses a disk or begins to, and the flush under that proof.

use std::fs::File;
use std::sync::Arc;

use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::receipt::Flush;
use crate::engine::usage::failed_flush::{self, FailedFlush};
use crate::engine::usage::{self, Extent, NotLookedAt, Removal, UsageSnapshot, users_of};
use crate::error::{ErrorKind, Result, Stage};
use crate::id::{Hctl, NbdIndex};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{OpenMode, Roots, worker};
use crate::scsi::{self, CallScheduler, ScsiDevice};
use crate::uevent::{self, Mode, Watch};

/// What a caller does where a disk cannot be written back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum FlushPolicy {
    /// It fails, and no data is lost.
    Require,
    /// It goes on, and unwritten data is lost.
    Abandon,
}

/// The result of a claim.
#[derive(Debug)]
pub(in crate::engine) enum Claim {
    /// This process has the disk exclusively until the file is closed.
    Held(Arc<File>),
    /// The device can no longer be opened (offline, path lost), and it is not mounted,
    /// stacked on, swapped on or open: there is nothing to flush.
    Unreachable(String),
    /// A flush of our own that never returned still holds the disk.
    Stuck(String),
}

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
    let snapshot = UsageSnapshot::take(engine, &[disk], Extent::BesideClaim, deadline)?;
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

/// Claims the disk exclusively.
///
/// If the kernel refuses it while udevd alone has the disk open, udevd may have claimed
/// the disk to reread a partition table: then this waits for udev, and tries once more.
///
/// # Errors
/// `InUse`, which names the users; `TimedOut` at stage `claim` or `settle`;
/// `Quarantined`; `NotPermitted`.
pub(in crate::engine) fn claim_disk(
    engine: &Engine,
    disk: &BlockDevice,
    policy: FlushPolicy,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<Claim> {
    let (roots, mode) = (engine.roots(), engine.hub().mode());
    let abandon = policy == FlushPolicy::Abandon;
    // A flush that hangs holds the claim, so the kernel refuses another at once. A caller
    // that abandons the data needs that refusal, so it does not queue behind the flush.
    let beside_flush =
        |(scheduler, hctl): &(&CallScheduler, Hctl)| scheduler.is_stuck_at(*hctl, Stage::Flush);
    let queue = host_queue_of(engine, disk);
    let queue = queue.filter(|queue| !(abandon && beside_flush(queue)));
    let refused = match try_claim(queue, disk, roots, deadline) {
        Ok(file) => return Ok(Claim::Held(Arc::new(file))),
        Err(error) => error,
    };
    // Only a refusal of the kernel counts (EBUSY; ENXIO, ENODEV, ENOENT), not a node of
    // another device.
    let busy = refused.kind() == ErrorKind::InUse;
    if !busy && (refused.kind() != ErrorKind::Vanished || refused.errno().is_none()) {
        return Err(refused);
    }
    let users = users_of(engine, disk, Extent::All, deadline)?;
    if !busy && users.found.is_empty() {
        return Ok(Claim::Unreachable(refused.to_string()));
    }
    if abandon && users.has_only_own_flush() {
        return Ok(Claim::Stuck(refused.to_string()));
    }
    if mode != Mode::Udev || !users.has_only_udev() {
        return Err(usage::in_use_error(disk, &users.found).caused_by(refused));
    }
    uevent::settle_again(watch, mode, roots, disk.dir(), deadline)?;
    let refused = match try_claim(queue, disk, roots, deadline) {
        Ok(file) => return Ok(Claim::Held(Arc::new(file))),
        Err(error) => error,
    };
    let users = users_of(engine, disk, Extent::All, deadline)?;
    // udevd had opened it before it could no longer be opened.
    if !busy && users.found.is_empty() {
        return Ok(Claim::Unreachable(refused.to_string()));
    }
    if refused.kind() == ErrorKind::InUse {
        return Err(usage::in_use_error(disk, &users.found).caused_by(refused));
    }
    Err(refused)
}

/// Writes the disk back under its claim.
///
/// # Errors
/// `Io` if a write failed, and then its pages are lost: a second flush would succeed and
/// prove nothing. [`Flush::PagesWritten`] is no error. With [`FlushPolicy::Abandon`],
/// neither a failed write nor a flush that takes half of the time is an error.
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
        move || flush(&roots, file, &own, &mark),
    );
    match (flushed, earlier) {
        (Ok(_), Some(earlier)) => Ok(Flush::Abandoned(earlier)),
        (Ok(Flush::PagesWritten(why)), None) if abandon => Ok(Flush::Abandoned(why)),
        (Ok(flush), None) => Ok(flush),
        (Err(error), _) if abandon => Ok(Flush::Abandoned(error.to_string())),
        (Err(error), _) => Err(error),
    }
}

/// Writes back a path that was below its map, whose flush is done. A failed flush of the
/// unit's cache loses nothing here and is not recorded. Pages that a process wrote to the
/// path beside the map, and an earlier failed flush of the path itself, were not the
/// map's, and count.
///
/// # Errors
/// `Io` if there was such an earlier failure, with [`FlushPolicy::Require`].
pub(in crate::engine) fn write_back_below_map(
    engine: &Engine,
    claim: &Claim,
    disk: &BlockDevice,
    policy: FlushPolicy,
    deadline: Deadline,
) -> Result<Flush> {
    let Claim::Held(file) = claim else {
        return write_back(engine, claim, disk, policy, deadline);
    };
    let abandon = policy == FlushPolicy::Abandon;
    let mark = FailedFlush::of(engine.roots(), disk)?;
    match FailedFlush::read_of(engine.roots(), disk)? {
        Some(earlier) if abandon => return Ok(Flush::Abandoned(earlier)),
        Some(earlier) => return Err(failed_flush::lost_data_error(disk, &earlier)),
        None => {}
    }
    let (file, own, roots) = (Arc::clone(file), disk.clone(), engine.roots().clone());
    let written = move |file: &File| {
        let dropped = own.drop_pages(&roots, file);
        match own.write_pages(&roots, file) {
            Err(error) if error.kind() == ErrorKind::Io => {
                mark.set(&error);
                Err(error)
            }
            _ => Ok(dropped.and_then(|()| own.flush(&roots, file))),
        }
    };
    let flushed = run_in_queue(
        host_queue_of(engine, disk),
        Stage::Flush,
        &format!("{} to write back", disk.name()),
        deadline,
        || disk.describe(),
        move || worker::run_with_own_fd_table_and(file, |file| Ok(written(file))),
    );
    match flushed {
        Ok(Ok(Ok(()))) => Ok(Flush::Done),
        Ok(Ok(Err(error))) | Err(error) => Ok(Flush::ThroughMap(error.to_string())),
        Ok(Err(error)) if abandon => Ok(Flush::Abandoned(error.to_string())),
        Ok(Err(error)) => Err(error.at(Stage::Flush)),
    }
}

fn host_queue_of<'a>(engine: &'a Engine, disk: &BlockDevice) -> HostQueue<'a> {
    if NbdIndex::of_name(disk.name()).is_some() {
        return None;
    }
    let device = ScsiDevice::of_disk(disk).ok().flatten()?;
    Some((&engine.scheduler, device.hctl()))
}

/// Claims a disk at whose address another unit answers now. Nothing may be written there,
/// so no process may have it open either: an open file could hold pages that were never
/// written.
///
/// # Errors
/// `InUse`, which names the users; `NotPermitted` if the users cannot all be seen.
pub(in crate::engine) fn claim_replaced(
    engine: &Engine,
    disk: &BlockDevice,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<Claim> {
    let users = users_of(engine, disk, Extent::BesideClaim, deadline)?;
    users.refuse_busy(engine.roots(), disk, Removal::UnflushedDisk)?;
    users.refuse_unless_all_seen(disk)?;
    claim_disk(engine, disk, FlushPolicy::Require, watch, deadline)
}

/// Flushes, and records a failure, also one that comes after the caller has gone. If the
/// process dies during the flush, the record says that the flush may have failed.
///
/// The kernel may hold the thread for as long as a link is dead. So the thread has none of
/// the process's other files, and a killed process releases the locks on those.
pub(in crate::engine) fn flush(
    roots: &Roots,
    file: Arc<File>,
    disk: &BlockDevice,
    mark: &FailedFlush,
) -> Result<Flush> {
    let is_marked = mark.begin()?;
    let flushed =
        worker::run_with_own_fd_table_and(file, |file| flush_pages_and_cache(roots, disk, file));
    match &flushed {
        // A process that may not drop the pages has lost nothing.
        Err(error) if error.kind() != ErrorKind::NotPermitted => mark.set(error),
        _ if is_marked => mark.clear(),
        _ => {}
    }
    flushed
}

/// If all pages are written, a flush of the unit's cache that the path's ALUA access state
/// refuses has lost nothing.
fn flush_pages_and_cache(roots: &Roots, disk: &BlockDevice, file: &File) -> Result<Flush> {
    disk.drop_pages(roots, file)?;
    let all_written = disk.write_pages(roots, file)?;
    let Err(error) = disk.flush(roots, file) else {
        return Ok(Flush::Done);
    };
    let has_states = match ScsiDevice::of_disk(disk) {
        Ok(Some(device)) => device.has_port_groups().unwrap_or(false),
        _ => false,
    };
    if !all_written || !has_states {
        return Err(error);
    }
    match scsi::access_state_of_open(roots, file) {
        Ok(Some(state)) if !state.serves_io() => Ok(Flush::PagesWritten(format!(
            "its ALUA access state is {state}: {error}"
        ))),
        _ => Err(error),
    }
}

/// The host's queue in which calls for a SCSI disk run; other disks have none.
type HostQueue<'a> = Option<(&'a CallScheduler, Hctl)>;

fn run_in_queue<T: Send + 'static>(
    queue: HostQueue<'_>,
    stage: Stage,
    what: &str,
    deadline: Deadline,
    last_seen: impl FnOnce() -> String,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match queue {
        Some((scheduler, hctl)) => {
            let slot = scheduler.on_device(hctl, stage, what)?;
            slot.run(deadline, last_seen, call)
        }
        None => worker::run(stage, what, deadline, last_seen, call),
    }
}

fn try_claim(
    queue: HostQueue<'_>,
    disk: &BlockDevice,
    roots: &Roots,
    deadline: Deadline,
) -> Result<File> {
    let what = format!("the kernel to open {}", disk.name());
    let (disk, roots) = (disk.clone(), roots.clone());
    crash_point!(ClaimToTake);
    let claimed = run_in_queue(
        queue,
        Stage::Claim,
        &what,
        deadline,
        || "not returned".to_owned(),
        move || disk.open(&roots, OpenMode::Exclusive),
    )?;
    crash_point!(ClaimTaken);
    Ok(claimed)
}

#[cfg(test)]
mod tests;
