//! The flush of the paths that a detach is about to delete.

use crate::deadline::Deadline;
use crate::engine::detach::foreign_unit::flush_if_replaced;
use crate::engine::detach::open_paths::below_map_limit;
use crate::engine::detach::receipt::{Flush, PathReceipt};
use crate::engine::detach::run::{ClaimedPath, DetachRun};
use crate::engine::usage::claim::{Claim, FlushPolicy};
use crate::engine::usage::failed_flush::FailedFlush;
use crate::engine::usage::write_back::{write_back, write_back_below_map};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::sysfs;

impl DetachRun<'_> {
    /// Flushes each path and records the result in the receipt.
    pub(super) fn flush_all(&mut self, claimed: &[ClaimedPath], deadline: Deadline) -> Result<()> {
        let last = claimed.iter().rposition(is_flushed_below_map);
        let mut is_done = false;
        for (place, one) in claimed.iter().enumerate() {
            // Another process removed the disk, so this call did not write back its data.
            if one.path.is_being_removed && one.path.disk.is_none() {
                continue;
            }
            // One path must flush the unit's cache.
            let below_map = if Some(place) == last && !is_done {
                deadline.half()
            } else {
                below_map_limit(deadline)
            };
            let flush = self.flush(one, deadline, below_map)?;
            is_done |= flush == Flush::Done;
            if let Some(entry) = self.entry(&one.path.device) {
                entry.flush = Some(flush);
            }
        }
        self.flush_over_another_path(claimed, deadline)?;
        self.record_cache_flush(claimed)
    }

    /// Flushes one path. A path below a map has until `below_map`.
    pub(super) fn flush(
        &self,
        one: &ClaimedPath,
        deadline: Deadline,
        below_map: Deadline,
    ) -> Result<Flush> {
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
        let policy = self.request.flush_policy;
        write_back_below_map(self.engine, claim, disk, policy, below_map)
    }

    /// Records whether a path has flushed the unit's cache, if the pages of another one need that.
    /// If none has, marks the paths with such pages: the marks stay when the paths are deleted, so
    /// the next detach reports the doubt too.
    fn record_cache_flush(&mut self, claimed: &[ClaimedPath]) -> Result<()> {
        let mut paths = self.receipt.paths.iter();
        if !paths.any(PathReceipt::needs_cache_flush) {
            return Ok(());
        }
        for one in claimed {
            let entry = self.entry(&one.path.device);
            let is_done = entry.is_some_and(|it| it.flush == Some(Flush::Done));
            self.receipt.cache_was_flushed |= is_done && sends_flushes(one)?;
        }
        if self.request.flush_policy == FlushPolicy::Abandon || self.receipt.cache_was_flushed {
            return Ok(());
        }
        for one in claimed {
            let entry = self.entry(&one.path.device);
            let needs = entry.is_some_and(|it| it.needs_cache_flush());
            let disk = one.path.disk.as_ref().filter(|_| needs);
            match disk.map(|disk| FailedFlush::of(self.engine.roots(), disk)) {
                Some(Ok(mark)) => mark.set_cache_unflushed(),
                Some(Err(error)) => tracing::debug!(%error, "cannot mark the path as unflushed"),
                None => {}
            }
        }
        Ok(())
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
            let flush = self.flush(one, deadline, below_map_limit(deadline))?;
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

/// Whether a path below a map can be flushed, as the path of its unit.
fn is_flushed_below_map(one: &ClaimedPath) -> bool {
    let is_open = matches!(one.claim, Some(Claim::Held(_)));
    one.in_map && is_open && flush_if_replaced(&one.path).is_none()
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
