//! The users of a disk, of its partitions and of its map: one answer for every operation
//! that removes or replaces a device.
//!
//! An exclusive open proves a part of it: the kernel refuses it while the disk or a partition
//! is mounted, stacked on or swapped on. It does not exclude users with a plain open, so
//! those are searched for: processes (by the descriptors of each of their threads, including
//! those of the disk's `/dev/sg*` and `/dev/bsg/*`, by their writable mappings and by the
//! fixed files of an `io_uring`), and loop devices, targets and other parts of the kernel, whose
//! opens are in no process.
//!
//! The search does not see seven things: a descriptor that is on its way through a socket, a
//! plain open between the search and the delete, a mapping that becomes writable after the
//! search, a descriptor that a process moves to another number or gives to a new thread at the
//! moment when the search looks at that process, and, up to Linux 6.13, a fixed file that was
//! opened by a node whose name is not the device's and that is not in the process's `/dev`. Nor
//! does it see a disk of pNFS's block layout (`fs/nfs/blocklayout/dev.c`), which the kernel does
//! not show, or a device without a disk that LIO exports (`pscsi_create_type_nondisk`). For a map
//! the kernel counts all opens, and refuses the removal.
//!
//! The guide's page on SCSI has a table of each user against each way to take a device
//! away. The VM test `usage_matrix_scsi_and_nbd` runs each cell and compares the table.

pub(super) mod claim;
pub(super) mod failed_flush;
mod holder;
mod not_looked_at;
mod refused_flush;
mod removal;
mod search;
mod snapshot;
pub(super) mod write_back;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::usage::removal::in_use_error_of;
pub use crate::error::Holder;
use crate::error::{Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::worker;
use crate::scsi::ScsiDevice;
pub use not_looked_at::NotLookedAt;
pub(super) use removal::{Removal, Usage, in_use_error};
pub(super) use search::{Extent, Users};
pub(super) use snapshot::UsageSnapshot;

/// Why a search for users may not end. A look at a descriptor takes a reference of its file
/// (`fs/proc/fd.c`, `proc_fd_link`, Linux 5.11). If the process closes the descriptor at that
/// moment, the look ends with the last close. The last close of a block device waits until its
/// pages are written back.
const NO_ANSWER: &str = "a file system below an open file may not answer, or a device that a \
                         process has closed may not write back";

/// Reads the users of each of these disks, with its partitions, in the order of the
/// disks. A file server may hold what backs a loop device or a target's volume: if it does
/// not answer in time, that place is not looked at. If another search waits for a file
/// server, this one ends at its deadline.
///
/// # Errors
/// `TimedOut` at stage `claim`; `Io` and `NotPermitted` if sysfs or `/proc` cannot be read
/// at all.
pub(super) fn users_of_each(
    engine: &Engine,
    disks: &[&BlockDevice],
    extent: Extent,
    deadline: Deadline,
) -> Result<Vec<Users>> {
    let names: Vec<&str> = disks.iter().map(|disk| disk.name()).collect();
    let what = format!("the users of {} to be read", names.join(", "));
    let disks: Vec<BlockDevice> = disks.iter().map(|&disk| disk.clone()).collect();
    let roots = engine.roots().clone();
    let last_seen = || NO_ANSWER.to_owned();
    worker::run(Stage::Claim, &what, deadline, last_seen, move || {
        search::read(&roots, &disks, extent, deadline)
    })
}

/// The places on this machine where users of a disk cannot be seen.
///
/// # Errors
/// As [`users_of_each`].
pub(super) fn places_not_looked_at(
    engine: &Engine,
    deadline: Deadline,
) -> Result<Vec<NotLookedAt>> {
    let roots = engine.roots().clone();
    let what = "the users of disks to be read";
    let last_seen = || NO_ANSWER.to_owned();
    worker::run(Stage::Claim, what, deadline, last_seen, move || {
        search::read_places_not_looked_at(&roots, deadline)
    })
}

/// The users of one disk and of its partitions.
///
/// # Errors
/// As [`users_of_each`].
pub(super) fn users_of(
    engine: &Engine,
    disk: &BlockDevice,
    extent: Extent,
    deadline: Deadline,
) -> Result<Users> {
    let mut users = users_of_each(engine, &[disk], extent, deadline)?;
    Ok(users.pop().unwrap_or_default())
}

/// Requires that no process has a character device of a SCSI device without a disk open for
/// writing: of a tape, an enclosure, or a disk without its driver. Returns the places that
/// could not be looked at.
///
/// # Errors
/// `InUse`, which names the users; those of [`users_of_each`].
pub(super) fn refuse_users_of_diskless(
    engine: &Engine,
    device: &ScsiDevice,
    deadline: Deadline,
) -> Result<Vec<NotLookedAt>> {
    let what = format!("the users of {} to be read", device.hctl());
    let (roots, dir) = (engine.roots().clone(), device.dir().to_owned());
    let last_seen = || NO_ANSWER.to_owned();
    let search = move || search::read_diskless(&roots, &dir, deadline);
    let users = worker::run(Stage::Claim, &what, deadline, last_seen, search)?;
    match users.usage_for(engine.roots(), Removal::FlushedDisk) {
        Usage::Busy(busy) => Err(in_use_error_of(&device.hctl().to_string(), &busy)),
        Usage::Free | Usage::Transient => Ok(users.not_looked_at),
    }
}
