//! One pass of a SCSI detach: removes everything that is there of the unit now.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::map_users::refuse_users_of_map;
use crate::engine::detach::other_unit::{
    flush_if_replaced_below, refuse_map_of_another, refuse_maps_of_others,
};
use crate::engine::detach::receipt::{Flush, MapReceipt};
use crate::engine::detach::remove_device::{delete_disk, delete_diskless};
use crate::engine::detach::remove_map::{remove_map, settle_removal};
use crate::engine::detach::run::{ClaimedPath, DetachRun};
use crate::engine::unit::paths::UnitPaths;
use crate::engine::unit::{KnownPath, PathIdentity};
use crate::engine::usage::claim::{Claim, FlushPolicy, claim_disk, claim_replaced};
use crate::engine::usage::failed_flush::{self, FailedFlush};
use crate::engine::usage::{Extent, NotLookedAt, UsageSnapshot, refuse_users_of_diskless};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::pool;
use crate::multipath::Map;
use crate::uevent::RemovedDevice;

impl DetachRun<'_> {
    /// Removes the map and the paths that are there now; returns `false` where there are
    /// none. Nothing is deleted before everything is claimed and flushed.
    pub(super) fn remove_present(&mut self, call: &mut CallContext) -> Result<bool> {
        let (deadline, engine) = (call.deadline, self.engine);
        call.enter(Stage::Resolve);
        let known = std::mem::take(&mut self.first_paths);
        let UnitPaths {
            mut paths,
            unproven_paths,
        } = UnitPaths::find(engine, &self.unit, &self.named_devices, known, deadline)?;
        self.unproven_paths = unproven_paths;
        self.timed_out |= paths.iter().any(|path| path.timed_out);
        let map = self.map_of(&paths)?;
        let below = map.as_ref().map_or(Ok(Vec::new()), Map::paths);
        let below = below.map_err(|error| error.at(Stage::Resolve))?;
        self.decide_on_unmapped(&mut paths, &below);
        self.keep_as_replaced(&mut paths);
        refuse_maps_of_others(&paths)?;
        if paths.is_empty() && map.is_none() {
            self.receipt.mark_all_gone();
            return Ok(false);
        }
        for path in &paths {
            self.add_to_receipt(path)?;
        }
        call.enter(Stage::Claim);
        self.refuse_users_of_diskless(&paths, deadline)?;
        if let Some(map) = map {
            refuse_map_of_another(&map, &paths, &below)?;
            self.refuse_other_units_below(&map, &paths, &below, deadline)?;
            self.refuse_failed_flush_below(&paths, &below)?;
            let replaced = flush_if_replaced_below(&paths, &below);
            call.enter(Stage::Claim);
            let removed = self.check_and_remove_map(&map, replaced, (&paths, &below), call)?;
            let Some(removed) = removed else {
                return Ok(true);
            };
            // Another process may see a failed write before udev has handled the removal.
            call.enter(Stage::Flush);
            let written = self.write_back_open_paths(deadline);
            settle_removal(engine, &mut self.maps, &removed, deadline)?;
            written?;
            self.mark_in_map(&paths, &below);
        } else {
            // Another process removed the map after this call could not.
            self.write_back_open_paths(deadline)?;
        }
        call.enter(Stage::Claim);
        let snapshot = self.refuse_writers(&paths, deadline)?;
        let mut claimed = Vec::new();
        for path in paths {
            let watch = engine.hub().watch(&path.device.hctl().to_string());
            let in_map = self.entry(&path.device).is_some_and(|entry| entry.in_map);
            claimed.push(ClaimedPath {
                path,
                watch,
                claim: None,
                in_map,
            });
        }
        for one in &mut claimed {
            one.claim = self.claim(one, deadline)?;
        }
        // A refused claim leaves multipathd as it was. Under the claims multipathd cannot
        // make a map of these paths.
        for one in &claimed {
            self.drop_from_multipathd(&one.path, deadline);
        }
        call.enter(Stage::Flush);
        self.flush_all(&claimed, deadline)?;
        snapshot.recheck_if_old(engine, deadline)?;
        call.enter(Stage::Delete);
        self.delete_all(claimed, deadline)?;
        Ok(true)
    }

    /// Looks for users of the paths before multipathd is told to drop them. A path at
    /// which another unit answers is checked by its claim instead.
    ///
    /// # Errors
    /// `InUse`, which names the users.
    fn refuse_writers(&mut self, paths: &[KnownPath], deadline: Deadline) -> Result<UsageSnapshot> {
        let is_ours =
            |path: &&KnownPath| !matches!(path.identity_now, PathIdentity::Replaced { .. });
        let disks = paths.iter().filter(is_ours);
        let disks: Vec<&BlockDevice> = disks.filter_map(|path| path.disk.as_ref()).collect();
        // Where multipathd is not told, the claims name all other users.
        let extent = match &self.daemon {
            Some(_) => Extent::All,
            None => Extent::NotExcludedByClaim,
        };
        let snapshot = UsageSnapshot::take(self.engine, &disks, extent, deadline)?;
        NotLookedAt::merge(&mut self.receipt.not_looked_at, &snapshot.not_looked_at());
        snapshot.refuse_writers(self.engine)?;
        Ok(snapshot)
    }

    /// Looks at the users of the paths that have no disk, and so no claim, before anything
    /// is changed.
    ///
    /// # Errors
    /// `InUse`, which names the users.
    fn refuse_users_of_diskless(&mut self, paths: &[KnownPath], deadline: Deadline) -> Result<()> {
        let stays = |path: &&KnownPath| path.disk.is_none() && !path.is_being_removed;
        for path in paths.iter().filter(stays) {
            let unseen = refuse_users_of_diskless(self.engine, &path.device, deadline)?;
            NotLookedAt::merge(&mut self.receipt.not_looked_at, &unseen);
        }
        Ok(())
    }

    /// The map over these paths, else the map that the caller named, else a map that has
    /// the unit's name and lost all its paths.
    pub(super) fn map_of(&self, paths: &[KnownPath]) -> Result<Option<Map>> {
        let roots = self.engine.roots();
        for disk in paths.iter().filter_map(|path| path.disk.as_ref()) {
            if let Some(map) = Map::of_path(disk)? {
                return Ok(Some(map));
            }
        }
        if let Some(map) = self.map.clone().filter(Map::is_there) {
            return Ok(Some(map));
        }
        Map::of_unit(roots, |name| name.is_unique() && self.unit.is(name))
    }

    fn check_and_remove_map(
        &mut self,
        map: &Map,
        replaced: Option<Flush>,
        (paths, below): (&[KnownPath], &[BlockDevice]),
        call: &mut CallContext,
    ) -> Result<Option<RemovedDevice>> {
        let was_told_to_fail = self
            .receipt
            .map
            .as_ref()
            .is_some_and(|map| map.told_to_fail);
        let mut receipt = MapReceipt {
            name: map.name().to_owned(),
            uuid: map.uuid().to_owned(),
            node: map.disk().node(self.engine.roots()),
            told_to_fail: was_told_to_fail,
            flush: None,
            gone: false,
        };
        for flushed in map.partition_maps()?.iter().chain([map]) {
            let roots = self.engine.roots();
            self.map_may_have_flush |= FailedFlush::is_under_way(roots, flushed.disk())?;
        }
        let policy = self.request.flush_policy;
        let checked = refuse_users_of_map(self.engine, map, below, policy, call.deadline);
        let done = checked.and_then(|not_looked_at| {
            NotLookedAt::merge(&mut self.receipt.not_looked_at, &not_looked_at);
            self.open_paths_below(paths, below, call.deadline)?;
            remove_map(
                self.engine,
                map,
                (self.daemon.as_ref(), self.request, replaced),
                &mut self.maps,
                &mut receipt,
                call,
            )
        });
        if receipt.told_to_fail && !was_told_to_fail {
            let note = format!(
                "the map {} queued with no path left and was told to fail its I/O",
                receipt.name
            );
            self.receipt.notes.push(note);
        }
        // The flush of a re-created map does not cover data that was lost with the
        // earlier one.
        let before = self.receipt.map.as_mut().and_then(|map| map.flush.take());
        if let Some(failed) = before.filter(|flush| *flush != Flush::Done) {
            receipt.flush = Some(failed);
        }
        self.receipt.map = Some(receipt);
        done
    }

    /// Refuses where a path has a failed flush, which the flush of its map does not
    /// repair. The check comes before the map is removed, while everything is still in
    /// place.
    fn refuse_failed_flush_below(&self, paths: &[KnownPath], below: &[BlockDevice]) -> Result<()> {
        if self.request.flush_policy == FlushPolicy::Abandon {
            return Ok(());
        }
        let disks = paths.iter().filter_map(|path| path.disk.as_ref());
        for disk in disks.filter(|disk| below.contains(disk)) {
            if let Some(earlier) = FailedFlush::read_of(self.engine.roots(), disk)? {
                return Err(failed_flush::lost_data_error(disk, &earlier));
            }
        }
        Ok(())
    }

    /// Records in the receipt which of the paths were `below` the removed map, if its
    /// flush was done and that have no pages of their own. A path beside the map may hold data
    /// that the map never had.
    fn mark_in_map(&mut self, paths: &[KnownPath], below: &[BlockDevice]) {
        let map = self.receipt.map.as_ref();
        if !map.is_some_and(|map| map.flush == Some(Flush::Done) && map.gone) {
            return;
        }
        for path in paths {
            let is_below = path.disk.as_ref().is_some_and(|disk| below.contains(disk))
                && !self.unwritten_paths.contains(&path.device);
            if let Some(entry) = self.entry(&path.device).filter(|_| is_below) {
                entry.in_map = true;
            }
        }
    }

    fn claim(&self, one: &mut ClaimedPath, deadline: Deadline) -> Result<Option<Claim>> {
        let Some(disk) = &one.path.disk else {
            return Ok(None);
        };
        let policy = self.request.flush_policy;
        let watch = &mut one.watch;
        match &one.path.identity_now {
            PathIdentity::Replaced { .. } => claim_replaced(self.engine, disk, watch, deadline),
            _ => claim_disk(self.engine, disk, policy, watch, deadline),
        }
        .map(Some)
    }

    /// Deletes all devices at once, each on a thread of its own, so that a slow host does
    /// not hold up the others.
    fn delete_all(&mut self, claimed: Vec<ClaimedPath>, deadline: Deadline) -> Result<()> {
        let engine = self.engine;
        let devices: Vec<_> = claimed.iter().map(|one| one.path.device.clone()).collect();
        let ended = pool::each(Stage::Delete, claimed, |one| delete(engine, one, deadline));
        let mut first = Ok(());
        for (device, ended) in devices.into_iter().zip(ended) {
            let result = ended.and_then(|result| result);
            if let Some(entry) = self.entry(&device) {
                entry.gone = !device.is_there();
                // Its disk has appeared, and data written to it is not flushed.
                let has_appeared = |error: &Error| error.kind() == ErrorKind::Vanished;
                if entry.flush == Some(Flush::NoDisk) && result.as_ref().is_err_and(has_appeared) {
                    entry.flush = None;
                }
            }
            if first.is_ok() {
                first = result.map_err(|error| error.at(Stage::Delete));
            }
        }
        first
    }

    /// Tells multipathd to drop the path, or it would take it into a map again. A daemon
    /// that hangs gets half of the time.
    fn drop_from_multipathd(&self, path: &KnownPath, deadline: Deadline) {
        let limit = deadline.half();
        if let (Some(daemon), Some(disk)) = (&self.daemon, &path.disk)
            && let Err(error) = daemon.delete_path(disk.name(), limit)
        {
            // The path's own removal tells multipathd too, and the detach asks it at the
            // end.
            tracing::debug!(%error, disk = disk.name(), "multipathd does not drop the path");
        }
    }
}

#[tracing::instrument(name = "path", skip_all, fields(hctl = %one.path.device.hctl(), disk))]
fn delete(engine: &Engine, mut one: ClaimedPath, deadline: Deadline) -> Result<()> {
    if let Some(disk) = &one.path.disk {
        tracing::Span::current().record("disk", disk.name());
    }
    let device = &one.path.device;
    match (&one.path.disk, one.claim.take()) {
        (Some(disk), Some(claim)) => {
            delete_disk(engine, device, disk, claim, &mut one.watch, deadline)
        }
        _ => delete_diskless(engine, device, &mut one.watch, deadline),
    }
}

#[cfg(test)]
pub(in crate::engine) mod tests;
