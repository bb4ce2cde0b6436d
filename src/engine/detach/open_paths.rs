//! The paths of a map, which this process keeps open from before the removal of the map until
//! their own flush.
//!
//! The kernel reports a failed write to each file that was open at that time, and to the first
//! one that is opened later (`lib/errseq.c`). So a file that is opened after the removal of the
//! map does not see a failure that another process has seen, and a path that has died by then
//! cannot be opened at all.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::detach::run::{ClaimedPath, DetachRun};
use crate::engine::unit::{KnownPath, PathIdentity};
use crate::engine::usage::claim::{self, Claim, claim_disk, claim_replaced};
use crate::engine::usage::write_back::write_pages_of;
use crate::error::{ErrorKind, Result};
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::ScsiDevice;

/// How long a path may take to write back when all data has gone through its map already, so
/// that the path has nothing of its own to write.
const BELOW_MAP_LIMIT: Duration = Duration::from_secs(5);

/// A path that was below the map.
pub(in crate::engine) struct OpenPath {
    device: ScsiDevice,
    disk: BlockDevice,
    file: Arc<File>,
}

impl DetachRun<'_> {
    /// Opens the paths that are `below` the map, each once. A path that cannot be opened has
    /// died before this detach.
    pub(super) fn open_paths_below(
        &mut self,
        paths: &[KnownPath],
        below: &[BlockDevice],
        deadline: Deadline,
    ) {
        for path in paths {
            let is_replaced = matches!(path.identity_now, PathIdentity::Replaced { .. });
            let disk = path.disk.as_ref().filter(|disk| below.contains(disk));
            let Some(disk) = disk.filter(|_| !is_replaced) else {
                continue;
            };
            if self.open_file_of(&path.device).is_some() {
                continue;
            }
            match claim::open_shared(self.engine, disk, below_map_limit(deadline)) {
                Ok(file) => self.open_paths.push(OpenPath {
                    device: path.device.clone(),
                    disk: disk.clone(),
                    file: Arc::new(file),
                }),
                Err(error) => tracing::debug!(%error, "a path of the map cannot be opened"),
            }
        }
    }

    /// The file of a path that was opened before the removal of its map.
    pub(super) fn open_file_of(&self, device: &ScsiDevice) -> Option<Arc<File>> {
        let mut open = self.open_paths.iter();
        let path = open.find(|path| path.device == *device)?;
        Some(Arc::clone(&path.file))
    }

    /// Claims the disk of a path; `None` if it has none. A refusal is about the other users of
    /// the disk, so this process has closed it by then.
    pub(super) fn claim(
        &mut self,
        one: &mut ClaimedPath,
        deadline: Deadline,
    ) -> Result<Option<Claim>> {
        let Some(disk) = &one.path.disk else {
            return Ok(None);
        };
        let (engine, policy, watch) = (self.engine, self.request.flush_policy, &mut one.watch);
        if let PathIdentity::Replaced { .. } = one.path.identity_now {
            // Nothing may be written there.
            self.open_paths
                .retain(|open| open.device != one.path.device);
            return claim_replaced(engine, disk, watch, deadline).map(Some);
        }
        if self.open_file_of(&one.path.device).is_some() {
            match claim::try_claim_disk(engine, disk, deadline) {
                Ok(claim) => return Ok(Some(claim)),
                Err(error) if !matches!(error.kind(), ErrorKind::InUse | ErrorKind::Vanished) => {
                    return Err(error);
                }
                Err(_refused) => self.write_back_and_close_paths(deadline),
            }
        }
        claim_disk(engine, disk, policy, watch, deadline).map(Some)
    }

    /// A failed write is recorded, and the flush of the path finds the record.
    fn write_back_and_close_paths(&mut self, deadline: Deadline) {
        for open in self.open_paths.drain(..) {
            let limit = below_map_limit(deadline);
            let written = write_pages_of(self.engine, &open.disk, open.file, limit);
            if let Err(error) = written {
                tracing::debug!(%error, "a path of the removed map is not written back");
            }
        }
    }
}

/// The limit of a call for a path below the map: the dead ones leave most of the time.
pub(super) fn below_map_limit(deadline: Deadline) -> Deadline {
    deadline.at_most(BELOW_MAP_LIMIT.min(deadline.remaining() / 4))
}
