//! The way of one SCSI detach: the map, then every path, in the order that loses
//! nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::detach::receipt::{DetachFailure, PathReceipt, Receipt};
use crate::engine::detach::resolve::Wanted;
use crate::engine::detach::run::Way;
use crate::engine::detach::{DetachRequest, Detachment, Place};
use crate::engine::timing::Phases;
use crate::engine::unit::place::refuse_weak_name;
use crate::engine::unit::{KnownPath, mismatch};
use crate::engine::usage::failed_flush;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Addressing, Hctl, Lun, Wwid};
use crate::multipath::{Daemon, Map};
use crate::scsi::{Identity, ScsiDevice};

impl Engine {
    /// Detaches the unit with all its paths, and then what scans bring whose callers
    /// have given them up: a path that hangs holds up no other.
    pub(super) fn detach_scsi(
        &self,
        wanted: &Wanted,
        request: &DetachRequest,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        phases.enter(Stage::Lock);
        let _leases = self.lease_addresses(wanted.leased(), deadline)?;
        // Looked for first: what it brings is there when it has ended.
        let may_come = self.are_scanned(&wanted.addresses)?;
        let done = self.detach_what_is_there(wanted, request, phases, deadline)?;
        if !may_come {
            return Ok(done);
        }
        phases.enter(Stage::Lock);
        let late = match self.wait_for_scans(&wanted.addresses, deadline) {
            Ok(()) => self.detach_what_is_there(wanted, request, phases, deadline),
            Err(error) => Err(error.into()),
        };
        match late {
            Ok(late) => Ok(done.and(late)),
            Err(failure) => Err(failure.after_part(done.receipt)),
        }
    }

    /// Detaches the unit with all its paths, whose addresses are ours.
    fn detach_what_is_there(
        &self,
        wanted: &Wanted,
        request: &DetachRequest,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        phases.enter(Stage::Identify);
        let seeds = self.seeds(wanted, request.expected.as_ref())?;
        let known = self.paths_of(&Identity::default(), &seeds, Vec::new(), deadline)?;
        let unit = self.unit_of(wanted, &known, request.expected.as_ref())?;
        self.refuse_unproven_alias(wanted, &known, &unit)?;

        phases.enter(Stage::Lock);
        let _lease = self.lease_unit(&unit.names, deadline)?;

        let mut way = Way {
            engine: self,
            request,
            seeds,
            map: wanted.map.clone(),
            maps: self.hub().watch("virtual"),
            daemon: Daemon::find(self.roots())?,
            receipt: Receipt {
                names: unit.names.clone(),
                ..Receipt::default()
            },
            unit,
            devices: Vec::new(),
            looked_at: Vec::new(),
            late: false,
            unseen: false,
            replaced: Vec::new(),
        };
        // Whatever becomes of them: one that goes away by another's hand was
        // flushed by nobody here.
        for path in &known {
            way.enter_into_receipt(path)?;
        }
        let looked_at: Vec<ScsiDevice> = known.iter().map(|path| path.device.clone()).collect();
        way.looked_at = known;
        let gone = go(&mut way, phases, deadline);
        way.read_back();
        match gone.and_then(|()| way.wait_for_those_leaving(deadline)) {
            Ok(mut doubts) => {
                match self.lookalikes(&way.unit, &looked_at) {
                    Ok(more) => doubts.extend(more),
                    Err(error) => return Err(DetachFailure::new(error, way.receipt)),
                }
                let names = &way.receipt.names;
                doubts.extend(failed_flush::sweep(self.roots(), names, request.abandon));
                Ok(detachment(way.receipt, doubts, wanted))
            }
            Err(error) => Err(DetachFailure::new(error, way.receipt)),
        }
    }

    /// The devices that were named and are there.
    pub(in crate::engine) fn seeds(
        &self,
        wanted: &Wanted,
        expected: Option<&Wwid>,
    ) -> Result<Vec<ScsiDevice>> {
        let mut seeds = Vec::new();
        for &hctl in &wanted.addresses {
            seeds.extend(ScsiDevice::find(self.roots(), hctl)?);
        }
        // Gone, or another life is there: then nothing was named.
        seeds.extend(wanted.device.clone().filter(ScsiDevice::is_there));
        if let Some(map) = &wanted.map {
            for disk in map.paths()? {
                seeds.extend(ScsiDevice::of_disk(&disk)?);
            }
        }
        let name = wanted.name.as_ref().or(expected);
        match name.filter(|_| seeds.is_empty()) {
            Some(name) if name.is_unique() => seeds = self.devices_named(name)?,
            // What only the expectation has in common with a unit is no path of it.
            Some(name) if wanted.name.is_some() => {
                let devices = self.devices_named(name)?;
                if !devices.is_empty() {
                    return Err(refuse_weak_name(name, &devices));
                }
            }
            _ => {}
        }
        Ok(seeds)
    }

    /// A unit may be there under another LUN of the same target (1 and 16385).
    /// Where nothing is at the address and nobody says the unit's name, "it is
    /// gone" would be a guess.
    fn refuse_unproven_alias(
        &self,
        wanted: &Wanted,
        known: &[KnownPath],
        unit: &Identity,
    ) -> Result<()> {
        if !known.is_empty() || !unit.names.is_empty() {
            return Ok(());
        }
        for &hctl in &wanted.addresses {
            let Some(lun) = alias(hctl.lun) else {
                continue;
            };
            let other = Hctl { lun, ..hctl };
            if ScsiDevice::find(self.roots(), other)?.is_some() {
                let message = format!(
                    "nothing is at {hctl}, and {other}, which is attached, may be the same unit: \
                     name that one, or say the unit's name (--expect)"
                );
                return Err(Error::new(ErrorKind::NotFound, message).at(Stage::Resolve));
            }
        }
        Ok(())
    }

    /// The unit, by the word of all who know it. Of a device that somebody takes
    /// away nobody can say any more whose path it is: it contradicts nothing.
    ///
    /// # Errors
    /// `IdentityMismatch` where what was named are devices of several units, or of
    /// another one than the caller expects: nothing is touched.
    pub(in crate::engine) fn unit_of(
        &self,
        wanted: &Wanted,
        known: &[KnownPath],
        expected: Option<&Wwid>,
    ) -> Result<Identity> {
        let mut names: BTreeSet<Wwid> = wanted.name.iter().cloned().collect();
        names.extend(wanted.map.as_ref().and_then(Map::wwid));
        let mut first: Option<&KnownPath> = None;
        for path in known.iter().filter(|path| !path.leaves) {
            let identity = path.standing.of();
            let hctl = path.device.hctl();
            if let Some(expected) = expected
                && !identity.is(expected)
            {
                return Err(mismatch(expected, &hctl.to_string(), identity));
            }
            if let Some(first) = first
                && !self.may_be_one_unit(
                    (&first.device, first.standing.of()),
                    (&path.device, identity),
                )
            {
                let message = format!(
                    "{} is {} and {hctl} is {identity}: these are two units; name one",
                    first.device.hctl(),
                    first.standing.of()
                );
                return Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Identify));
            }
            first.get_or_insert(path);
            names.extend(identity.names.iter().cloned());
        }
        names.extend(expected.cloned());
        let mut staying = known.iter().filter(|path| !path.leaves);
        let serial = staying.find_map(|path| path.standing.of().serial.clone());
        Ok(Identity {
            serial,
            ..Identity::of(names)
        })
    }
}

/// The other address of a unit below 256.
fn alias(lun: Lun) -> Option<Lun> {
    match lun.addressing() {
        Addressing::Peripheral { bus: 0, lun } => Lun::flat(u16::from(lun)),
        Addressing::Flat(number) if number < 256 => Some(Lun::from_kernel(u64::from(number))),
        _ => None,
    }
}

/// Repeats what may pass by itself (multipathd that takes a path again, udev that
/// looks at a disk, a device that somebody else deletes) until nothing of the unit
/// is left or the deadline passes.
fn go(way: &mut Way<'_>, phases: &mut Phases, deadline: Deadline) -> Result<()> {
    let mut pauses = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
    loop {
        match way.take_down_what_is_there(phases, deadline) {
            Ok(false) => break,
            Ok(true) => {}
            Err(error) if !deadline.has_passed() && way.may_pass(&error, deadline) => {
                tracing::debug!(%error, "once more");
                way.maps.next(deadline.at_most(pauses.pause()));
                if deadline.has_passed() {
                    // A turn without time would say less than this one did.
                    let stage = error.stage().unwrap_or(Stage::Resolve);
                    let what = "what is in the way to pass";
                    let timed_out = Error::timed_out(stage, deadline, what);
                    return Err(timed_out.with_last_seen(error.to_string()));
                }
            }
            Err(error) => return Err(error),
        }
    }
    way.wait_until_forgotten(phases, deadline)
}

/// Not by somebody else before we had begun.
fn was_taken_down(path: &PathReceipt) -> bool {
    path.flush.is_some()
}

fn detachment(mut receipt: Receipt, doubts: Vec<String>, wanted: &Wanted) -> Detachment {
    receipt.conclude(doubts);
    let first = receipt.paths.first();
    let address = first.map(|path| path.hctl);
    let place = Place::Scsi {
        hctl: address.or_else(|| wanted.addresses.first().copied()),
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
        changed: receipt.map.is_some() || receipt.paths.iter().any(was_taken_down),
        safe_to_unmap: receipt.safe_to_unmap,
        not_looked_at: receipt.not_looked_at.clone(),
        receipt: Some(receipt),
        ..Detachment::unchanged(place)
    }
}
