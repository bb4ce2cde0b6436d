//! The proof that no process uses a disk or begins to.

use std::fs::File;
use std::sync::Arc;

use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::usage::{self, Extent, Removal, users_of};
use crate::error::{ErrorKind, Result, Stage};
use crate::id::{Hctl, NbdIndex};
use crate::kernel::blockdev::{BlockDevice, OpenDisk};
use crate::kernel::worker::{self, NoteThread};
use crate::kernel::{OpenMode, Roots};
use crate::scsi::{CallScheduler, ScsiDevice};
use crate::uevent::{self, Mode, Watch};

/// What a caller does where a disk cannot be written back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum FlushPolicy {
    /// It fails rather than lose data.
    Require,
    /// It goes on, and unwritten data is lost. A map that queues with no path is told to fail.
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

pub(super) fn host_queue_of<'a>(engine: &'a Engine, disk: &BlockDevice) -> HostQueue<'a> {
    if NbdIndex::of_name(disk.name()).is_some() {
        return None;
    }
    let device = ScsiDevice::below(disk)?;
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
    let users = users_of(engine, disk, Extent::NotExcludedByClaim, deadline)?;
    users.refuse_busy(engine.roots(), disk, Removal::UnflushedDisk)?;
    users.refuse_unless_all_seen(disk)?;
    claim_disk(engine, disk, FlushPolicy::Require, watch, deadline)
}

/// The host's queue in which calls for a SCSI disk run; other disks have none.
pub(super) type HostQueue<'a> = Option<(&'a CallScheduler, Hctl)>;

pub(super) fn run_in_queue<T: Send + 'static>(
    queue: HostQueue<'_>,
    stage: Stage,
    what: &str,
    deadline: Deadline,
    last_seen: impl FnOnce() -> String,
    call: impl FnOnce(NoteThread) -> Result<T> + Send + 'static,
) -> Result<T> {
    match queue {
        Some((scheduler, hctl)) => {
            let slot = scheduler.on_device(hctl, stage, what)?;
            slot.run_with_thread(deadline, last_seen, call)
        }
        None => worker::run(stage, what, deadline, last_seen, || call(Box::new(|| {}))),
    }
}

/// Opens the disk and its partitions beside their other users.
///
/// # Errors
/// `Vanished` if the disk or a partition of it cannot be opened any more; `TimedOut`;
/// `Quarantined`; `NotPermitted`.
pub(in crate::engine) fn open_with_partitions(
    engine: &Engine,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<OpenDisk> {
    let (own, roots) = (disk.clone(), engine.roots().clone());
    let open = move |note_thread| OpenDisk::open(&roots, &own, note_thread);
    open_in_queue(host_queue_of(engine, disk), disk, deadline, open)
}

fn try_claim(
    queue: HostQueue<'_>,
    disk: &BlockDevice,
    roots: &Roots,
    deadline: Deadline,
) -> Result<File> {
    let (own, roots) = (disk.clone(), roots.clone());
    crash_point!(ClaimToTake);
    let open = move |_| own.open(&roots, OpenMode::Exclusive);
    let claimed = open_in_queue(queue, disk, deadline, open)?;
    crash_point!(ClaimTaken);
    Ok(claimed)
}

fn open_in_queue<T: Send + 'static>(
    queue: HostQueue<'_>,
    disk: &BlockDevice,
    deadline: Deadline,
    open: impl FnOnce(NoteThread) -> Result<T> + Send + 'static,
) -> Result<T> {
    let what = format!("the kernel to open {}", disk.name());
    let last_seen = || "not returned".to_owned();
    run_in_queue(queue, Stage::Claim, &what, deadline, last_seen, open)
}
