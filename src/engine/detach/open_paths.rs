//! The paths of a map, which this process keeps open from before the removal of the map until
//! each has written its own pages back.
//!
//! The kernel reports a failed write to each file that was open at that time (`lib/errseq.c`). A
//! file that is opened later does not see a failure that another process has seen. A path that
//! has died by then cannot be opened at all.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::detach::run::{DetachRun, OpenPath};
use crate::engine::unit::{KnownPath, PathIdentity};
use crate::engine::usage::claim::{FlushPolicy, open_with_partitions};
use crate::engine::usage::write_back::write_pages_of;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::pool;
use crate::scsi::ScsiDevice;

/// How long the calls for the paths of a map may take. A path that hangs leaves the rest of the
/// time to the others.
const BELOW_MAP_LIMIT: Duration = Duration::from_secs(5);

impl DetachRun<'_> {
    /// Opens the paths that are `below` the map, with their partitions, unless they are open
    /// already.
    ///
    /// # Errors
    /// `NotPermitted`, `NotReady` or `Io` if a path that is there cannot be opened. A path that
    /// has died, or that hangs, is no error.
    pub(super) fn open_paths_below(
        &mut self,
        paths: &[KnownPath],
        below: &[BlockDevice],
        deadline: Deadline,
    ) -> Result<()> {
        let (engine, limit) = (self.engine, below_map_limit(deadline));
        self.close_replaced_paths();
        let is_replaced = |device: &ScsiDevice| self.replaced.iter().any(|(it, _)| it == device);
        let is_open = |disk: &BlockDevice| self.open_paths.iter().any(|it| it.disk == *disk);
        let mut wanted = Vec::new();
        for path in paths {
            let disk = path.disk.as_ref().filter(|disk| below.contains(disk));
            let is_wanted = |disk: &&BlockDevice| !is_replaced(&path.device) && !is_open(disk);
            if let Some(disk) = disk.filter(is_wanted) {
                wanted.push((path, disk));
            }
        }
        let opened = pool::each(Stage::Claim, wanted, |(path, disk)| {
            (path, disk, open_with_partitions(engine, disk, limit))
        });
        for one in opened {
            let (path, disk, opened) = one?;
            match opened {
                Ok(files) => self.open_paths.push(OpenPath {
                    device: path.device.clone(),
                    disk: disk.clone(),
                    files,
                }),
                Err(error) if error.kind() == ErrorKind::Vanished => {
                    tracing::debug!(%error, "a path of the map has died");
                    if matches!(path.identity_now, PathIdentity::Live(_)) || path.timed_out {
                        self.add_unwritten(path.device.clone());
                    }
                }
                Err(error) if hangs(&error) => {
                    tracing::debug!(%error, "a path of the map hangs");
                    self.timed_out = true;
                    self.add_unwritten(path.device.clone());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes the pages of the open paths themselves back, now that their map is gone, and closes
    /// them. A failed write is recorded, and the flush of the path finds the record.
    ///
    /// # Errors
    /// `Io` at stage `flush` if a write failed, unless the caller abandons unwritten data. A path
    /// that hangs is no error: it does not count as written.
    pub(super) fn write_back_open_paths(&mut self, deadline: Deadline) -> Result<()> {
        let (engine, limit) = (self.engine, below_map_limit(deadline));
        self.close_replaced_paths();
        let open = std::mem::take(&mut self.open_paths);
        let written = pool::each(Stage::Flush, open, |open| {
            let written = write_pages_of(engine, &open.disk, open.files, limit);
            (open.device, written)
        });
        let mut first = Ok(());
        for one in written {
            let (device, written) = one?;
            let Err(error) = written else {
                if let Some(entry) = self.entry(&device) {
                    entry.wrote_own_pages = true;
                }
                continue;
            };
            tracing::debug!(%error, "a path of the removed map is not written back");
            self.timed_out |= hangs(&error);
            self.add_unwritten(device);
            let is_lost = error.kind() == ErrorKind::Io;
            if is_lost && self.request.flush_policy == FlushPolicy::Require && first.is_ok() {
                first = Err(error.at(Stage::Flush));
            }
        }
        first
    }

    /// Closes the paths at which another unit answers now: nothing may be written there.
    fn close_replaced_paths(&mut self) {
        let is_replaced = |device: &ScsiDevice| self.replaced.iter().any(|(it, _)| it == device);
        self.open_paths.retain(|open| !is_replaced(&open.device));
    }

    /// The path may have lost pages of its own, so the flush of the map no longer covers it.
    fn add_unwritten(&mut self, device: ScsiDevice) {
        if let Some(entry) = self.entry(&device) {
            entry.in_map = false;
        }
        self.unwritten_paths.push(device);
    }
}

/// The limit of the calls for the paths of a map.
pub(super) fn below_map_limit(deadline: Deadline) -> Deadline {
    deadline.at_most(BELOW_MAP_LIMIT.min(deadline.remaining() / 4))
}

fn hangs(error: &Error) -> bool {
    let kinds = [
        ErrorKind::TimedOut,
        ErrorKind::Cancelled,
        ErrorKind::Quarantined,
    ];
    kinds.contains(&error.kind())
}
