//! Removes a multipath map without losing data that was written through it.

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::DetachRequest;
use crate::engine::detach::receipt::{Flush, MapReceipt};
use crate::engine::usage::claim::{Claim, FlushPolicy, claim_disk};
use crate::engine::usage::failed_flush::{self, FailedFlush};
use crate::engine::usage::write_back::{self, write_back};
use crate::engine::usage::{self, Extent, NotLookedAt, Removal, Usage, users_of, users_of_each};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::worker;
use crate::multipath::{self, Daemon, Map};
use crate::uevent::{self, RemovedDevice, Watch};

/// The interval between two reads of a map's status while its flush runs.
const MAP_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Claims the map, flushes it, and removes it with the maps of its partitions.
/// `receipt` is updated at each step. udev may not have handled the removal of the map yet.
///
/// The caller has checked its users with [`refuse_users_of_map`]. Where `replaced` is
/// given, another unit answers below the map: nothing is written there.
///
/// # Errors
/// `InUse`, which names the users; `Io` where the flush failed: the map stays and
/// nothing below it may be deleted; `TimedOut`.
pub(super) fn remove_map(
    engine: &Engine,
    map: &Map,
    run: (Option<&Daemon>, &DetachRequest, Option<Flush>),
    watch: &mut Watch,
    receipt: &mut MapReceipt,
    call: &mut CallContext,
) -> Result<RemovedDevice> {
    let deadline = call.deadline;
    let (daemon, request, replaced) = run;
    let policy = request.flush_policy;
    let abandon = policy == FlushPolicy::Abandon;
    let partition_policy = replaced.is_none().then_some(policy);
    remove_partition_maps(engine, map, partition_policy, watch, receipt, call)?;
    call.enter(Stage::Claim);
    let claim = claim_disk(engine, map.disk(), policy, watch, deadline)?;
    let flushed = if let Some(replaced) = replaced {
        Ok(replaced)
    } else {
        call.enter(Stage::Flush);
        write_map_back(engine, map, &claim, daemon, receipt, deadline)
    };
    let flushed = match flushed {
        Err(error) if abandon => Flush::Abandoned(error.to_string()),
        flushed => flushed?,
    };
    receipt.flush.get_or_insert(flushed);
    // The kernel cannot remove an open map; it reports an opener that comes after
    // this.
    drop(claim);
    call.enter(Stage::RemoveMap);
    let removed = delete_map(engine, map, daemon, watch, deadline);
    if abandon && matches!(&removed, Err(error) if error.kind() == ErrorKind::InUse) {
        let told_to_fail = unblock_probers(engine, map, daemon, deadline);
        // The removal's error says more than that of the unblocking.
        receipt.told_to_fail |= told_to_fail.unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot unblock the processes that probe the map");
            false
        });
    }
    let removed = removed?;
    receipt.gone = true;
    Ok(removed)
}

/// Removes the maps of the map's partitions, after each of them is claimed and flushed;
/// without a `policy` nothing is written to them. Each partition map has its own pages,
/// which the flush of the map does not write. So `receipt` gets the outcome of a flush that
/// was not done.
fn remove_partition_maps(
    engine: &Engine,
    map: &Map,
    policy: Option<FlushPolicy>,
    watch: &mut Watch,
    receipt: &mut MapReceipt,
    call: &mut CallContext,
) -> Result<()> {
    let deadline = call.deadline;
    let parts = map.partition_maps()?;
    if parts.is_empty() {
        return Ok(());
    }
    let mut claimed = Vec::new();
    for part in parts {
        call.enter(Stage::Claim);
        let claim_policy = policy.unwrap_or(FlushPolicy::Require);
        let claim = claim_disk(engine, part.disk(), claim_policy, watch, deadline)?;
        if let Some(policy) = policy {
            call.enter(Stage::Flush);
            let flush = write_back(engine, &claim, part.disk(), policy, deadline)?;
            if flush != Flush::Done {
                receipt.flush.get_or_insert(flush);
            }
        }
        claimed.push((part, claim));
    }
    call.enter(Stage::RemoveMap);
    for (part, claim) in claimed {
        drop(claim);
        let removed = delete_map(engine, &part, None, watch, deadline)?;
        settle_removal(engine, watch, &removed, deadline)?;
    }
    Ok(())
}

/// Looks for users of the map, of the maps of its partitions and of the disks `below`
/// it before anything changes: later a map that queues would be told to fail its
/// users' I/O. Returns the places that could not be looked at.
///
/// # Errors
/// `InUse`, which names the users.
pub(super) fn refuse_users_of_map(
    engine: &Engine,
    map: &Map,
    below: &[BlockDevice],
    policy: FlushPolicy,
    deadline: Deadline,
) -> Result<Vec<NotLookedAt>> {
    let parts = map.partition_maps()?;
    let maps = || std::iter::once(map).chain(&parts).map(Map::disk);
    let disks: Vec<&BlockDevice> = maps().chain(below).collect();
    let all = users_of_each(engine, &disks, Extent::All, deadline)?;
    let own: Vec<&str> = maps().map(BlockDevice::name).collect();
    let mut not_looked_at = Vec::new();
    for (place, (disk, mut users)) in disks.iter().zip(all).enumerate() {
        users.remove_stacked(&own);
        let removal = if place < own.len() {
            let beside_own_flush = policy == FlushPolicy::Abandon;
            Removal::Map { beside_own_flush }
        } else {
            Removal::FlushedDisk
        };
        users.refuse_busy(engine.roots(), disk, removal)?;
        not_looked_at = users.not_looked_at;
    }
    Ok(not_looked_at)
}

/// Flushes under the claim. Where the map queues and no path is left, waits half of
/// the time for a path and then tells the map to fail its I/O, since the flush would
/// never end; not while another process has the map open, which would lose its queued
/// writes.
fn write_map_back(
    engine: &Engine,
    map: &Map,
    claim: &Claim,
    daemon: Option<&Daemon>,
    receipt: &mut MapReceipt,
    deadline: Deadline,
) -> Result<Flush> {
    let Claim::Held(file) = claim else {
        return write_back(engine, claim, map.disk(), FlushPolicy::Require, deadline);
    };
    let mark = FailedFlush::of(engine.roots(), map.disk())?;
    if let Some(earlier) = mark.read()? {
        return Err(failed_flush::lost_data_error(map.disk(), &earlier));
    }
    let (file, disk, roots) = (file.clone(), map.disk().clone(), engine.roots().clone());
    let flush = move || write_back::flush(&roots, file, &disk, mark);
    let flush = worker::start(Stage::Flush, flush)?;
    let path_limit = deadline.half();
    loop {
        if let Some(flushed) = flush.wait(deadline.at_most(MAP_CHECK_INTERVAL)) {
            return flushed.map_err(|error| explain_flush(error, map, receipt));
        }
        if deadline.has_passed() {
            let what = format!("the map {} to write back", map.name());
            let error = Error::timed_out(Stage::Flush, deadline, &what);
            return Err(error.with_last_seen(map.describe()));
        }
        let status = map.status(engine.roots(), deadline)?;
        let stuck = status.queues && status.active() == 0;
        if stuck && path_limit.has_passed() && !receipt.told_to_fail {
            let users = users_of(engine, map.disk(), Extent::BesideClaim, deadline)?;
            let removal = Removal::Map {
                beside_own_flush: true,
            };
            users.refuse_busy(engine.roots(), map.disk(), removal)?;
            // Where users may be hidden, the kernel's open count shows whether this
            // claim is the only one.
            let is_ours = users.not_looked_at.is_empty()
                || multipath::open_count(engine.roots(), map, deadline)? <= 1;
            if is_ours {
                receipt.told_to_fail = fail_queued_io(engine, map, daemon, deadline)?;
            }
        }
    }
}

/// Makes I/O that finds no path fail, now and, where multipathd answers, permanently.
/// Returns whether the kernel was told: it accepts no message while the map is
/// suspended.
fn fail_queued_io(
    engine: &Engine,
    map: &Map,
    daemon: Option<&Daemon>,
    deadline: Deadline,
) -> Result<bool> {
    tracing::warn!(
        map = map.name(),
        "it queues with no path left: telling it to fail I/O"
    );
    // A daemon that hangs, or has no such map at the moment, gets half of the time;
    // the kernel needs no daemon.
    let limit = deadline.half();
    if let Some(daemon) = daemon
        && let Err(error) = daemon.disable_queueing(map.name(), limit)
    {
        tracing::debug!(%error, "multipathd does not disable queueing");
    }
    match multipath::fail_if_no_path(engine.roots(), map, deadline) {
        // The map is suspended, or another process made it queue again: the caller
        // retries.
        Err(error) if error.kind() == ErrorKind::NotReady => {
            tracing::debug!(%error, "the map is not set to fail I/O yet");
            Ok(false)
        }
        done => done.map(|()| true),
    }
}

/// Tells a map that queues with no path left to fail its I/O: a process that probes
/// it blocks in its read and holds the map open until a path comes. A multipathd that
/// hung when it was told may have made the map queue again. Returns whether the map
/// was told. Only for a caller that abandons unwritten data, since a process that
/// /proc does not show may write to the map.
fn unblock_probers(
    engine: &Engine,
    map: &Map,
    daemon: Option<&Daemon>,
    deadline: Deadline,
) -> Result<bool> {
    if !has_only_transient_users(engine, map, deadline)? {
        return Ok(false);
    }
    let status = map.status(engine.roots(), deadline)?;
    if !status.queues || status.active() > 0 {
        return Ok(false);
    }
    fail_queued_io(engine, map, daemon, deadline)
}

/// Removes a map whose last path is gone. multipathd leaves such a map where udev
/// probes it, so this call retries while only transient users have it open. A map
/// with a path stays.
///
/// # Errors
/// `InUse`, which names the users; `TimedOut`.
pub(in crate::engine) fn remove_pathless_map(
    engine: &Engine,
    map: &Map,
    daemon: Option<&Daemon>,
    deadline: Deadline,
) -> Result<()> {
    let mut watch = engine.hub().watch(map.disk().name());
    let mut pauses = Backoff::for_other_process();
    while map.is_there() {
        match map.paths() {
            Ok(paths) if paths.is_empty() => {}
            Err(error) if map.is_there() => return Err(error),
            _ => return Ok(()),
        }
        match delete_map(engine, map, daemon, &mut watch, deadline) {
            Err(error)
                if error.kind() == ErrorKind::InUse
                    && !deadline.has_passed()
                    && has_only_transient_users(engine, map, deadline)? =>
            {
                watch.next(deadline.at_most(pauses.pause()));
            }
            Err(error) if error.kind() == ErrorKind::Vanished && !map.is_there() => {}
            removed => return settle_removal(engine, &mut watch, &removed?, deadline),
        }
    }
    Ok(())
}

fn has_only_transient_users(engine: &Engine, map: &Map, deadline: Deadline) -> Result<bool> {
    let users = users_of(engine, map.disk(), Extent::All, deadline)?;
    let removal = Removal::Map {
        beside_own_flush: false,
    };
    Ok(!matches!(
        users.usage_for(engine.roots(), removal),
        Usage::Busy(_)
    ))
}

/// Removes the map and returns when sysfs no longer shows it.
fn delete_map(
    engine: &Engine,
    map: &Map,
    daemon: Option<&Daemon>,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<RemovedDevice> {
    let (roots, disk) = (engine.roots(), map.disk());
    let mark = FailedFlush::of(roots, disk)?;
    let removed_device = RemovedDevice::of(roots, disk)?;
    // This keeps multipathd from making the map again on a path's event. A daemon
    // that hangs gets half of the time; the kernel needs no daemon.
    let limit = deadline.half();
    if let Some(daemon) = daemon
        && let Err(error) = daemon.delete_map(map.name(), limit)
    {
        tracing::debug!(%error, "multipathd does not remove the map");
    }
    if map.is_there() {
        multipath::remove(roots, map, watch, deadline).map_err(|error| match error.kind() {
            ErrorKind::InUse => name_holders(engine, map, error, deadline),
            _ => error,
        })?;
    }
    mark.clear();
    Ok(removed_device)
}

/// Waits until udev has handled the removal.
pub(super) fn settle_removal(
    engine: &Engine,
    watch: &mut Watch,
    removed: &RemovedDevice,
    deadline: Deadline,
) -> Result<()> {
    let (roots, mode) = (engine.roots(), engine.hub().mode());
    uevent::settle_removal(watch, mode, roots, removed, deadline)
}

fn name_holders(engine: &Engine, map: &Map, error: Error, deadline: Deadline) -> Error {
    match users_of(engine, map.disk(), Extent::All, deadline) {
        Ok(users) => usage::in_use_error(map.disk(), &users.found).caused_by(error),
        Err(_) => error,
    }
}

fn explain_flush(error: Error, map: &Map, receipt: &MapReceipt) -> Error {
    let after = if receipt.told_to_fail {
        " after it was told to fail, since it queued with no path left"
    } else {
        ""
    };
    let message = format!(
        "the map {} could not be written back{after}; nothing below it was deleted",
        map.name()
    );
    Error::new(error.kind(), message)
        .at(Stage::Flush)
        .caused_by(error)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::kernel::Roots;

    #[test]
    fn a_map_is_refused_to_its_users_before_a_claim() {
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
        let soon = Deadline::after(Duration::from_secs(30));
        let refused = refuse_users_of_map(&engine, &map, &[], FlushPolicy::Require, soon);
        // A claim would fail with another error, since the map has no node here.
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InUse);
    }
}
