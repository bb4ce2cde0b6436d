//! Taking a multipath map down without losing what was written through it.

use std::time::Duration;

use super::Engine;
use super::claim::{self, Claim};
use super::in_use::Holder;
use super::lost::{self, Lost};
use super::phases::Phases;
use super::receipt::{Flush, MapReceipt};
use super::{detach::DetachRequest, in_use};
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::worker;
use crate::multipath::{self, Daemon, Map};
use crate::uevent::{self, Watch};

/// How often a map whose flush is under way is looked at; each path failure
/// wakes us besides.
const LOOK: Duration = Duration::from_millis(500);

impl Engine {
    /// Claims the map, flushes it, and takes it down with the maps of its
    /// partitions. `receipt` is kept up as it goes.
    ///
    /// Where it is said to be `replaced`, another unit answers below it: nothing may be
    /// written there, so nobody may have it or a partition of it open either.
    ///
    /// # Errors
    /// `InUse`, naming by whom; `Io` where the flush failed: the map stands and
    /// nothing below it may be deleted; `TimedOut`.
    pub(super) fn take_map_down(
        &self,
        map: &Map,
        way: (Option<&Daemon>, &DetachRequest, Option<Flush>),
        watch: &mut Watch,
        receipt: &mut MapReceipt,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<()> {
        let (daemon, request, replaced) = way;
        let parts = (request.abandon, replaced.is_some());
        self.take_partition_maps_down(map, parts, watch, phases, deadline)?;
        phases.enter(Stage::Claim);
        let claim = self.claim(map.disk(), request.abandon, watch, deadline)?;
        let flushed = if let Some(replaced) = replaced {
            Ok(replaced)
        } else {
            phases.enter(Stage::Flush);
            self.write_map_back(map, &claim, daemon, receipt, deadline)
        };
        receipt.flush = Some(match flushed {
            Err(error) if request.abandon => Flush::Abandoned(error.to_string()),
            flushed => flushed?,
        });
        // A map that is open cannot be removed; the kernel says so where somebody
        // opens it from here on.
        drop(claim);
        phases.enter(Stage::RemoveMap);
        let removed = self.remove_map(map, daemon, watch, deadline);
        if request.abandon && matches!(&removed, Err(error) if error.kind() == ErrorKind::InUse) {
            let told = self.free_lookers(map, daemon, deadline);
            // Why it could not be removed says more than why nobody was freed.
            receipt.told_to_fail |= told.unwrap_or_else(|error| {
                tracing::debug!(%error, "who looks at the map is not freed");
                false
            });
        }
        removed?;
        receipt.gone = true;
        Ok(())
    }

    /// Removes the maps of the map's partitions. None goes before it is known that
    /// nobody uses any of them, nor the map itself: what is refused stands whole.
    fn take_partition_maps_down(
        &self,
        map: &Map,
        (abandon, replaced): (bool, bool),
        watch: &mut Watch,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<()> {
        let parts = map.partition_maps()?;
        if parts.is_empty() && !replaced {
            return Ok(());
        }
        phases.enter(Stage::Claim);
        self.refuse_users_beside(map, &parts)?;
        let mut claimed = Vec::new();
        for part in parts {
            let claim = if replaced {
                self.claim(part.disk(), false, watch, deadline)?
            } else {
                let flushed =
                    self.claim_and_flush(part.disk(), abandon, watch, phases, deadline)?;
                flushed.1
            };
            claimed.push((part, claim));
        }
        if claimed.is_empty() {
            return Ok(());
        }
        phases.enter(Stage::RemoveMap);
        for (part, claim) in claimed {
            drop(claim);
            self.remove_map(&part, None, watch, deadline)?;
        }
        Ok(())
    }

    /// A claim of the map would not show them while its partitions hold it, and
    /// those that have it open without a claim would keep it from being removed.
    ///
    /// # Errors
    /// `InUse`, naming by whom.
    pub(super) fn refuse_users_beside(&self, map: &Map, parts: &[Map]) -> Result<()> {
        let is_part = |holder: &Holder| {
            let Holder::Stacked { device } = holder else {
                return false;
            };
            parts.iter().any(|part| part.disk().name() == device)
        };
        for one in std::iter::once(map).chain(parts) {
            let mut users = in_use::find_holders(self.roots(), one.disk())?;
            users.retain(|holder| !is_part(holder) && !in_use::is_going(self.roots(), holder));
            let openers = in_use::find_openers(self.roots(), one.disk())?;
            users.extend(
                openers
                    .into_iter()
                    .filter(|user| !in_use::looks_at_disks(user)),
            );
            if !users.is_empty() {
                return Err(in_use::refuse(one.disk(), &users));
            }
        }
        Ok(())
    }

    /// Flushes under the claim. Where the map queues and no path is left, paths
    /// may come back for half of the time; then it is told to fail its I/O, since
    /// its flush would never end.
    fn write_map_back(
        &self,
        map: &Map,
        claim: &Claim,
        daemon: Option<&Daemon>,
        receipt: &mut MapReceipt,
        deadline: Deadline,
    ) -> Result<Flush> {
        let Claim::Held(file) = claim else {
            return self.write_back(claim, map.disk(), false, deadline);
        };
        let lost = Lost::of(self.roots(), map.disk())?;
        if let Some(earlier) = lost.read()? {
            return Err(lost::refuse(map.disk(), &earlier));
        }
        let (file, node) = (file.clone(), map.disk().node(self.roots()));
        let flush = worker::start(Stage::Flush, move || claim::flush(file, &node, &lost))?;
        let patience = deadline.half();
        loop {
            let turn = LOOK.min(deadline.remaining());
            if let Some(flushed) = flush.wait(Deadline::after(turn)) {
                return flushed.map(|()| Flush::Done).map_err(|error| {
                    let told = receipt.told_to_fail;
                    explain_flush(error, map, told)
                });
            }
            if deadline.has_passed() {
                let what = format!("the map {} to write back", map.name());
                let error = Error::timed_out(Stage::Flush, deadline.elapsed(), &what);
                return Err(error.with_last_seen(map.describe()));
            }
            let status = map.status(self.roots(), deadline)?;
            let stuck = status.queues && status.active() == 0;
            if stuck && patience.has_passed() && !receipt.told_to_fail {
                receipt.told_to_fail = self.tell_to_fail(map, daemon, deadline)?;
            }
        }
    }

    /// Has I/O that finds no path fail, now and, where multipathd answers, for good.
    /// Whether the kernel was told: it takes no word while the map is suspended.
    fn tell_to_fail(&self, map: &Map, daemon: Option<&Daemon>, deadline: Deadline) -> Result<bool> {
        tracing::warn!(
            map = map.name(),
            "it queues with no path left: told to fail"
        );
        // A daemon that hangs, or has no such map just now, has half of the time: the
        // kernel does it without.
        let limit = deadline.half();
        if let Some(daemon) = daemon
            && let Err(error) = daemon.disable_queueing(map.name(), limit)
        {
            tracing::debug!(%error, "multipathd does not turn queueing off");
        }
        match multipath::fail_if_no_path(self.roots(), map, deadline) {
            // Suspended for a moment, or told to queue by another: at the next look.
            Err(error) if error.kind() == ErrorKind::NotReady => {
                tracing::debug!(%error, "not told yet");
                Ok(false)
            }
            told => told.map(|()| true),
        }
    }

    /// Who looks at a map that queues with no path left waits in its read, and has the
    /// map open, until a path comes: multipathd that hung when it was told to fail has
    /// it queue again. Whether it was told, after which they let go. For who gave up
    /// what is unwritten: somebody whom /proc does not show may write there.
    fn free_lookers(&self, map: &Map, daemon: Option<&Daemon>, deadline: Deadline) -> Result<bool> {
        if !self.will_be_let_go(map)? {
            return Ok(false);
        }
        let status = map.status(self.roots(), deadline)?;
        if !status.queues || status.active() > 0 {
            return Ok(false);
        }
        self.tell_to_fail(map, daemon, deadline)
    }

    /// Removes a map whose last path was taken out from below it, which multipathd
    /// leaves where udev looks at it just then: again, for as long as only they have
    /// it open who let go. One that has a path stays.
    ///
    /// # Errors
    /// `InUse`, naming by whom; `TimedOut`.
    pub(super) fn remove_bare_map(
        &self,
        map: &Map,
        daemon: Option<&Daemon>,
        deadline: Deadline,
    ) -> Result<()> {
        let mut watch = self.hub().watch(map.disk().name());
        let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        while map.is_there() {
            match map.paths() {
                Ok(paths) if paths.is_empty() => {}
                Err(error) if map.is_there() => return Err(error),
                _ => return Ok(()),
            }
            match self.remove_map(map, daemon, &mut watch, deadline) {
                Err(error) if error.kind() == ErrorKind::InUse && self.will_be_let_go(map)? => {
                    if deadline.has_passed() {
                        return Err(error);
                    }
                    let pause = pauses.pause().min(deadline.remaining());
                    watch.next(Deadline::after(pause));
                }
                Err(error) if error.kind() == ErrorKind::Vanished && !map.is_there() => {}
                done => return done,
            }
        }
        Ok(())
    }

    fn will_be_let_go(&self, map: &Map) -> Result<bool> {
        let openers = in_use::find_openers(self.roots(), map.disk())?;
        Ok(in_use::find_holders(self.roots(), map.disk())?.is_empty()
            && openers.iter().all(in_use::looks_at_disks))
    }

    /// Removes the map and returns when sysfs shows it no more and udev has
    /// handled that.
    fn remove_map(
        &self,
        map: &Map,
        daemon: Option<&Daemon>,
        watch: &mut Watch,
        deadline: Deadline,
    ) -> Result<()> {
        let (roots, mode) = (self.roots(), self.hub().mode());
        let disk = map.disk();
        let lost = Lost::of(roots, disk)?;
        let leaving = uevent::Leaving::of(roots, disk)?;
        // So that it is not made again when a path's event comes. A daemon that hangs
        // has half of the time: the kernel does it without.
        let limit = deadline.half();
        if let Some(daemon) = daemon
            && let Err(error) = daemon.delete_map(map.name(), limit)
        {
            tracing::debug!(%error, "multipathd does not remove the map");
        }
        if map.is_there() {
            multipath::remove(roots, map, watch, deadline).map_err(|error| match error.kind() {
                ErrorKind::InUse => self.name_holders(map, error),
                _ => error,
            })?;
        }
        lost.clear();
        uevent::settle_removal(watch, mode, roots, &leaving, deadline)
    }

    fn name_holders(&self, map: &Map, error: Error) -> Error {
        let look = || {
            let mut holders = in_use::find_holders(self.roots(), map.disk())?;
            holders.extend(in_use::find_openers(self.roots(), map.disk())?);
            Ok::<_, Error>(holders)
        };
        match look() {
            Ok(holders) => in_use::refuse(map.disk(), &holders).caused_by(error),
            Err(_) => error,
        }
    }
}

fn explain_flush(error: Error, map: &Map, told_to_fail: bool) -> Error {
    let told = if told_to_fail {
        " after it was told to fail, since it queued with no path left"
    } else {
        ""
    };
    let message = format!(
        "the map {} could not be written back{told}; nothing below it was deleted",
        map.name()
    );
    Error::new(error.kind(), message)
        .at(Stage::Flush)
        .caused_by(error)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::detach::DetachTarget;
    use super::super::telemetry::Call;
    use super::*;
    use crate::kernel::Roots;

    #[test]
    fn a_map_below_which_another_unit_answers_is_refused_to_its_users_before_a_claim() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let roots = engine.roots();
        let dir = roots.sysfs.join("block/dm-0");
        fs::create_dir_all(dir.join("dm")).unwrap();
        let uuid = "mpath-35000c500a1b2c3d4";
        for (file, text) in [("dev", "253:0"), ("dm/uuid", uuid), ("dm/name", "m")] {
            fs::write(dir.join(file), format!("{text}\n")).unwrap();
        }
        fs::create_dir_all(roots.proc.join("self")).unwrap();
        let mount = "36 1 253:0 / /mnt rw - ext4 /dev/dm-0 rw\n";
        fs::write(roots.proc.join("self/mountinfo"), mount).unwrap();
        let map = Map::all(roots).unwrap().remove(0);
        let unit: DetachTarget = "unit:naa.5000c500a1b2c3d4".parse().unwrap();
        let request = DetachRequest::new(unit);
        let mut receipt = MapReceipt {
            name: map.name().to_owned(),
            uuid: map.uuid().to_owned(),
            node: map.disk().node(roots),
            told_to_fail: false,
            flush: None,
            gone: false,
        };
        let mut watch = engine.hub().watch("dm-0");
        let mut phases = Phases::new(Call::Detach, None);
        let deadline = Deadline::after(Duration::from_secs(30));
        let replaced = Some(Flush::Replaced("another answers".to_owned()));
        let way = (None, &request, replaced);
        let taken =
            engine.take_map_down(&map, way, &mut watch, &mut receipt, &mut phases, deadline);
        // A claim would have failed otherwise: the map has no node here.
        assert_eq!(taken.unwrap_err().kind(), ErrorKind::InUse);
        assert_eq!(receipt.flush, None);
    }
}
