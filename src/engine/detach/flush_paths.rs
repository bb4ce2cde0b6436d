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
        let requires_flush = self.request.flush_policy == FlushPolicy::Require;
        let mut cache_was_flushed = false;
        for (place, one) in claimed.iter().enumerate() {
            // Another process removed the disk, so this call did not write back its data.
            if one.path.is_being_removed && one.path.disk.is_none() {
                continue;
            }
            // One path must flush the unit's cache.
            let is_last_chance = requires_flush && Some(place) == last && !cache_was_flushed;
            let below_map = if is_last_chance {
                deadline.half()
            } else {
                below_map_limit(deadline)
            };
            let flush = self.flush(one, deadline, below_map)?;
            let is_done = one.in_map && flush == Flush::Done;
            cache_was_flushed |= is_done && sends_flushes(one)? == Some(true);
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

    /// If the pages of a path may be in the unit's cache alone, records whether another path has
    /// flushed the cache, or whether no path shows a cache. Marks each such path otherwise. The mark
    /// stays when the path is deleted, so the next detach reports the doubt too.
    fn record_cache_flush(&mut self, claimed: &[ClaimedPath]) -> Result<()> {
        let (mut has_cache, mut was_flushed) = (false, false);
        let mut unflushed = Vec::new();
        for one in claimed {
            let entry = self.entry(&one.path.device);
            if entry.is_some_and(|it| it.needs_cache_flush()) {
                unflushed.extend(&one.path.disk);
            }
        }
        if unflushed.is_empty() {
            return Ok(());
        }
        for one in claimed {
            let sends_flushes = sends_flushes(one)?;
            has_cache |= sends_flushes != Some(false);
            let entry = self.entry(&one.path.device);
            let is_done = entry.is_some_and(|it| it.flush == Some(Flush::Done));
            was_flushed |= is_done && sends_flushes == Some(true);
        }
        self.receipt.cache_was_flushed |= was_flushed || !has_cache;
        if self.request.flush_policy == FlushPolicy::Abandon || self.receipt.cache_was_flushed {
            return Ok(());
        }
        for disk in unflushed {
            match FailedFlush::of(self.engine.roots(), disk) {
                Ok(mark) => mark.set_cache_unflushed(),
                Err(error) => tracing::debug!(%error, "cannot mark the path as unflushed"),
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
            if !was_flushed || sends_flushes(one)? != Some(true) {
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
/// completes a flush without a command. `None` if the disk is gone.
fn sends_flushes(one: &ClaimedPath) -> Result<Option<bool>> {
    let Some(disk) = &one.path.disk else {
        return Ok(Some(false));
    };
    let cache = sysfs::read_if_there(&disk.dir().join("queue/write_cache"))?;
    Ok(cache.map(|cache| cache != "write through"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::engine::Engine;
    use crate::engine::detach::remove_paths::tests::{path, run};
    use crate::engine::detach::{DetachRequest, DetachTarget};
    use crate::kernel::Roots;

    /// Two paths whose disks show this cache, and the results of their flushes. Returns whether the
    /// cache counts as flushed, and which paths are marked.
    fn recorded(paths: [(&str, Flush); 2]) -> (bool, [bool; 2]) {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let roots = engine.roots();
        let unit: DetachTarget = "unit:naa.5000c500a1b2c3d4".parse().unwrap();
        let request = DetachRequest::new(unit);
        let mut run = run(&engine, &request);
        let mut claimed = Vec::new();
        for ((cache, flush), (hctl, name)) in paths
            .into_iter()
            .zip([("1:0:0:4", "sdb"), ("2:0:0:4", "sdc")])
        {
            let path = path(roots, hctl, name);
            let queue = path.disk.as_ref().unwrap().dir().join("queue");
            fs::create_dir_all(&queue).unwrap();
            fs::write(queue.join("write_cache"), cache).unwrap();
            run.add_to_receipt(&path).unwrap();
            let entry = run.entry(&path.device).unwrap();
            (entry.flush, entry.in_map, entry.wrote_own_pages) = (Some(flush), true, true);
            claimed.push(ClaimedPath {
                watch: engine.hub().watch(hctl),
                claim: None,
                path,
                in_map: true,
            });
        }
        run.record_cache_flush(&claimed).unwrap();
        let marks = sysfs::names(&roots.run.join("lunbd")).unwrap_or_default();
        let marked = ["lost-sdb-", "lost-sdc-"].map(|of| marks.iter().any(|it| it.starts_with(of)));
        (run.receipt.cache_was_flushed, marked)
    }

    #[test]
    fn a_path_is_marked_if_the_unit_has_a_cache_that_no_path_flushed() {
        let (back, through) = ("write back\n", "write through\n");
        let failed = || Flush::ThroughMap("EIO".to_owned());
        let dead = || Flush::Unreachable("ENXIO".to_owned());
        let both = [true, true];
        let none = [false, false];
        let of = recorded;
        assert_eq!(of([(back, failed()), (back, Flush::Done)]), (true, none));
        assert_eq!(of([(back, failed()), (back, dead())]), (false, both));
        // The kernel sends no flush over the path that succeeded.
        let unsent = of([(back, failed()), (through, Flush::Done)]);
        assert_eq!(unsent, (false, [true, false]));
        // No path shows a cache.
        assert_eq!(
            of([(through, dead()), (through, Flush::Done)]),
            (true, none)
        );
    }
}
