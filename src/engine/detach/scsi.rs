//! The steps of a SCSI detach: the map, then every path, in the order that loses no data.

use std::collections::BTreeSet;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::attach::addresses::{are_scanned, lock_addresses, wait_for_scans};
use crate::engine::call::CallContext;
use crate::engine::detach::receipt::{DetachFailure, PathReceipt, Receipt};
use crate::engine::detach::resolve::ResolvedUnit;
use crate::engine::detach::run::{DetachRun, UnitCache};
use crate::engine::detach::{DetachRequest, Detachment, Place};
use crate::engine::unit::paths::paths_of;
use crate::engine::unit::place::{describe_unproven_remains, may_be_one_unit, weak_name_error};
use crate::engine::unit::{KnownPath, devices_named, lock_unit, mismatch};
use crate::engine::usage::claim::FlushPolicy;
use crate::engine::usage::failed_flush::{self, LossMarks};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Addressing, Hctl, Lun, Wwid};
use crate::multipath::{Daemon, Map};
use crate::scsi::{Identity, ScsiDevice};

/// Detaches the unit with all its paths, and then the devices that scans bring afterwards.
/// A path that hangs does not delay the others.
pub(super) fn detach_scsi(
    engine: &Engine,
    resolved: &ResolvedUnit,
    request: &DetachRequest,
    call: &mut CallContext,
) -> Result<Detachment, DetachFailure> {
    call.enter(Stage::Lock);
    let _locks = lock_addresses(engine, resolved.locked_addresses(), call.deadline)?;
    // The call checks for scans first: `detach_present` finds the devices of a scan that
    // has ended by then.
    let is_scanned = are_scanned(engine, &resolved.addresses)?;
    let done = detach_present(engine, resolved, request, call)?;
    if !is_scanned {
        return Ok(done);
    }
    call.enter(Stage::Lock);
    let late = match wait_for_scans(engine, &resolved.addresses, call.deadline) {
        Ok(()) => detach_present(engine, resolved, request, call),
        Err(error) => Err(error.into()),
    };
    match late {
        Ok(late) => Ok(done.and(late)),
        Err(failure) => Err(failure.after_part(done.receipt)),
    }
}

/// Detaches the unit with all its paths. The caller holds the locks of its addresses.
fn detach_present(
    engine: &Engine,
    resolved: &ResolvedUnit,
    request: &DetachRequest,
    call: &mut CallContext,
) -> Result<Detachment, DetachFailure> {
    let deadline = call.deadline;
    call.enter(Stage::Identify);
    let named_devices = named_devices(engine, resolved, request.expected.as_ref())?;
    let any = Identity::default();
    let known = paths_of(engine, &any, &named_devices, Vec::new(), deadline)?;
    let unit = unit_of(engine, resolved, &known, request.expected.as_ref())?;
    refuse_unproven_alias(engine, resolved, &known, &unit)?;

    call.enter(Stage::Lock);
    let _lock = lock_unit(engine, &unit.names, deadline)?;

    let mut run = DetachRun {
        engine,
        request,
        named_devices,
        map: resolved.map.clone(),
        maps: engine.hub().watch("virtual"),
        daemon: Daemon::find(engine.roots())?,
        receipt: Receipt {
            names: unit.names.clone(),
            ..Receipt::default()
        },
        unit,
        devices: Vec::new(),
        open_paths: Vec::new(),
        unwritten_paths: Vec::new(),
        unit_cache: UnitCache::NotShown,
        first_paths: Vec::new(),
        unproven_paths: Vec::new(),
        timed_out: false,
        map_may_have_flush: false,
        holder_vanished: false,
        replaced: Vec::new(),
    };
    // The receipt also lists a path that another process removes before this call flushes it.
    for path in &known {
        run.add_to_receipt(path)?;
    }
    let first_devices: Vec<ScsiDevice> = known.iter().map(|path| path.device.clone()).collect();
    run.first_paths = known;
    let gone = retry_until_gone(&mut run, call);
    run.read_back();
    match gone.and_then(|()| run.wait_for_removals(deadline)) {
        Ok(mut doubts) => {
            match describe_unproven_remains(engine, &run.unit, &first_devices, &run.unproven_paths)
            {
                Ok(more) => doubts.extend(more),
                Err(error) => return Err(DetachFailure::new(error, run.receipt)),
            }
            let loss_marks = match request.flush_policy {
                FlushPolicy::Require => LossMarks::Keep,
                FlushPolicy::Abandon => LossMarks::Remove,
            };
            let (roots, names) = (engine.roots(), &run.receipt.names);
            doubts.extend(failed_flush::purge_stale(roots, names, loss_marks));
            Ok(detachment(run.receipt, doubts, resolved))
        }
        Err(error) => Err(DetachFailure::new(error, run.receipt)),
    }
}

/// The named devices that are there.
pub(in crate::engine) fn named_devices(
    engine: &Engine,
    resolved: &ResolvedUnit,
    expected: Option<&Wwid>,
) -> Result<Vec<ScsiDevice>> {
    let mut named_devices = Vec::new();
    for &hctl in &resolved.addresses {
        named_devices.extend(ScsiDevice::find(engine.roots(), hctl)?);
    }
    // A device that is gone, or was replaced by a new one, names nothing.
    named_devices.extend(resolved.device.clone().filter(ScsiDevice::is_there));
    if let Some(map) = &resolved.map {
        for disk in map.paths()? {
            named_devices.extend(ScsiDevice::of_disk(&disk)?);
        }
    }
    let name = resolved.name.as_ref().or(expected);
    match name.filter(|_| named_devices.is_empty()) {
        Some(name) if name.is_unique() => named_devices = devices_named(engine, name)?,
        // A weak name that the caller only expects names no device.
        Some(name) if resolved.name.is_some() => {
            let devices = devices_named(engine, name)?;
            if !devices.is_empty() {
                return Err(weak_name_error(name, &devices));
            }
        }
        _ => {}
    }
    Ok(named_devices)
}

/// Refuses where the unit may be at another LUN of the same target (1 and 16385).
/// Where nothing is at the address and the unit's name is unknown, "it is gone" would
/// be a guess.
fn refuse_unproven_alias(
    engine: &Engine,
    resolved: &ResolvedUnit,
    known: &[KnownPath],
    unit: &Identity,
) -> Result<()> {
    if !known.is_empty() || !unit.names.is_empty() {
        return Ok(());
    }
    for &hctl in &resolved.addresses {
        let Some(lun) = alias(hctl.lun) else {
            continue;
        };
        let other = Hctl { lun, ..hctl };
        if ScsiDevice::find(engine.roots(), other)?.is_some() {
            let message = format!(
                "there is no device at {hctl}, but {other} is attached and may be the same \
                 unit: name that address, or the unit's name (--expect)"
            );
            return Err(Error::new(ErrorKind::NotFound, message).at(Stage::Resolve));
        }
    }
    Ok(())
}

/// The identity of the unit, from all devices that report it. A device that another
/// process is removing is left out, since its identity is no longer known.
///
/// # Errors
/// `IdentityMismatch` where the named devices belong to several units, or to another
/// unit than the caller expects: nothing is touched.
pub(in crate::engine) fn unit_of(
    engine: &Engine,
    resolved: &ResolvedUnit,
    known: &[KnownPath],
    expected: Option<&Wwid>,
) -> Result<Identity> {
    let mut names: BTreeSet<Wwid> = resolved.name.iter().cloned().collect();
    names.extend(resolved.map.as_ref().and_then(Map::wwid));
    let mut first: Option<&KnownPath> = None;
    for path in known.iter().filter(|path| !path.is_being_removed) {
        let identity = path.identity_now.of();
        let hctl = path.device.hctl();
        if let Some(expected) = expected
            && !identity.is(expected)
        {
            return Err(mismatch(expected, &hctl.to_string(), identity));
        }
        if let Some(first) = first
            && !may_be_one_unit(
                engine,
                (&first.device, first.identity_now.of()),
                (&path.device, identity),
            )
        {
            let message = format!(
                "{} is {} and {hctl} is {identity}: these are two units; name one",
                first.device.hctl(),
                first.identity_now.of()
            );
            let error = Error::new(ErrorKind::IdentityMismatch, message);
            return Err(error.at(Stage::Identify).with_found(&identity.names));
        }
        first.get_or_insert(path);
        names.extend(identity.names.iter().cloned());
    }
    names.extend(expected.cloned());
    let mut staying = known.iter().filter(|path| !path.is_being_removed);
    let serial = staying.find_map(|path| path.identity_now.of().serial.clone());
    Ok(Identity {
        serial,
        ..Identity::of(names)
    })
}

/// The other address of a unit whose number is below 256.
fn alias(lun: Lun) -> Option<Lun> {
    match lun.addressing() {
        Addressing::Peripheral { bus: 0, lun } => Lun::flat(u16::from(lun)),
        Addressing::Flat(number) if number < 256 => Some(Lun::from_kernel(u64::from(number))),
        _ => None,
    }
}

/// Repeats a pass after a transient failure (multipathd takes a path again, udev probes a
/// disk, another process deletes a device) until nothing of the unit is left or the
/// deadline passes.
fn retry_until_gone(run: &mut DetachRun<'_>, call: &mut CallContext) -> Result<()> {
    let deadline = call.deadline;
    let mut pauses = Backoff::for_other_process();
    let mut last_failure: Option<Error> = None;
    loop {
        match run.remove_present(call) {
            Ok(false) => break,
            Ok(true) => last_failure = None,
            Err(error) if !deadline.has_passed() && run.is_transient(&error, deadline) => {
                tracing::debug!(%error, "the detach retries after a transient failure");
                run.maps.next(deadline.at_most(pauses.pause()));
                if deadline.has_passed() {
                    // Another pass without time left would report less than this one.
                    return Err(users_stayed(&error, deadline));
                }
                last_failure = Some(error);
            }
            Err(error) => {
                let last = last_failure.filter(|_| deadline.has_passed());
                return Err(match last {
                    // The deadline passed during the look at the users.
                    Some(last) if (last.kind(), last.stage()) == (error.kind(), error.stage()) => {
                        users_stayed(&error, deadline)
                    }
                    // The call that timed out may not have begun.
                    Some(last) if error.kind().is_timeout_or_cancel() => {
                        after_refusal(error, &last)
                    }
                    _ => error,
                });
            }
        }
    }
    run.wait_until_forgotten(call)
}

/// The error of a detach whose failures were transient until the deadline.
fn users_stayed(last: &Error, deadline: Deadline) -> Error {
    let stage = last.stage().unwrap_or(Stage::Resolve);
    let what = "transient users to release the device";
    let timed_out = Error::timed_out(stage, deadline, what);
    let timed_out = timed_out.with_last_seen(last.to_string());
    timed_out.with_holders(last.holders())
}

/// The error of a call that timed out, after another error whose cause may still be there.
fn after_refusal(timed_out: Error, last: &Error) -> Error {
    let seen = timed_out.last_seen().unwrap_or("nothing");
    let seen = format!("{seen}; before that: {last}");
    timed_out.with_last_seen(seen).with_holders(last.holders())
}

/// Whether this detach flushed the path.
fn was_flushed(path: &PathReceipt) -> bool {
    path.flush.is_some()
}

fn detachment(mut receipt: Receipt, doubts: Vec<String>, resolved: &ResolvedUnit) -> Detachment {
    receipt.conclude(doubts);
    let first = receipt.paths.first();
    let address = first.map(|path| path.hctl);
    let place = Place::Scsi {
        hctl: address.or_else(|| resolved.addresses.first().copied()),
        name: receipt.names.first().cloned(),
    };
    let through_map = receipt.map.as_ref();
    let flush = through_map
        .and_then(|map| map.flush.clone())
        .or_else(|| first.and_then(|path| path.flush.clone()));
    Detachment {
        node: through_map
            .map(|map| map.node.clone())
            .or_else(|| first.and_then(|path| path.node.clone())),
        devno: first.and_then(|path| path.devno),
        diskseq: first.and_then(|path| path.diskseq),
        flush,
        changed: receipt.map.is_some() || receipt.paths.iter().any(was_flushed),
        safe_to_unmap: receipt.safe_to_unmap,
        not_looked_at: receipt.not_looked_at.clone(),
        receipt: Some(receipt),
        ..Detachment::unchanged(place)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::Holder;

    #[test]
    fn a_call_that_times_out_after_a_refusal_still_names_the_users() {
        let user = Holder::Stacked {
            device: "dm-0".to_owned(),
        };
        let refusal = Error::new(ErrorKind::InUse, "sda is in use")
            .at(Stage::Claim)
            .with_holders(std::slice::from_ref(&user));
        let deadline = Deadline::after(Duration::ZERO);
        let timed_out = Error::timed_out(Stage::Map, deadline, "the status of dm-0");
        let error = after_refusal(timed_out.with_last_seen("not begun"), &refusal);
        assert_eq!(error.stage(), Some(Stage::Map), "{error}");
        let seen = error.last_seen().unwrap();
        assert!(seen.starts_with("not begun; before that: "), "{seen}");
        assert!(seen.ends_with("sda is in use"), "{seen}");
        assert_eq!(error.holders(), [user]);
    }
}
