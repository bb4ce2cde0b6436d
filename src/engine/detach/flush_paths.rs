//! The flush of the paths that a detach is about to delete.

use crate::deadline::Deadline;
use crate::engine::detach::open_paths::below_map_limit;
use crate::engine::detach::other_unit::flush_if_replaced;
use crate::engine::detach::receipt::{Flush, PathReceipt};
use crate::engine::detach::run::{ClaimedPath, DetachRun, UnitCache};
use crate::engine::usage::claim::{Claim, FlushPolicy};
use crate::engine::usage::failed_flush::{FailedFlush, clear_cache_marks};
use crate::engine::usage::write_back::{sends_cache_flushes, write_back, write_back_below_map};
use crate::error::{Error, ErrorKind, Result, Stage};

impl DetachRun<'_> {
    /// Flushes each path and records the result in the receipt. Then it records whether the unit's
    /// cache was flushed, also if the flush of a path ends the detach.
    pub(super) fn flush_all(&mut self, claimed: &[ClaimedPath], deadline: Deadline) -> Result<()> {
        let flushed = self.flush_each(claimed, deadline);
        let flushed = flushed.and_then(|()| self.flush_over_another_path(claimed, deadline));
        self.record_cache_flush(claimed, flushed.is_ok());
        flushed
    }

    fn flush_each(&mut self, claimed: &[ClaimedPath], deadline: Deadline) -> Result<()> {
        let last = claimed.iter().rposition(is_flushed_below_map);
        let requires_flush = self.request.flush_policy == FlushPolicy::Require;
        let mut cache_was_flushed = false;
        // Another process removed the other disks, so this call does not write back their data.
        let there = |one: &&ClaimedPath| !one.path.is_being_removed || one.path.disk.is_some();
        // A flush of an earlier pass stores nothing that was written since.
        for one in claimed.iter().filter(there) {
            self.set_flush(one, None);
        }
        for (place, one) in claimed.iter().enumerate().filter(|(_, one)| there(one)) {
            // One path must flush the unit's cache.
            let is_last_chance = requires_flush && Some(place) == last && !cache_was_flushed;
            let below_map = if is_last_chance {
                deadline.half()
            } else {
                below_map_limit(deadline)
            };
            let flush = self.flush(one, deadline, below_map)?;
            let is_done = one.in_map && flush == Flush::Done;
            cache_was_flushed |= is_done && sends_flushes(one) == Some(true);
            self.set_flush(one, Some(flush));
        }
        Ok(())
    }

    fn set_flush(&mut self, one: &ClaimedPath, flush: Option<Flush>) {
        if let Some(entry) = self.entry(&one.path.device) {
            entry.flush = flush;
        }
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

    /// Records whether a path has sent a flush of the unit's cache after all paths had written their
    /// pages, or no path has shown a cache. Marks each path otherwise whose pages may be in the cache
    /// alone. The mark stays when the path is deleted, so the next detach reports the doubt too,
    /// unless it flushes the cache. `all_flushed` is false if a flush has ended the detach: then a
    /// path whose flush was refused may have written its pages after the flush of another one.
    fn record_cache_flush(&mut self, claimed: &[ClaimedPath], all_flushed: bool) {
        let (mut is_shown, mut is_flushed, mut is_refused) = (false, false, false);
        let (mut unflushed, mut unproven) = (Vec::new(), Vec::new());
        for one in claimed {
            let sends_flushes = sends_flushes(one);
            is_shown |= sends_flushes != Some(false);
            let Some(entry) = self.entry(&one.path.device) else {
                continue;
            };
            let has_flushed = entry.flush == Some(Flush::Done) && sends_flushes == Some(true);
            is_flushed |= has_flushed;
            is_refused |= matches!(entry.flush, Some(Flush::PagesWritten(_)));
            if entry.may_be_unflushed() {
                unflushed.extend(&one.path.disk);
            }
            if !has_flushed {
                unproven.extend(&one.path.disk);
            }
        }
        let is_flushed = is_flushed && (all_flushed || !is_refused);
        if is_flushed {
            let roots = self.engine.roots();
            clear_cache_marks(roots, &self.unit);
            // The names of a path may be no proof of the unit.
            let marks = unproven
                .iter()
                .flat_map(|disk| FailedFlush::of(roots, disk));
            marks.for_each(|mark| mark.clear_cache_unflushed());
        }
        self.unit_cache = match self.unit_cache {
            _ if is_flushed => UnitCache::Flushed,
            UnitCache::NotShown if is_shown => UnitCache::Unflushed,
            UnitCache::Flushed if !unflushed.is_empty() => UnitCache::Unflushed,
            known => known,
        };
        self.receipt.cache_was_flushed = self.unit_cache != UnitCache::Unflushed;
        let is_abandoned = self.request.flush_policy == FlushPolicy::Abandon;
        if self.receipt.cache_was_flushed || is_abandoned {
            return;
        }
        for disk in unflushed {
            match FailedFlush::of(self.engine.roots(), disk) {
                Ok(mark) => mark.set_cache_unflushed(),
                Err(error) => tracing::debug!(%error, "cannot mark the path as unflushed"),
            }
        }
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
            if !was_flushed || sends_flushes(one) != Some(true) {
                continue;
            }
            self.set_flush(one, None);
            let flush = self.flush(one, deadline, below_map_limit(deadline))?;
            let done = flush == Flush::Done;
            self.set_flush(one, Some(flush));
            if done {
                return Ok(());
            }
        }
        let message = format!(
            "{hctl} does not flush the unit's cache, and no other path flushed it ({why}); the \
             kernel wrote all pages, and this call deleted no path: make a path active on the \
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

/// Whether the kernel [sends flushes](sends_cache_flushes) over this path.
fn sends_flushes(one: &ClaimedPath) -> Option<bool> {
    let disk = one.path.disk.as_ref();
    disk.map_or(Some(false), sends_cache_flushes)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::engine::Engine;
    use crate::engine::detach::remove_paths::tests::{path, run};
    use crate::engine::detach::{DetachRequest, DetachTarget};
    use crate::kernel::{Roots, sysfs};
    use crate::scsi::Identity;

    /// Passes over paths whose disks show this cache, with the results of their flushes. Returns
    /// whether the cache counts as flushed at the end, and which paths are marked.
    fn recorded(passes: &[&[(&str, Flush)]]) -> (bool, Vec<bool>) {
        recorded_if(passes, true)
    }

    /// As [`recorded`]. If not `all_flushed`, a flush has ended each pass.
    fn recorded_if(passes: &[&[(&str, Flush)]], all_flushed: bool) -> (bool, Vec<bool>) {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let roots = engine.roots();
        let unit: DetachTarget = "unit:naa.5000c500a1b2c3d4".parse().unwrap();
        let request = DetachRequest::new(unit);
        let mut run = run(&engine, &request);
        run.unit = Identity::of(["naa.5000c500a1b2c3d4".parse().unwrap()]);
        let naa = [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];
        let page_83 = [&[0, 0x83, 0, 12, 1, 3, 0, 8][..], &naa].concat();
        let mut disks = ('b'..).map(|letter| format!("sd{letter}"));
        let mut marks = Vec::new();
        for (host, pass) in (1..).zip(passes) {
            let mut claimed = Vec::new();
            for (lun, (cache, flush)) in pass.iter().enumerate() {
                let path = path(roots, &format!("{host}:0:0:{lun}"), &disks.next().unwrap());
                fs::write(path.device.dir().join("vpd_pg83"), &page_83).unwrap();
                let disk = path.disk.as_ref().unwrap();
                let queue = disk.dir().join("queue");
                fs::create_dir_all(&queue).unwrap();
                symlink(path.device.dir(), disk.dir().join("device")).unwrap();
                fs::write(queue.join("write_cache"), cache).unwrap();
                marks.push(format!("lost-{}-", disk.name()));
                run.add_to_receipt(&path).unwrap();
                let entry = run.entry(&path.device).unwrap();
                entry.flush = Some(flush.clone());
                (entry.in_map, entry.wrote_own_pages) = (true, true);
                claimed.push(ClaimedPath {
                    watch: engine.hub().watch(&path.device.hctl().to_string()),
                    claim: None,
                    path,
                    in_map: true,
                });
            }
            run.record_cache_flush(&claimed, all_flushed);
        }
        let there = sysfs::names(&roots.run.join("lunbd")).unwrap_or_default();
        let is_there = |mark: &String| there.iter().any(|it| it.starts_with(mark));
        let marked = marks.iter().map(is_there).collect();
        (run.receipt.cache_was_flushed, marked)
    }

    const BACK: &str = "write back\n";
    const THROUGH: &str = "write through\n";

    fn failed() -> Flush {
        Flush::ThroughMap("EIO".to_owned())
    }

    fn dead() -> Flush {
        Flush::Unreachable("ENXIO".to_owned())
    }

    #[test]
    fn a_path_is_marked_if_the_unit_has_a_cache_that_no_path_flushed() {
        let of = |one, other| recorded(&[&[one, other]]);
        let both = vec![true, true];
        let none = vec![false, false];
        assert_eq!(
            of((BACK, failed()), (BACK, Flush::Done)),
            (true, none.clone())
        );
        assert_eq!(of((BACK, failed()), (BACK, dead())), (false, both));
        // The kernel sends no flush over the path that succeeded.
        let unsent = of((BACK, failed()), (THROUGH, Flush::Done));
        assert_eq!(unsent, (false, vec![true, false]));
        // No path shows a cache.
        let without = of((THROUGH, dead()), (THROUGH, Flush::Done));
        assert_eq!(without, (true, none));
    }

    #[test]
    fn a_refused_path_is_marked_if_the_detach_ends_before_another_path_has_flushed_again() {
        let refused = || Flush::PagesWritten("standby".to_owned());
        let both = [(BACK, Flush::Done), (BACK, refused())];
        let ended = recorded_if(&[&both], false);
        assert_eq!(ended, (false, vec![false, true]));
        assert_eq!(recorded(&[&both]), (true, vec![false, false]));
    }

    #[test]
    fn only_a_later_flush_of_the_cache_ends_the_doubt_of_an_earlier_pass() {
        let of = |one, other| recorded(&[&[one], &[other]]);
        let first = (BACK, failed());
        let flushed = of(first.clone(), (BACK, Flush::Done));
        assert_eq!(flushed, (true, vec![false, false]));
        let unsent = (false, vec![true, false]);
        assert_eq!(of(first.clone(), (THROUGH, Flush::Done)), unsent);
        let dead = of(first.clone(), (THROUGH, dead()));
        assert_eq!(dead, (false, vec![true, true]));
        // A flush of the first pass stores nothing that a path wrote later.
        let later = recorded(&[&[first.clone(), (BACK, Flush::Done)], &[first]]);
        assert_eq!(later, (false, vec![false, false, true]));
    }
}
