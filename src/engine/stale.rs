//! Stale LUNs: LUNs that the target no longer has, and whose devices the kernel keeps.
//!
//! The kernel does not check: a device stays as it was scanned until a process deletes it
//! (`drivers/scsi/scsi_scan.c`, `scsi_probe_and_add_lun`). The device of an unmapped volume
//! fails its I/O. Once the array gives the LUN to another volume, the device leads to that
//! volume under the old one's name.

mod evidence;
mod outcome;
#[cfg(feature = "journal")]
mod owner;

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::deadline::Deadline;
use crate::engine::call::CallContext;
#[cfg(feature = "journal")]
use crate::engine::journal::Journal;
use crate::engine::stale::evidence::{LunCheck, StaleProof, check_lun};
use crate::engine::stale::outcome::{FindOwner, dry_run_outcome, remove_stale_lun};
#[cfg(feature = "journal")]
use crate::engine::stale::owner::{owner_in, require_all_read};
use crate::engine::telemetry::{self, Call};
use crate::engine::timing::{Phase, StageObserver};
use crate::engine::{Engine, first_names};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{DevNo, DiskSeq, Hctl, HostNo, VolumeId};
use crate::kernel::pool;
use crate::scsi::{Identity, ScsiDevice};
pub use evidence::Evidence;
pub use outcome::ReapOutcome;

/// How stale LUNs are reaped.
#[derive(Debug, Clone, Default)]
pub struct ReapRequest {
    dry_run: bool,
    observer: Option<StageObserver>,
}

impl ReapRequest {
    /// Only reports each stale LUN, with its proof, and what a reap would do with it.
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.dry_run = true;
        self
    }

    /// Calls `observer` for each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

/// What a reap found and did. Disks that answer as the unit that the kernel scanned are not
/// in it.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ReapReport {
    /// The devices with a proof, by address.
    pub stale_luns: Vec<StaleLun>,
    /// The devices without a proof that their unit is there or gone, by address: a path that
    /// is down proves nothing. None was touched.
    pub unproven: Vec<Unproven>,
    /// How long each phase took; of hosts that are worked on in parallel, the longest.
    pub phases: Vec<Phase>,
}

impl ReapReport {
    /// The error of the first stale LUN that was skipped.
    #[must_use]
    pub fn first_skipped(&self) -> Option<&Error> {
        self.stale_luns
            .iter()
            .find_map(|stale_lun| match &stale_lun.outcome {
                ReapOutcome::Skipped(error) => Some(error),
                _ => None,
            })
    }
}

/// A device whose unit is gone.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct StaleLun {
    /// Its address.
    pub hctl: Hctl,
    /// Its node.
    pub node: PathBuf,
    /// Its device number.
    pub devno: DevNo,
    /// Its disk sequence number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// The identity with which it was scanned.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub identity: Identity,
    /// The evidence that its unit is gone.
    pub evidence: Evidence,
    /// The evidence in words.
    pub proof: String,
    /// The journal's volume to which it belongs. Only the detach of that volume removes it.
    pub volume: Option<VolumeId>,
    /// What became of it.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub outcome: ReapOutcome,
}

/// A device whose unit may be there or not.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Unproven {
    /// Its address.
    pub hctl: Hctl,
    /// Its node; `None` if it has no disk.
    pub node: Option<PathBuf>,
    /// Why there is no proof.
    pub why: String,
}

/// What was found on one host.
#[derive(Default)]
struct Found {
    stale_luns: Vec<StaleLun>,
    unproven: Vec<Unproven>,
}

impl Engine {
    /// Looks at every SCSI disk, and removes those whose unit is proven to be gone.
    ///
    /// **Proof** is an answer of the target, see [`Evidence`]. A missing answer, a session or
    /// port that is down, and a device that is offline or blocked are no proof: such devices
    /// are [`unproven`](ReapReport::unproven).
    ///
    /// **No user**: the disk is claimed exclusively, and no process has it open either, since
    /// nothing can be written back to a unit that is gone. The proof is taken once more under
    /// the claim. A disk that is mounted, held (also by a multipath map: detach the unit
    /// then), swapped on or open is [`ReapOutcome::Skipped`], with its holder; so is every
    /// stale LUN if the users of disks cannot all be seen
    /// ([`NotLookedAt`](super::NotLookedAt)). A disk that was attached and is idle goes as
    /// well: a process with a journal uses `reap_except_volumes_of` (feature `journal`).
    ///
    /// Hosts are worked on in parallel. Minimum kernel: 5.10. After a timeout at stage
    /// `delete` the kernel may still be deleting that device; all else is as reported.
    /// Repeating it is safe.
    ///
    /// # Errors
    /// If sysfs cannot be read; the failure of one device is its
    /// [`ReapOutcome::Skipped`].
    pub fn reap(&self, request: &ReapRequest, deadline: Deadline) -> Result<ReapReport> {
        telemetry::measured(Call::Reap, || {
            reap_all(self, request, &|_, _| Ok(None), deadline)
        })
    }

    /// As [`reap`](Self::reap), and leaves the volumes of the journal alone, whatever is
    /// proven of them: a caller got their nodes and may be about to use them, and the next
    /// volume may get a node that is freed. They are reported with the volume's name;
    /// [`detach_volume`](Self::detach_volume) removes them.
    ///
    /// # Errors
    /// As [`reap`](Self::reap).
    #[cfg(feature = "journal")]
    pub fn reap_except_volumes_of(
        &self,
        journal: &Journal,
        request: &ReapRequest,
        deadline: Deadline,
    ) -> Result<ReapReport> {
        let owner = |identity: &Identity, hctl| Ok(journal.owner_of(identity, hctl));
        telemetry::measured(Call::Reap, || reap_all(self, request, &owner, deadline))
    }

    /// As [`reap_except_volumes_of`](Self::reap_except_volumes_of), for the journals in `directories`, which other
    /// processes may hold. They are read again when a device is about to be removed, with its
    /// locks held: an attach writes the volume's record before it takes these locks.
    ///
    /// # Errors
    /// As [`reap`](Self::reap), and where a journal cannot be read, or has a file that may
    /// be the record of a volume and cannot be read as one: nothing is reaped then.
    #[cfg(feature = "journal")]
    pub fn reap_except_volumes_in(
        &self,
        directories: &[PathBuf],
        request: &ReapRequest,
        deadline: Deadline,
    ) -> Result<ReapReport> {
        require_all_read(self, directories, deadline)?;
        let owner =
            |identity: &Identity, hctl| owner_in(self, directories, identity, hctl, deadline);
        telemetry::measured(Call::Reap, || reap_all(self, request, &owner, deadline))
    }
}

#[tracing::instrument(name = "reap", skip_all, fields(dry_run = request.dry_run))]
fn reap_all(
    engine: &Engine,
    request: &ReapRequest,
    owner: FindOwner<'_>,
    deadline: Deadline,
) -> Result<ReapReport> {
    let mut call = CallContext::new(Call::Reap, request.observer.as_ref(), deadline);
    call.enter(Stage::Resolve);
    if !request.dry_run {
        first_names::forget_removed(engine.roots());
    }
    let hosts = disks_by_host(engine)?;
    let parts = call.parts();
    let of_host = |devices| {
        let mut own = parts.part(deadline);
        let found = reap_host(engine, devices, request, owner, &mut own);
        (found, own.into_timings())
    };
    let parts = pool::each(Stage::Identify, hosts.into_values(), of_host);
    let mut whole = Found::default();
    for part in parts {
        let (found, part) = part?;
        call.keep_slowest_part(part);
        whole.stale_luns.extend(found.stale_luns);
        whole.unproven.extend(found.unproven);
    }
    Ok(ReapReport {
        stale_luns: whole.stale_luns,
        unproven: whole.unproven,
        phases: call.finish(),
    })
}

fn disks_by_host(engine: &Engine) -> Result<BTreeMap<HostNo, Vec<ScsiDevice>>> {
    let mut hosts: BTreeMap<HostNo, Vec<ScsiDevice>> = BTreeMap::new();
    for device in ScsiDevice::all(engine.roots())? {
        match device.is_disk() {
            Ok(true) => hosts.entry(device.hctl().host).or_default().push(device),
            Ok(false) => {}
            // A device that goes away loses this attribute before its directory.
            Err(error) if error.kind() == ErrorKind::Vanished || !device.is_there() => {}
            Err(error) => return Err(error.at(Stage::Resolve)),
        }
    }
    Ok(hosts)
}

fn reap_host(
    engine: &Engine,
    devices: Vec<ScsiDevice>,
    request: &ReapRequest,
    owner: FindOwner<'_>,
    call: &mut CallContext,
) -> Found {
    let mut found = Found::default();
    call.enter(Stage::Identify);
    let mut gone = Vec::new();
    for device in devices {
        match check_lun(engine, &device, call.deadline) {
            LunCheck::Present | LunCheck::Removed => {}
            LunCheck::Stale(proof) => gone.push((device, proof)),
            LunCheck::Unproven { disk, why } => found.unproven.push(Unproven {
                hctl: device.hctl(),
                node: disk.map(|disk| disk.node(engine.roots())),
                why,
            }),
        }
    }
    for (device, proof) in gone {
        let stale_lun = reap_one(engine, &device, *proof, request, owner, call);
        found.stale_luns.push(stale_lun);
    }
    found
}

/// Removes a device whose unit is gone, if that is requested and allowed.
fn reap_one(
    engine: &Engine,
    device: &ScsiDevice,
    proof: StaleProof,
    request: &ReapRequest,
    owner: FindOwner<'_>,
    call: &mut CallContext,
) -> StaleLun {
    let hctl = device.hctl();
    tracing::info!(%hctl, was = %proof.was, evidence = %proof.evidence, "a stale LUN");
    let (volume, outcome) = match owner(&proof.was, hctl) {
        Err(error) => (None, ReapOutcome::Skipped(error)),
        Ok(Some(volume)) => {
            let skipped = outcome::skipped_for(&volume);
            (Some(volume), skipped)
        }
        Ok(None) if request.dry_run => (None, dry_run_outcome(engine, &proof.disk, call.deadline)),
        Ok(None) => (None, remove_stale_lun(engine, device, &proof, owner, call)),
    };
    telemetry::stale_lun(proof.evidence.as_str(), outcome.as_str());
    StaleLun {
        hctl,
        node: proof.disk.node(engine.roots()),
        devno: proof.disk.devno(),
        diskseq: proof.diskseq,
        identity: proof.was,
        proof: proof.evidence.to_string(),
        evidence: proof.evidence,
        volume,
        outcome,
    }
}

#[cfg(test)]
mod tests;
