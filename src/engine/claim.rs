//! The proof that nobody uses a disk and that nobody begins to, and the flush
//! under it.

use std::fs::File;
use std::sync::Arc;

use super::detach::Flush;
use super::phases::Phases;
use super::{Engine, in_use};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Hctl;
use crate::kernel::blockdev::{self, BlockDevice};
use crate::kernel::{Roots, worker};
use crate::scsi::{Lanes, ScsiDevice};
use crate::uevent::{self, Mode, Watch};

/// What became of a claim.
enum Claim {
    /// The disk is ours alone until the file is closed.
    Held(File),
    /// The device serves no opens any more (offline, path lost), and nobody
    /// mounts, stacks on, swaps on or has it open: there is nothing to flush.
    Unreachable(Error),
    /// A flush of our own that never returned has it still.
    Stuck(Error),
}

impl Engine {
    /// Claims the disk and writes it back. The claim holds until the file is
    /// closed.
    pub(super) fn claim_and_flush(
        &self,
        disk: &BlockDevice,
        abandon: bool,
        watch: &mut Watch,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<(Flush, Option<Arc<File>>)> {
        let (roots, mode) = (self.roots(), self.hub().mode());
        phases.enter(Stage::Claim);
        let file = match claim(&self.lanes, disk, abandon, roots, mode, watch, deadline)? {
            Claim::Held(file) => Arc::new(file),
            Claim::Unreachable(why) => return Ok((Flush::Unreachable(why.to_string()), None)),
            Claim::Stuck(why) => return Ok((Flush::Abandoned(why.to_string()), None)),
        };
        phases.enter(Stage::Flush);
        let limit = if abandon {
            Deadline::after(deadline.remaining() / 2)
        } else {
            deadline
        };
        match flush(lane_of(&self.lanes, disk), &file, disk, roots, limit) {
            Ok(()) => Ok((Flush::Done, Some(file))),
            Err(error) if abandon => Ok((Flush::Abandoned(error.to_string()), Some(file))),
            Err(error) => Err(error),
        }
    }
}

/// Where the calls for a SCSI disk run; other disks have no lane.
type Lane<'a> = Option<(&'a Lanes, Hctl)>;

fn lane_of<'a>(lanes: &'a Lanes, disk: &BlockDevice) -> Lane<'a> {
    let device = ScsiDevice::of_disk(disk).ok().flatten()?;
    Some((lanes, device.hctl()))
}

fn run<T: Send + 'static>(
    lane: Lane,
    stage: Stage,
    what: &str,
    deadline: Deadline,
    last_seen: impl FnOnce() -> String,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match lane {
        Some((lanes, hctl)) => lanes.on_device(hctl, stage, what, deadline, last_seen, call),
        None => worker::run(stage, what, deadline, last_seen, call),
    }
}

fn flush(
    lane: Lane,
    file: &Arc<File>,
    disk: &BlockDevice,
    roots: &Roots,
    deadline: Deadline,
) -> Result<()> {
    let (file, node) = (Arc::clone(file), disk.node(roots));
    run(
        lane,
        Stage::Flush,
        &format!("{} to write back", disk.name()),
        deadline,
        || disk.describe(),
        move || blockdev::flush(&file, &node),
    )
}

/// Claims the disk exclusively.
///
/// A claim that is refused while udevd alone has the disk open may be udevd's,
/// which rereads a partition table: then udev is waited for and the claim tried
/// once more.
///
/// # Errors
/// `InUse`, naming by whom; `TimedOut` at stage `claim` or `settle`;
/// `Quarantined`; `NotPermitted`.
fn claim(
    lanes: &Lanes,
    disk: &BlockDevice,
    abandon: bool,
    roots: &Roots,
    mode: Mode,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<Claim> {
    // A flush that hangs has the claim, so the kernel refuses another at once;
    // whoever abandons what it would write goes on from that refusal.
    let beside_flush = |(lanes, hctl): &(&Lanes, Hctl)| lanes.is_stuck_at(*hctl, Stage::Flush);
    let lane = lane_of(lanes, disk).filter(|lane| !(abandon && beside_flush(lane)));
    let refused = match try_claim(lane, disk, roots, deadline) {
        Ok(file) => return Ok(Claim::Held(file)),
        Err(error) => error,
    };
    // The kernel's own refusal (EBUSY; ENXIO, ENODEV), not a node that is
    // another's.
    let busy = refused.kind() == ErrorKind::InUse;
    if !busy && (refused.kind() != ErrorKind::Vanished || refused.errno().is_none()) {
        return Err(refused);
    }
    let mut holders = in_use::find_holders(roots, disk)?;
    if !holders.is_empty() {
        return Err(in_use::refuse(disk, &holders).caused_by(refused));
    }
    let openers = in_use::find_openers(roots, disk)?;
    if !busy && openers.is_empty() {
        return Ok(Claim::Unreachable(refused));
    }
    if abandon && in_use::is_a_flush_of_ours(&openers) {
        return Ok(Claim::Stuck(refused));
    }
    if !busy || mode != Mode::Udev || !openers.iter().all(in_use::is_udevs) {
        holders.extend(openers);
        return Err(in_use::refuse(disk, &holders).caused_by(refused));
    }
    uevent::settle_again(watch, mode, roots, disk.dir(), deadline)?;
    match try_claim(lane, disk, roots, deadline) {
        Ok(file) => Ok(Claim::Held(file)),
        Err(error) if error.kind() == ErrorKind::InUse => {
            let mut holders = in_use::find_holders(roots, disk)?;
            holders.extend(in_use::find_openers(roots, disk)?);
            Err(in_use::refuse(disk, &holders).caused_by(error))
        }
        Err(error) => Err(error),
    }
}

fn try_claim(lane: Lane, disk: &BlockDevice, roots: &Roots, deadline: Deadline) -> Result<File> {
    let what = format!("the kernel to open {}", disk.name());
    let (disk, roots) = (disk.clone(), roots.clone());
    run(
        lane,
        Stage::Claim,
        &what,
        deadline,
        || "not returned".to_owned(),
        move || disk.open(&roots, true),
    )
}
