//! Removes a multipath map without losing data that was written through it.

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::DetachRequest;
use crate::engine::detach::queueing_map::{MAP_CHECK_INTERVAL, PathWait};
use crate::engine::detach::receipt::{Flush, MapReceipt};
use crate::engine::usage::claim::{Claim, FlushPolicy, claim_disk};
use crate::engine::usage::failed_flush::{self, FailedFlush};
use crate::engine::usage::write_back::{self, write_back};
use crate::engine::usage::{self, Extent, Removal, Usage, users_of};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::worker;
use crate::multipath::{self, Daemon, Map};
use crate::uevent::{self, RemovedDevice, Watch};

/// Claims the map, flushes it, and removes it with the maps of its partitions.
/// `receipt` is updated at each step. udev may not have handled the removal of the map yet.
/// Returns `None`, and has removed nothing, where it waited for a path: the caller identifies
/// the paths again.
///
/// The caller has checked its users. Where `replaced` is
/// given, another unit answers below the map: nothing is written there.
///
/// # Errors
/// `InUse`, which names the users; `Io` where the flush failed, and `NotReady` where the map has
/// no path: the map stays and nothing below it may be deleted; `TimedOut`.
pub(super) fn remove_map(
    engine: &Engine,
    map: &Map,
    run: (Option<&Daemon>, &DetachRequest, Option<Flush>),
    watch: &mut Watch,
    receipt: &mut MapReceipt,
    call: &mut CallContext,
) -> Result<Option<RemovedDevice>> {
    let deadline = call.deadline;
    let (daemon, request, replaced) = run;
    let policy = request.flush_policy;
    let abandon = policy == FlushPolicy::Abandon;
    let partition_policy = replaced.is_none().then_some(policy);
    let path_wait = PathWait {
        engine,
        map,
        daemon,
        policy,
        deadline,
    };
    if replaced.is_none() && path_wait.wait_for_path(watch, receipt, call)? {
        return Ok(None);
    }
    let is_replaced = replaced.is_some();
    if !is_replaced && !abandon {
        path_wait.require_path()?;
    }
    remove_partition_maps(engine, map, partition_policy, watch, receipt, call)?;
    call.enter(Stage::Claim);
    let claim = claim_disk(engine, map.disk(), policy, watch, deadline)?;
    let flushed = if let Some(replaced) = replaced {
        Ok(replaced)
    } else {
        call.enter(Stage::Flush);
        write_map_back(&path_wait, &claim, watch, receipt)
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
    let mark = FailedFlush::of(engine.roots(), map.disk())?;
    if is_replaced {
        mark.set_unflushed();
    }
    let removed = delete_map(engine, map, daemon, watch, deadline);
    if matches!(&removed, Err(error) if error.kind() == ErrorKind::InUse)
        && let Err(error) = path_wait.tell_to_fail_if_abandoned(watch, receipt)
    {
        // The removal's error says more.
        tracing::debug!(%error, "cannot end the I/O of the processes that probe the map");
    }
    let removed = removed?;
    if !is_replaced {
        mark.clear();
    }
    receipt.gone = true;
    Ok(Some(removed))
}

/// Removes the maps of the map's partitions, after each of them is claimed and flushed.
/// Without a `policy` nothing is written to them, and they are marked as unflushed.
/// Each partition map has its own pages, which the flush of the map does not write. So `receipt`
/// gets the outcome of a flush that was not done.
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
        let mark = FailedFlush::of(engine.roots(), part.disk())?;
        if policy.is_none() {
            mark.set_unflushed();
        }
        let removed = delete_map(engine, &part, None, watch, deadline)?;
        if policy.is_some() {
            mark.clear();
        }
        settle_removal(engine, watch, &removed, deadline)?;
    }
    Ok(())
}

/// Flushes under the claim. If the last path goes during the flush, the flush stays in the
/// kernel after the deadline, unless the caller abandons unwritten data.
fn write_map_back(
    path_wait: &PathWait<'_>,
    claim: &Claim,
    watch: &mut Watch,
    receipt: &mut MapReceipt,
) -> Result<Flush> {
    let (engine, map, deadline) = (path_wait.engine, path_wait.map, path_wait.deadline);
    let Claim::Held(file) = claim else {
        return write_back(engine, claim, map.disk(), FlushPolicy::Require, deadline);
    };
    let mark = FailedFlush::of(engine.roots(), map.disk())?;
    if let Some(earlier) = mark.read()? {
        return Err(failed_flush::lost_data_error(map.disk(), &earlier));
    }
    let (file, disk, roots) = (file.clone(), map.disk().clone(), engine.roots().clone());
    let flush = move || write_back::flush(roots, file, disk, mark, Box::new(|| {}));
    let flush = worker::start(Stage::Flush, flush)?;
    loop {
        if let Some(flushed) = flush.wait(deadline.at_most(MAP_CHECK_INTERVAL)) {
            let flushed = flushed.map_err(|error| explain_flush(error, map, receipt))?;
            path_wait.require_path_after_flush()?;
            return Ok(flushed);
        }
        if deadline.has_passed() {
            let what = format!("the map {} to write back", map.name());
            let error = Error::timed_out(Stage::Flush, deadline, &what);
            return Err(error.with_last_seen(map.describe()));
        }
        path_wait.tell_to_fail_if_abandoned(watch, receipt)?;
    }
}

/// Removes a map whose last path is gone. multipathd leaves such a map where udev
/// probes it, so this call retries while only transient users have it open. A map
/// with a path stays. The mark of a failed flush stays too: a later detach reports the loss.
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
        allow_own_flush: false,
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
