//! The flush of the paths that a detach is about to delete.

use crate::deadline::Deadline;
use crate::engine::detach::foreign_unit::flush_if_replaced;
use crate::engine::detach::open_paths::below_map_limit;
use crate::engine::detach::receipt::{Flush, PathReceipt};
use crate::engine::detach::run::{ClaimedPath, DetachRun};
use crate::engine::usage::write_back::{write_back, write_back_below_map};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::sysfs;

impl DetachRun<'_> {
    /// Flushes each path and records the result in the receipt.
    pub(super) fn flush_all(&mut self, claimed: &[ClaimedPath], deadline: Deadline) -> Result<()> {
        for one in claimed {
            // Another process removed the disk, so this call did not write back its data.
            if one.path.is_being_removed && one.path.disk.is_none() {
                continue;
            }
            let flush = self.flush(one, deadline)?;
            if let Some(entry) = self.entry(&one.path.device) {
                entry.flush = Some(flush);
            }
        }
        self.flush_over_another_path(claimed, deadline)
    }

    pub(super) fn flush(&self, one: &ClaimedPath, deadline: Deadline) -> Result<Flush> {
        let (Some(claim), Some(disk)) = (&one.claim, &one.path.disk) else {
            return Ok(Flush::NoDisk);
        };
        if let Some(replaced) = flush_if_replaced(&one.path) {
            return Ok(replaced);
        }
        if !one.in_map {
            let policy = self.request.flush_policy;
            let flushed = write_back(self.engine, claim, disk, policy, deadline);
            return flushed.map_err(|error| match error.last_seen() {
                Some(_) => error,
                None => error.with_last_seen(one.path.device.describe()),
            });
        }
        let (policy, limit) = (self.request.flush_policy, below_map_limit(deadline));
        write_back_below_map(self.engine, claim, disk, policy, limit)
    }

    /// Where a path's ALUA access state refused the flush of the unit's cache, flushes
    /// another path again: the cache belongs to the unit and holds the data from every path.
    ///
    /// # Errors
    /// `NotReady` where no other path flushes it; those of a flush.
    fn flush_over_another_path(
        &mut self,
        claimed: &[ClaimedPath],
        deadline: Deadline,
    ) -> Result<()> {
        let refused = |path: &PathReceipt| match &path.flush {
            Some(Flush::PagesWritten(why)) if !path.gone => Some((path.hctl, why.clone())),
            _ => None,
        };
        let Some((hctl, why)) = self.receipt.paths.iter().find_map(refused) else {
            return Ok(());
        };
        for one in claimed {
            let device = &one.path.device;
            let was_flushed = self
                .entry(device)
                .is_some_and(|entry| entry.flush == Some(Flush::Done));
            if !was_flushed || !sends_flushes(one)? {
                continue;
            }
            let flush = self.flush(one, deadline)?;
            let done = flush == Flush::Done;
            if let Some(entry) = self.entry(device) {
                entry.flush = Some(flush);
            }
            if done {
                return Ok(());
            }
        }
        let message = format!(
            "{hctl} does not flush the unit's cache, and no other path flushed it ({why}); the \
             kernel wrote all pages, and this call deleted nothing: make a path active on the \
             target and detach again, or abandon unwritten data"
        );
        Err(Error::new(ErrorKind::NotReady, message).at(Stage::Flush))
    }
}

/// Whether the kernel sends flushes over this path. The kernel takes the cache of a path that did
/// not answer MODE SENSE for write-through (`drivers/scsi/sd.c`, `sd_read_cache_type`), and then
/// completes a flush without a command.
fn sends_flushes(one: &ClaimedPath) -> Result<bool> {
    let Some(disk) = &one.path.disk else {
        return Ok(false);
    };
    let cache = sysfs::read_if_there(&disk.dir().join("queue/write_cache"))?;
    Ok(cache.is_none_or(|cache| cache != "write through"))
}
