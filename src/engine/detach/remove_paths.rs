//! One pass of a SCSI detach: removes everything that is there of the unit now.

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::detach::foreign_unit::{
    refuse_map_of_another, refuse_maps_of_others, replaced_below,
};
use crate::engine::detach::receipt::{Flush, MapReceipt, PathReceipt};
use crate::engine::detach::run::{ClaimedPath, DetachRun};
use crate::engine::first_names;
use crate::engine::timing::StageTimer;
use crate::engine::unit::{KnownPath, PathIdentity};
use crate::engine::usage::claim::{Claim, FlushPolicy};
use crate::engine::usage::failed_flush::{self, FailedFlush};
use crate::engine::usage::{Extent, NotLookedAt, Removal, Usage, UsageSnapshot};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::pool;
use crate::multipath::{Daemon, Map};
use crate::scsi::ScsiDevice;

/// How long to wait for devices that other processes are removing and whose unit is
/// unknown. A host that hangs must not hold up the others.
const REMOVALS_LIMIT: Duration = Duration::from_secs(2);

impl DetachRun<'_> {
    /// Removes the map and the paths that are there now; returns `false` where there are
    /// none. Nothing is deleted before everything is claimed and flushed.
    pub(super) fn remove_present(
        &mut self,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<bool> {
        let engine = self.engine;
        timer.enter(Stage::Resolve);
        let first_paths = std::mem::take(&mut self.first_paths);
        let mut paths = engine.paths_of(&self.unit, &self.named_devices, first_paths, deadline)?;
        self.timed_out |= paths.iter().any(|path| path.timed_out);
        self.keep_as_replaced(&mut paths);
        refuse_maps_of_others(&paths)?;
        let map = self.map_of(&paths)?;
        if paths.is_empty() && map.is_none() {
            self.receipt.nothing_is_there();
            return Ok(false);
        }
        for path in &paths {
            self.add_to_receipt(path)?;
        }
        timer.enter(Stage::Claim);
        self.refuse_users_of_diskless(&paths, deadline)?;
        if let Some(map) = map {
            let below = map.paths().map_err(|error| error.at(Stage::Resolve))?;
            refuse_map_of_another(&map, &paths, &below)?;
            self.refuse_other_units_below(&map, &paths, &below, deadline)?;
            self.refuse_failed_flush_below(&paths, &below)?;
            let replaced = replaced_below(&paths, &below);
            timer.enter(Stage::Claim);
            self.check_and_remove_map(&map, (replaced, &below), timer, deadline)?;
            self.mark_in_map(&paths, &below);
        }
        timer.enter(Stage::Claim);
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
        timer.enter(Stage::Flush);
        self.flush_all(&claimed, deadline)?;
        snapshot.recheck_if_old(engine, deadline)?;
        timer.enter(Stage::Delete);
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
            None => Extent::BesideClaim,
        };
        let snapshot = UsageSnapshot::take(self.engine, &disks, extent, deadline)?;
        NotLookedAt::note(&mut self.receipt.not_looked_at, &snapshot.not_looked_at());
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
            let unseen = self
                .engine
                .refuse_users_of_diskless(&path.device, deadline)?;
            NotLookedAt::note(&mut self.receipt.not_looked_at, &unseen);
        }
        Ok(())
    }

    /// The map over these paths, else the map that the caller named, else a map that has
    /// the unit's name and lost all its paths.
    fn map_of(&self, paths: &[KnownPath]) -> Result<Option<Map>> {
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
        (replaced, below): (Option<Flush>, &[BlockDevice]),
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<()> {
        let mut receipt = MapReceipt {
            name: map.name().to_owned(),
            uuid: map.uuid().to_owned(),
            node: map.disk().node(self.engine.roots()),
            told_to_fail: false,
            flush: None,
            gone: false,
        };
        let policy = self.request.flush_policy;
        let checked = self
            .engine
            .refuse_users_of_map(map, below, policy, deadline);
        let done = checked.and_then(|not_looked_at| {
            NotLookedAt::note(&mut self.receipt.not_looked_at, &not_looked_at);
            self.engine.remove_map(
                map,
                (self.daemon.as_ref(), self.request, replaced),
                &mut self.maps,
                &mut receipt,
                timer,
                deadline,
            )
        });
        if receipt.told_to_fail {
            let note = format!(
                "the map {} queued with no path left and was told to fail its I/O",
                receipt.name
            );
            self.receipt.notes.push(note);
        }
        // The flush of a re-created map does not cover data that was lost with the
        // earlier one.
        let before = self.receipt.map.as_mut().and_then(|map| map.flush.take());
        if let Some(lost) = before.filter(|flush| *flush != Flush::Done) {
            receipt.flush = Some(lost);
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
                return Err(failed_flush::refuse(disk, &earlier));
            }
        }
        Ok(())
    }

    /// Records in the receipt which of the paths were `below` the removed map, if its
    /// flush was done. A path beside the map may hold data that the map never had.
    fn mark_in_map(&mut self, paths: &[KnownPath], below: &[BlockDevice]) {
        let map = self.receipt.map.as_ref();
        if !map.is_some_and(|map| map.flush == Some(Flush::Done) && map.gone) {
            return;
        }
        for path in paths {
            let is_below = path.disk.as_ref().is_some_and(|disk| below.contains(disk));
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
            PathIdentity::Replaced { .. } => self.engine.claim_replaced(disk, watch, deadline),
            _ => self.engine.claim(disk, policy, watch, deadline),
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
                let has_come = |error: &Error| error.kind() == ErrorKind::Vanished;
                if entry.flush == Some(Flush::NoDisk) && result.as_ref().is_err_and(has_come) {
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

    /// Whether a failure may be transient. A failed flush is not: a second one would
    /// succeed and prove nothing.
    pub(super) fn is_transient(&mut self, error: &Error, deadline: Deadline) -> bool {
        match (error.stage(), error.kind()) {
            (Some(Stage::Flush), _) => false,
            (_, ErrorKind::Vanished) => true,
            (Some(Stage::Claim), ErrorKind::Quarantined) => self.timed_out,
            (Some(Stage::Claim | Stage::RemoveMap), ErrorKind::InUse) => {
                match self.only_transient_users(deadline) {
                    Some(passes) => {
                        self.holder_vanished = false;
                        passes
                    }
                    // The holder has released the device since, or cannot be seen at all.
                    None => !std::mem::replace(&mut self.holder_vanished, true),
                }
            }
            _ => false,
        }
    }

    /// Whether the unit's disks are held only by its map, even one that is being removed,
    /// or by a process that probes disks; `None` where no holder is visible.
    fn only_transient_users(&self, deadline: Deadline) -> Option<bool> {
        let roots = self.engine.roots();
        let look = || {
            let at_once = Deadline::after(Duration::ZERO);
            let paths =
                self.engine
                    .paths_of(&self.unit, &self.named_devices, Vec::new(), at_once)?;
            let map = self.map_of(&paths)?;
            if let Some(map) = &map {
                let below = map.paths()?;
                let policy = FlushPolicy::Require;
                let checked = self
                    .engine
                    .refuse_users_of_map(map, &below, policy, deadline);
                return Ok(Some(checked.is_ok()));
            }
            let disks = paths.iter().filter_map(|path| path.disk.as_ref());
            let disks: Vec<&BlockDevice> = disks.collect();
            let all = self.engine.users_of_each(&disks, Extent::All, deadline)?;
            let removal = Removal::Map {
                beside_own_flush: false,
            };
            let mut one_goes = false;
            for users in all {
                if let Usage::Busy(_) = users.judge(roots, removal) {
                    return Ok(Some(false));
                }
                one_goes |= users.has_stacked();
            }
            Ok::<_, Error>(one_goes.then_some(true))
        };
        look().unwrap_or(Some(false))
    }

    /// Waits until multipathd itself reports that it knows none of the paths.
    pub(super) fn wait_until_forgotten(
        &mut self,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<()> {
        let Some(daemon) = &self.daemon else {
            return Ok(());
        };
        timer.enter(Stage::Forget);
        for path in &mut self.receipt.paths {
            let Some(name) = path.node.as_ref().and_then(|node| node.file_name()) else {
                continue;
            };
            let name = name.to_string_lossy().into_owned();
            let mut pauses = Backoff::new(Duration::from_millis(2), Duration::from_millis(200));
            path.forgotten = Some(false);
            // A new disk of the same name is not this path.
            let successor = self.engine.roots().sysfs.join("block").join(&name);
            let is_known = || match daemon.knows_path(&name, deadline) {
                // multipathd has ended, and so knows no path, or is being restarted.
                Err(error) if error.kind() == ErrorKind::Unreachable => {
                    Ok(Daemon::find(self.engine.roots())?.is_some())
                }
                known => known,
            };
            while !successor.exists() && is_known()? {
                if deadline.has_passed() {
                    let what = format!("multipathd to forget {name} ({})", path.hctl);
                    let error = Error::timed_out(Stage::Forget, deadline, &what);
                    return Err(error.with_last_seen("the path is gone from the kernel"));
                }
                self.maps.next(deadline.at_most(pauses.pause()));
            }
            path.forgotten = Some(true);
        }
        Ok(())
    }

    /// Waits briefly for devices that another process is removing: each may be a path of
    /// the unit whose last write is still to come. Returns a doubt for each that is not
    /// gone.
    pub(super) fn wait_for_removals(&mut self, deadline: Deadline) -> Result<Vec<String>> {
        let limit = deadline.at_most(REMOVALS_LIMIT);
        let mut pauses = Backoff::for_kernel_state();
        let (roots, scheduler) = (self.engine.roots(), &self.engine.scheduler);
        let mut being_removed = self.engine.units.lock().being_removed(roots)?;
        if being_removed.is_empty() {
            being_removed = ScsiDevice::being_removed(roots)?;
        }
        loop {
            being_removed.retain(|device| {
                // A device that this process works on belongs to another unit, since this
                // unit is locked by this call.
                let anothers = scheduler.is_at_work_on(device.hctl());
                device.is_there() && !device.is_on_bus(roots) && !anothers
            });
            if being_removed.is_empty() || limit.has_passed() {
                break;
            }
            self.maps.next(limit.at_most(pauses.pause()));
        }
        let doubt = |device: &ScsiDevice| {
            let hctl = device.hctl();
            format!("{hctl}, which may be a path of it, is still being removed")
        };
        Ok(being_removed.iter().map(doubt).collect())
    }

    /// Adds the path to the receipt once, and its disk as soon as that has appeared.
    pub(super) fn add_to_receipt(&mut self, path: &KnownPath) -> Result<()> {
        let roots = self.engine.roots();
        if !self.devices.contains(&path.device) {
            self.devices.push(path.device.clone());
            self.receipt.paths.push(PathReceipt {
                hctl: path.device.hctl(),
                node: None,
                devno: None,
                diskseq: None,
                flush: None,
                gone: false,
                forgotten: None,
                in_map: false,
            });
        }
        if let Some(disk) = &path.disk
            && let Some(entry) = self.entry(&path.device)
        {
            entry.node = Some(disk.node(roots));
            entry.devno = Some(disk.devno());
            entry.diskseq = disk.diskseq()?;
        }
        Ok(())
    }

    /// The receipt's entry of a device.
    pub(in crate::engine) fn entry(&mut self, device: &ScsiDevice) -> Option<&mut PathReceipt> {
        let at = self.devices.iter().position(|known| known == device)?;
        self.receipt.paths.get_mut(at)
    }

    /// Reads back which of the receipt's paths are gone, no matter which process removed
    /// them.
    pub(in crate::engine) fn read_back(&mut self) {
        for (device, path) in self.devices.iter().zip(&mut self.receipt.paths) {
            path.gone = !device.is_there();
            if path.gone {
                first_names::forget(self.engine.roots(), path.hctl);
            }
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
        (Some(disk), Some(claim)) => engine.delete(device, disk, claim, &mut one.watch, deadline),
        _ => engine.delete_diskless(device, &mut one.watch, deadline),
    }
}

#[cfg(test)]
pub(in crate::engine) mod tests;
