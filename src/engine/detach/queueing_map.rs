//! A multipath map without a path. If it queues I/O, writes to it, and its flush, wait until a
//! path comes or until the map is told to fail its I/O.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::map_users::refuse_users_of_map;
use crate::engine::detach::receipt::MapReceipt;
use crate::engine::usage::claim::{Claim, FlushPolicy, claim_disk};
use crate::engine::usage::failed_flush::FailedFlush;
use crate::error::{Error, ErrorKind, Holder, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::worker;
use crate::multipath::{self, Daemon, Map};
use crate::uevent::Watch;

/// The interval between two reads of a map's status while I/O waits for a path.
pub(super) const MAP_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The wait of a detach for a path of the map.
pub(super) struct PathWait<'a> {
    pub(super) engine: &'a Engine,
    pub(super) map: &'a Map,
    pub(super) daemon: Option<&'a Daemon>,
    pub(super) policy: FlushPolicy,
    pub(super) deadline: Deadline,
}

impl PathWait<'_> {
    /// Waits until the map has a path or fails its I/O. A flush that began before that would
    /// stay in the kernel until a path comes, and this process could not end. Returns whether it
    /// has waited: then another unit may answer at the path.
    ///
    /// # Errors
    /// `TimedOut` at stage `flush`, and the map keeps what it queued; `TimedOut` at stage `map` if
    /// the kernel does not show the state of the map in time; those of
    /// [`tell_to_fail_if_abandoned`](Self::tell_to_fail_if_abandoned).
    pub(super) fn wait_for_path(
        &self,
        watch: &mut Watch,
        receipt: &mut MapReceipt,
        call: &mut CallContext,
    ) -> Result<bool> {
        if !self.queues_without_path()? {
            return Ok(false);
        }
        self.record_as_unflushed();
        call.enter(Stage::Flush);
        loop {
            self.tell_to_fail_if_abandoned(watch, receipt)?;
            // The kernel reports each path that comes back (`dm_path_uevent`).
            watch.next(self.deadline.at_most(MAP_CHECK_INTERVAL));
            if self.deadline.has_passed() {
                return Err(self.timed_out());
            }
            match self.queues_without_path() {
                Ok(true) => {}
                Ok(false) => return Ok(true),
                // The last look began shortly before the deadline.
                Err(error) => {
                    tracing::debug!(%error, "the last look at the map");
                    return Err(self.timed_out());
                }
            }
        }
    }

    /// Tells the map to fail its I/O if the caller abandons unwritten data, half of the time has
    /// passed and the map has no path.
    ///
    /// # Errors
    /// `InUse`, which names the users of the map and of its partitions: their writes would fail
    /// too. `TimedOut`, and those of [`refuse_users_of_map`] and [`claim_disk`].
    pub(super) fn tell_to_fail_if_abandoned(
        &self,
        watch: &mut Watch,
        receipt: &mut MapReceipt,
    ) -> Result<()> {
        let (engine, map, deadline) = (self.engine, self.map, self.deadline);
        let is_time = deadline.elapsed() >= deadline.remaining();
        if self.policy == FlushPolicy::Require || !is_time || !self.queues_without_path()? {
            return Ok(());
        }
        let claims = self.claim(watch)?;
        let told = refuse_users_of_map(engine, map, &[], FlushPolicy::Abandon, deadline)
            .and_then(|_| self.fail_queued_io());
        receipt.told_to_fail |= matches!(told, Ok(true));
        // The last close of a device writes its pages back, and waits while the map queues.
        worker::run(
            Stage::Claim,
            &format!("the claim of {map} to end"),
            deadline,
            || map.describe(),
            move || {
                drop(claims);
                Ok(())
            },
        )?;
        told.map(|_| ())
    }

    /// Claims the maps of the map's partitions, which hold the map, or else the map itself. Only
    /// a claim finds a file system that `umount --lazy` has taken off every list of mounts.
    fn claim(&self, watch: &mut Watch) -> Result<Vec<Claim>> {
        let parts = self.map.partition_maps()?;
        let mut disks: Vec<&BlockDevice> = parts.iter().map(Map::disk).collect();
        if disks.is_empty() {
            disks.push(self.map.disk());
        }
        let mut claims = Vec::new();
        for disk in disks {
            let policy = FlushPolicy::Require;
            match claim_disk(self.engine, disk, policy, watch, self.deadline) {
                Ok(claim) => claims.push(claim),
                // A flush of this process has the claim, beside processes that probe the map.
                Err(error)
                    if error.holders().iter().any(Holder::is_own_flush)
                        && FailedFlush::is_under_way(self.engine.roots(), disk)? => {}
                Err(error) => return Err(error),
            }
        }
        Ok(claims)
    }

    /// Requires that the map has a path, also a failed one.
    ///
    /// # Errors
    /// `NotReady` at stage `flush`: a write would fail and its pages would be lost; `Vanished` if
    /// the map goes away; `TimedOut` and `Cancelled`.
    pub(super) fn require_path(&self) -> Result<()> {
        if self.has_path()? {
            return Ok(());
        }
        self.record_as_unflushed();
        let message = format!(
            "the map {} has no path to its unit, and stays as it is. Bring a path back, or \
             abandon unwritten data",
            self.map.name()
        );
        Err(Error::new(ErrorKind::NotReady, message).at(Stage::Flush))
    }

    /// Requires that the map still has a path after a flush that has succeeded, and records a
    /// failed flush otherwise. From Linux 5.11 to 6.10 a map without a path has no cache, so its
    /// flush succeeds and reaches no unit (`drivers/md/dm-table.c`,
    /// `dm_table_set_restrictions`).
    ///
    /// # Errors
    /// `Io` at stage `flush`; `Vanished`, `TimedOut` and `Cancelled`.
    pub(super) fn require_path_after_flush(&self) -> Result<()> {
        let has_path = self.has_path();
        if has_path.inspect_err(|_| self.record_as_unflushed())? {
            return Ok(());
        }
        let message = format!(
            "the map {} lost its last path before its flush ended; nothing below it was deleted",
            self.map.name()
        );
        let error = Error::new(ErrorKind::Io, message).at(Stage::Flush);
        self.mark_of(self.map)?.set(&error);
        Err(error)
    }

    /// Whether the active table of the map has a path. If the kernel does not show that table,
    /// the answer comes from sysfs, which also lists the paths of an inactive table.
    /// A map that goes away also loses its paths in sysfs, so its loss is an error.
    fn has_path(&self) -> Result<bool> {
        match self.map.status(self.engine.roots(), self.deadline) {
            Ok(status) => Ok(!status.paths.is_empty()),
            Err(error)
                if error.kind().is_timeout_or_cancel() || error.kind() == ErrorKind::Vanished =>
            {
                Err(error)
            }
            Err(_) => {
                let paths = self.map.paths()?;
                self.map.require()?;
                Ok(!paths.is_empty())
            }
        }
    }

    /// Another process may remove the map and the maps of its partitions, and their pages would
    /// go with them.
    fn record_as_unflushed(&self) {
        let parts = self.map.partition_maps().unwrap_or_default();
        for map in parts.iter().chain([self.map]) {
            match self.mark_of(map) {
                Ok(mark) => mark.set_unflushed(),
                Err(error) => tracing::debug!(%error, "cannot mark the map as unflushed"),
            }
        }
    }

    /// The mark of this instance of the map, and not of a later map with the same number.
    fn mark_of(&self, map: &Map) -> Result<FailedFlush> {
        let mark = FailedFlush::of(self.engine.roots(), map.disk())?;
        map.require()?;
        Ok(mark)
    }

    /// A map whose state the kernel does not show, such as one with another table, counts as
    /// one that does not queue.
    fn queues_without_path(&self) -> Result<bool> {
        match self.map.status(self.engine.roots(), self.deadline) {
            Ok(status) => Ok(status.queues && status.active() == 0),
            Err(error) if error.kind().is_timeout_or_cancel() => Err(error),
            Err(error) => {
                tracing::debug!(%error, map = self.map.name(), "the map has no state");
                Ok(false)
            }
        }
    }

    /// Makes I/O that finds no path fail, now and, where multipathd answers, permanently.
    /// Returns whether the kernel was told: it accepts no message while the map is
    /// suspended.
    fn fail_queued_io(&self) -> Result<bool> {
        let (map, roots) = (self.map, self.engine.roots());
        tracing::warn!(
            map = map.name(),
            "it queues with no path left: telling it to fail I/O"
        );
        // The kernel first: a process may open the map while a multipathd that hangs is asked.
        let told = match multipath::fail_if_no_path(roots, map, self.deadline) {
            // The map is suspended, or another process made it queue again: the caller
            // retries.
            Err(error) if error.kind() == ErrorKind::NotReady => {
                tracing::debug!(%error, "the map is not set to fail I/O yet");
                false
            }
            done => done.map(|()| true)?,
        };
        // A daemon that hangs, or has no such map at the moment, gets half of the time.
        let limit = self.deadline.half();
        if let Some(daemon) = self.daemon
            && let Err(error) = daemon.disable_queueing(map.name(), limit)
        {
            tracing::debug!(%error, "multipathd does not disable queueing");
        }
        Ok(told)
    }

    fn timed_out(&self) -> Error {
        let otherwise = match self.policy {
            FlushPolicy::Require => ", or abandon unwritten data",
            FlushPolicy::Abandon => "",
        };
        let what = format!(
            "a path of the map {}, which queues its I/O and has none: bring a path back and \
             detach again{otherwise}",
            self.map.name()
        );
        let error = Error::timed_out(Stage::Flush, self.deadline, &what);
        error.with_last_seen(self.map.describe())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::engine::detach::map_users::tests::map_below;
    use crate::kernel::Roots;

    #[test]
    fn a_map_that_goes_away_is_no_map_without_a_path() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let roots = engine.roots();
        let map = map_below(roots);
        let (map_dir, disk_dir) = (map.disk().dir(), roots.sysfs.join("block/sda"));
        for dir in [&map_dir.join("slaves"), &disk_dir] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(disk_dir.join("dev"), "8:0\n").unwrap();
        let path_wait = PathWait {
            engine: &engine,
            map: &map,
            daemon: None,
            policy: FlushPolicy::Require,
            deadline: Deadline::after(Duration::from_secs(30)),
        };
        // There is no device-mapper here, so sysfs answers.
        let without_path = path_wait.require_path().unwrap_err();
        assert_eq!(without_path.kind(), ErrorKind::NotReady, "{without_path}");
        symlink(&disk_dir, map_dir.join("slaves/sda")).unwrap();
        path_wait.require_path().unwrap();
        fs::remove_dir_all(map_dir).unwrap();
        let gone = path_wait.require_path().unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::Vanished, "{gone}");
        assert_ne!(gone.stage(), Some(Stage::Flush));
    }
}
