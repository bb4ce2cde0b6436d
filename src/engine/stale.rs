//! Phantoms: LUNs that the target has no more, and whose devices the kernel
//! keeps.
//!
//! The kernel does not ask: a device stays as it was scanned until somebody
//! deletes it (`drivers/scsi/scsi_scan.c`, `scsi_probe_and_add_lun`). What is
//! left of an unmapped volume fails its I/O, and once the array gives the number to
//! another volume, it is that one under the old one's name.

mod evidence;
mod outcome;
#[cfg(feature = "journal")]
mod owner;

use std::collections::BTreeMap;
use std::path::PathBuf;

#[cfg(feature = "journal")]
use super::journal::Journal;
use super::telemetry::{self, Call};
use super::timing::{Phase, StageObserver, StageTimer};
use super::{Engine, first_names};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{DevNo, DiskSeq, Hctl, HostNo, VolumeId};
use crate::kernel::pool;
use crate::scsi::{Identity, ScsiDevice};
pub use evidence::Evidence;
use evidence::{LunCheck, StaleProof};
use outcome::Owner;
pub use outcome::ReapOutcome;

/// How phantoms are reaped.
#[derive(Debug, Clone, Default)]
pub struct ReapRequest {
    dry_run: bool,
    observer: Option<StageObserver>,
}

impl ReapRequest {
    /// Only says what there is, with its proof, and what would become of it.
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.dry_run = true;
        self
    }

    /// Has `observer` told each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

/// What was found and done. Disks that answer as the unit that the kernel scanned
/// are not in it.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ReapReport {
    /// Those with a proof, by address.
    pub stale_luns: Vec<StaleLun>,
    /// Those of which nobody could say whether they are there, by address: a
    /// path that is down proves nothing. None was touched.
    pub unproven: Vec<Unproven>,
    /// Where the time went; of hosts that are worked on beside each other, the
    /// longest.
    pub phases: Vec<Phase>,
}

impl ReapReport {
    /// The error of the first phantom that stands and was to go.
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
    /// Its number.
    pub devno: DevNo,
    /// Its life (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// What it was scanned as.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub identity: Identity,
    /// Why it is one.
    pub evidence: Evidence,
    /// The same in words.
    pub proof: String,
    /// The volume of the journal that it is; it is left to its detach.
    pub volume: Option<VolumeId>,
    /// What became of it.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub outcome: ReapOutcome,
}

/// A device that may be there or not.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Unproven {
    /// Its address.
    pub hctl: Hctl,
    /// Its node; `None` where it has no disk.
    pub node: Option<PathBuf>,
    /// Why nobody can say.
    pub why: String,
}

/// What was found on one host.
#[derive(Default)]
struct Found {
    stale_luns: Vec<StaleLun>,
    unproven: Vec<Unproven>,
}

impl Engine {
    /// Looks at every SCSI disk and takes away those whose unit is gone, with
    /// proof and not otherwise.
    ///
    /// **Proof** is the target's own word, see [`Evidence`]. No answer, a session
    /// or port that is down, and a device that is offline or blocked are none:
    /// such devices are [`unproven`](ReapReport::unproven).
    ///
    /// **Nobody uses it**: it is claimed exclusively, and nobody has it open
    /// either, since nothing can be written back to a unit that is gone; the proof
    /// is taken once more under the claim. What is mounted, held (by a multipath
    /// map too: detach the unit then), swapped on or open is
    /// [`ReapOutcome::Skipped`], with its holder; and so is each phantom where the users of disks
    /// cannot all be seen ([`NotLookedAt`](super::NotLookedAt)). A disk that was attached and is idle goes
    /// as well: where a journal is kept, use
    /// `reap_beside` (feature `journal`).
    ///
    /// Hosts are worked on beside each other. Minimum kernel: 5.10. After a
    /// timeout at stage `delete` the kernel may still be deleting that one; all
    /// else is as it is reported. Repeating it is safe.
    ///
    /// # Errors
    /// Where sysfs cannot be read; what goes wrong with one device is its
    /// [`ReapOutcome::Skipped`].
    pub fn reap(&self, request: &ReapRequest, deadline: Deadline) -> Result<ReapReport> {
        telemetry::measured(Call::Reap, || {
            self.reap_all(request, &|_, _| Ok(None), deadline)
        })
    }

    /// As [`reap`](Self::reap), and leaves the volumes of the journal alone,
    /// whatever is proven of them: somebody was given their nodes and may be about
    /// to use them, and a node that is freed is the next volume's. They are
    /// reported with the volume's name;
    /// [`detach_volume`](Self::detach_volume) takes them away.
    ///
    /// # Errors
    /// As [`reap`](Self::reap).
    #[cfg(feature = "journal")]
    pub fn reap_beside(
        &self,
        journal: &Journal,
        request: &ReapRequest,
        deadline: Deadline,
    ) -> Result<ReapReport> {
        let owner = |identity: &Identity, hctl| Ok(journal.owner_of(identity, hctl));
        telemetry::measured(Call::Reap, || self.reap_all(request, &owner, deadline))
    }

    /// The same beside journals that other processes may hold, or nobody: those in
    /// `directories`, which are read again when a device is about to go, with its locks
    /// held. An attach holds these locks, and has written down its volume before.
    ///
    /// # Errors
    /// As [`reap`](Self::reap), and where a journal cannot be read, or has a file that may
    /// be the record of a volume and cannot be read as one: nothing is reaped then.
    #[cfg(feature = "journal")]
    pub fn reap_beside_those_in(
        &self,
        directories: &[PathBuf],
        request: &ReapRequest,
        deadline: Deadline,
    ) -> Result<ReapReport> {
        self.require_all_read(directories, deadline)?;
        let owner =
            |identity: &Identity, hctl| self.owner_in(directories, identity, hctl, deadline);
        telemetry::measured(Call::Reap, || self.reap_all(request, &owner, deadline))
    }

    #[tracing::instrument(name = "reap", skip_all, fields(dry_run = request.dry_run))]
    fn reap_all(
        &self,
        request: &ReapRequest,
        owner: Owner<'_>,
        deadline: Deadline,
    ) -> Result<ReapReport> {
        let mut timer = StageTimer::new(Call::Reap, request.observer.as_ref());
        timer.enter(Stage::Resolve);
        if !request.dry_run {
            first_names::forget_removed(self.roots());
        }
        let hosts = self.disks_by_host()?;
        let fork = timer.factory();
        let of_host = |devices| {
            let mut own = fork.timer();
            let found = self.reap_host(devices, request.dry_run, owner, &mut own, deadline);
            (found, own.part())
        };
        let parts = pool::each(Stage::Identify, hosts.into_values(), of_host);
        let mut whole = Found::default();
        for part in parts {
            let (found, part) = part?;
            timer.adopt_if_longer(part);
            whole.stale_luns.extend(found.stale_luns);
            whole.unproven.extend(found.unproven);
        }
        Ok(ReapReport {
            stale_luns: whole.stale_luns,
            unproven: whole.unproven,
            phases: timer.finish(),
        })
    }

    fn disks_by_host(&self) -> Result<BTreeMap<HostNo, Vec<ScsiDevice>>> {
        let mut hosts: BTreeMap<HostNo, Vec<ScsiDevice>> = BTreeMap::new();
        for device in ScsiDevice::all(self.roots())? {
            match device.is_disk() {
                Ok(true) => hosts.entry(device.hctl().host).or_default().push(device),
                Ok(false) => {}
                // One that goes loses this before its directory.
                Err(error) if error.kind() == ErrorKind::Vanished || !device.is_there() => {}
                Err(error) => return Err(error.at(Stage::Resolve)),
            }
        }
        Ok(hosts)
    }

    fn reap_host(
        &self,
        devices: Vec<ScsiDevice>,
        dry_run: bool,
        owner: Owner<'_>,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Found {
        let mut found = Found::default();
        timer.enter(Stage::Identify);
        let mut gone = Vec::new();
        for device in devices {
            match self.check_lun(&device, deadline) {
                LunCheck::Present | LunCheck::Removed => {}
                LunCheck::Stale(proof) => gone.push((device, proof)),
                LunCheck::Unproven { disk, why } => found.unproven.push(Unproven {
                    hctl: device.hctl(),
                    node: disk.map(|disk| disk.node(self.roots())),
                    why,
                }),
            }
        }
        for (device, proof) in gone {
            let stale_lun = self.reap_one(&device, *proof, dry_run, owner, timer, deadline);
            found.stale_luns.push(stale_lun);
        }
        found
    }

    /// Takes away a device whose unit is gone, where that is asked for and may be.
    fn reap_one(
        &self,
        device: &ScsiDevice,
        proof: StaleProof,
        dry_run: bool,
        owner: Owner<'_>,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> StaleLun {
        let hctl = device.hctl();
        tracing::info!(%hctl, was = %proof.was, evidence = %proof.evidence, "a phantom");
        let (volume, outcome) = match owner(&proof.was, hctl) {
            Err(error) => (None, ReapOutcome::Skipped(error)),
            Ok(Some(volume)) => {
                let left = outcome::left_to(&volume);
                (Some(volume), left)
            }
            Ok(None) if dry_run => (None, self.foresee(&proof.disk, deadline)),
            Ok(None) => (
                None,
                self.remove_stale_lun(device, &proof, owner, timer, deadline),
            ),
        };
        telemetry::stale_lun(proof.evidence.as_str(), outcome.as_str());
        StaleLun {
            hctl,
            node: proof.disk.node(self.roots()),
            devno: proof.disk.devno(),
            diskseq: proof.diskseq,
            identity: proof.was,
            proof: proof.evidence.to_string(),
            evidence: proof.evidence,
            volume,
            outcome,
        }
    }
}

#[cfg(test)]
mod tests;
