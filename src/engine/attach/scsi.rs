//! The steps of a SCSI attach, from top to bottom.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::addresses::lock_addresses;
use crate::engine::attach::best_path::{read_access_states, require_a_path_that_serves_io};
use crate::engine::attach::multipath_map::{UnitMap, map_waiter, wait_for_map};
use crate::engine::attach::path_set::{PathSet, RoutedPaths, more_severe, require_paths};
use crate::engine::attach::scsi_path::{PathFailure, probe_paths};
use crate::engine::attach::settle::settle_disk;
use crate::engine::attach::{AttachRequest, Attachment, MissingPath, Unit, UnitClaim, rollback};
use crate::engine::call::CallContext;
use crate::engine::detach::remove_device::remove_device;
use crate::engine::first_names::FirstNames;
use crate::engine::iscsi::login::{RouteAttempt, routes_with_sessions};
use crate::engine::unit::lock_unit;
use crate::engine::unit::place::PathPlace;
use crate::engine::usage::failed_flush::{self, LossMarks};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev;
use crate::scsi::{self, Identity, ScannedBy};
use crate::uevent::Settled;

pub(super) fn attach_scsi(
    engine: &Engine,
    request: &AttachRequest,
    call: &mut CallContext,
) -> Result<Attachment> {
    call.enter(Stage::Resolve);
    if let Some(name) = &request.nbd.expected {
        let message = format!(
            "{name} names the content of an NBD volume, and {} is no NBD source: expect a \
             name of the unit",
            request.source
        );
        return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve));
    }
    if let Some(options) = &request.log_in {
        options.require_valid()?;
    }
    let (routes, sessions) = routes_with_sessions(engine, request, call)?;
    let attached = attach_over(engine, routes, request, call);
    match attached {
        // After a timeout the kernel still works on devices that a logout would
        // remove.
        Err(error) if error.kind() != ErrorKind::TimedOut => {
            sessions.rollback(engine.roots(), call.deadline.for_rollback());
            Err(error)
        }
        result => {
            sessions.commit();
            result
        }
    }
}

fn attach_over(
    engine: &Engine,
    routes: Vec<RouteAttempt>,
    request: &AttachRequest,
    call: &mut CallContext,
) -> Result<Attachment> {
    let RoutedPaths {
        paths,
        mut missing,
        cause,
    } = RoutedPaths::of(routes)?;
    let mut cause = require_paths(request, paths.len(), &missing, cause).map(|()| None)?;

    call.enter(Stage::Lock);
    let addresses = paths.iter().map(|(_, hctl)| *hctl).collect();
    let _locks = lock_addresses(engine, addresses, call.deadline)?;
    let alone = paths.len() == 1 && missing.is_empty();
    let mut unit = PathSet::default();
    for path in probe_paths(engine, paths, request, call) {
        match path {
            Ok(path) => unit.paths.push(path),
            Err(PathFailure { error, .. }) if alone && error.kind() != ErrorKind::TooFewPaths => {
                return Err(error);
            }
            Err(PathFailure { via, error }) => {
                missing.push(MissingPath::new(via, &error));
                cause = Some(more_severe(cause, error));
            }
        }
    }
    unit.missing = missing;
    match finish_attach(engine, &mut unit, request, cause, call) {
        Err(mut error) if error.kind() != ErrorKind::TimedOut => {
            call.with_deadline(call.deadline.for_rollback(), |call| {
                for path in unit.paths.iter_mut().filter(|path| path.changed) {
                    let (device, watch) = (&path.device, &mut path.watch);
                    error = rollback::device(engine, error, device, watch, call);
                }
                Err(error)
            })
        }
        result => result,
    }
}

fn finish_attach(
    engine: &Engine,
    unit: &mut PathSet,
    request: &AttachRequest,
    cause: Option<Error>,
    call: &mut CallContext,
) -> Result<Attachment> {
    let deadline = call.deadline;
    let roots = engine.roots();
    require_paths(request, unit.paths.len(), &unit.missing, cause)?;
    let identity = unit.common_identity(engine)?;
    if let Some(UnitClaim(claim)) = &request.claim {
        let places = unit
            .paths
            .iter()
            .map(|path| PathPlace::of(roots, &path.device));
        claim(&identity, &places.collect::<Vec<_>>())?;
    }

    call.enter(Stage::Lock);
    let _unit = lock_unit(engine, &identity.names, deadline)?;
    adopt_aliases(engine, unit, call)?;
    require_paths(request, unit.paths.len(), &unit.missing, None)?;

    call.enter(Stage::Settle);
    // The map waiter is prepared while udev works, which leaves less to do
    // afterwards.
    let named = unit.paths.len() + unit.missing.len();
    let map_waiter = map_waiter(engine, request, named)?;
    let settled = settle_paths(engine, unit, request, deadline)?;

    let mut unit_map = match map_waiter {
        Some(map_waiter) => wait_for_map(engine, map_waiter, &unit.paths, &identity, call)?,
        None => UnitMap::default(),
    };
    unit.retain(request, |path| {
        unit_map.require_in_map(path)?;
        path.check_unchanged()
    })?;
    if unit_map.map.is_none() {
        read_access_states(engine, unit, request, call)?;
        require_a_path_that_serves_io(engine, unit, deadline)?;
    }
    for path in &unit.paths {
        if let Ok(first) = FirstNames::of(roots, path.device.hctl(), &path.disk) {
            first.write_if_absent(&path.identity)?;
        }
    }
    let attachment = attachment(engine, unit, request, identity.clone(), unit_map, settled)?;
    if unit.paths.iter().any(|path| path.changed) {
        // A new user of the unit starts from the data on it, so earlier failed
        // flushes no longer count.
        failed_flush::purge_stale(roots, &identity.names, LossMarks::Remove);
    }
    Ok(attachment)
}

/// The facts of the unit's map, or of its best path where there is none.
fn attachment(
    engine: &Engine,
    unit: &mut PathSet,
    request: &AttachRequest,
    identity: Identity,
    UnitMap { map, why_none, .. }: UnitMap,
    settled_paths: (Settled, Vec<String>),
) -> Result<Attachment> {
    let roots = engine.roots();
    let best = unit.best(request.last_device)?;
    let (disk, diskseq, (settled, links)) = match &map {
        Some((map, proof)) => {
            let disk = map.disk().clone();
            let diskseq = disk.diskseq()?;
            (disk, diskseq, (proof.how, proof.links.clone()))
        }
        None => (best.disk.clone(), best.diskseq, settled_paths),
    };
    Ok(Attachment {
        source: request.source.clone(),
        node: disk.node(roots),
        devno: disk.devno(),
        diskseq,
        size: disk.size()?,
        read_only: disk.read_only()?,
        links: blockdev::links_to(roots, disk.devno(), &links),
        settled,
        phases: Vec::new(),
        changed: unit.paths.iter().any(|path| path.changed),
        unit: Unit::Scsi {
            identity,
            paths: unit.facts(roots, request.log_in.as_ref()),
            missing: std::mem::take(&mut unit.missing),
            map: map.map(|(map, _)| map.name().to_owned()),
            no_map: why_none,
        },
    })
}

/// Replaces each path by an older alias: where the unit is also at another LUN of the
/// same target (an array may present LUN 1 as 16385), the older disk is used, since
/// two disks of one unit on one path would have separate page caches. The call
/// removes only devices that this attach scanned.
fn adopt_aliases(engine: &Engine, unit: &mut PathSet, call: &mut CallContext) -> Result<()> {
    for path in &mut unit.paths {
        let Some(other) = path.earlier_alias(engine)? else {
            continue;
        };
        tracing::info!(hctl = %path.device.hctl(), alias = %other.hctl(), "one unit, two LUNs");
        if path.changed {
            remove_device(engine, &path.device, &mut path.watch, call)?;
            path.changed = false;
        }
        let hctl = other.hctl();
        let mut watch = engine.hub().watch(&hctl.to_string());
        call.enter(Stage::Identify);
        let disk = scsi::wait_for_disk(
            &other,
            ScannedBy::Other,
            engine.roots(),
            &engine.scheduler,
            &mut watch,
            call.deadline,
        )?;
        let identity = scsi::read_identity(
            engine.roots(),
            &engine.scheduler,
            &other,
            &disk,
            call.deadline,
        )?;
        if !path.is_unit_at(&other, &identity) {
            let message =
                format!("{hctl} was scanned as the unit of another LUN, but is another unit");
            return Err(Error::new(ErrorKind::Vanished, message).at(Stage::Identify));
        }
        (path.device, path.watch, path.identity) = (other, watch, identity);
        path.diskseq = disk.diskseq()?;
        path.disk = disk;
    }
    unit.dedup_devices();
    Ok(())
}

/// Waits until udev has handled each path. One of several gets half of the remaining
/// time, to leave time for the others and the map.
fn settle_paths(
    engine: &Engine,
    unit: &mut PathSet,
    request: &AttachRequest,
    deadline: Deadline,
) -> Result<(Settled, Vec<String>)> {
    let mut proof = None;
    let alone = unit.paths.len() == 1;
    unit.retain(request, |path| {
        let limit = if alone { deadline } else { deadline.half() };
        let settled = settle_disk(engine, &path.disk, &mut path.watch, limit)?;
        proof.get_or_insert((settled.how, settled.links));
        Ok(())
    })?;
    Ok(proof.unwrap_or((Settled::KernelOnly, Vec::new())))
}
