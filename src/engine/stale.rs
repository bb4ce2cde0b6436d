//! Phantoms: LUNs that the target has no more, and whose devices the kernel
//! keeps.
//!
//! The kernel does not ask: a device stays as it was scanned until somebody
//! deletes it (`drivers/scsi/scsi_scan.c`, `scsi_probe_and_add_lun`). What is
//! left of an unmapped volume fails its I/O, and once the array gives the number to
//! another volume, it is that one under the old one's name.

mod evidence;
mod outcome;

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::Engine;
#[cfg(feature = "journal")]
use super::journal::{Journal, JournalView};
use super::telemetry::{self, Call};
use super::timing::{Phase, Phases, StageObserver};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{DevNo, DiskSeq, Hctl, HostNo, VolumeId};
use crate::kernel::pool;
use crate::scsi::{Identity, ScsiDevice};
pub use evidence::Evidence;
use evidence::{Case, Verdict};
pub use outcome::Fate;
use outcome::Owner;

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
pub struct Reaping {
    /// Those with a proof, by address.
    pub phantoms: Vec<Phantom>,
    /// Those of which nobody could say whether they are there, by address: a
    /// path that is down proves nothing. None was touched.
    pub unproven: Vec<Unproven>,
    /// Where the time went; of hosts that are worked on beside each other, the
    /// longest.
    pub phases: Vec<Phase>,
}

impl Reaping {
    /// The error of the first phantom that stands and was to go.
    #[must_use]
    pub fn first_kept(&self) -> Option<&Error> {
        self.phantoms
            .iter()
            .find_map(|phantom| match &phantom.fate {
                Fate::Kept(error) => Some(error),
                _ => None,
            })
    }
}

/// A device whose unit is gone.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Phantom {
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
    pub fate: Fate,
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
    phantoms: Vec<Phantom>,
    unproven: Vec<Unproven>,
}

impl Engine {
    /// Looks at every SCSI disk and takes away those whose unit is gone, with
    /// proof and not otherwise.
    ///
    /// **Proof** is the target's own word, see [`Evidence`]. No answer, a session
    /// or port that is down, and a device that is offline or blocked are none:
    /// such devices are [`unproven`](Reaping::unproven).
    ///
    /// **Nobody uses it**: it is claimed exclusively, and nobody has it open
    /// either, since nothing can be written back to a unit that is gone; the proof
    /// is taken once more under the claim. What is mounted, held (by a multipath
    /// map too: detach the unit then), swapped on or open is
    /// [`Fate::Kept`], with its holder; and so is each phantom where the users of disks
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
    /// [`Fate::Kept`].
    pub fn reap(&self, request: &ReapRequest, deadline: Deadline) -> Result<Reaping> {
        telemetry::measured(Call::Reap, || {
            self.reap_all(request, &|_, _| None, deadline)
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
    ) -> Result<Reaping> {
        let owner = |identity: &Identity, hctl| journal.owner_of(identity, hctl);
        telemetry::measured(Call::Reap, || self.reap_all(request, &owner, deadline))
    }

    /// What [`reap_beside`](Self::reap_beside) would do, for who does not hold the
    /// journal: a dry run, whatever `request` says.
    ///
    /// # Errors
    /// As [`reap`](Self::reap).
    #[cfg(feature = "journal")]
    pub fn reapable_beside(
        &self,
        journal: &JournalView,
        request: &ReapRequest,
        deadline: Deadline,
    ) -> Result<Reaping> {
        let request = request.clone().dry_run();
        let owner = |identity: &Identity, hctl| journal.owner_of(identity, hctl);
        telemetry::measured(Call::Reap, || self.reap_all(&request, &owner, deadline))
    }

    #[tracing::instrument(name = "reap", skip_all, fields(dry_run = request.dry_run))]
    fn reap_all(
        &self,
        request: &ReapRequest,
        owner: Owner<'_>,
        deadline: Deadline,
    ) -> Result<Reaping> {
        let mut phases = Phases::new(Call::Reap, request.observer.as_ref());
        phases.enter(Stage::Resolve);
        let hosts = self.disks_by_host()?;
        let fork = phases.fork();
        let of_host = |devices| {
            let mut own = fork.clock();
            let found = self.reap_host(devices, request.dry_run, owner, &mut own, deadline);
            (found, own.part())
        };
        let parts = pool::each(Stage::Identify, hosts.into_values(), of_host);
        let mut whole = Found::default();
        for part in parts {
            let (found, part) = part?;
            phases.adopt_if_longer(part);
            whole.phantoms.extend(found.phantoms);
            whole.unproven.extend(found.unproven);
        }
        Ok(Reaping {
            phantoms: whole.phantoms,
            unproven: whole.unproven,
            phases: phases.finish(),
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
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Found {
        let mut found = Found::default();
        phases.enter(Stage::Identify);
        let mut gone = Vec::new();
        for device in devices {
            match self.is_phantom(&device, deadline) {
                Verdict::Stands | Verdict::Left => {}
                Verdict::Gone(case) => gone.push((device, case)),
                Verdict::Unproven { disk, why } => found.unproven.push(Unproven {
                    hctl: device.hctl(),
                    node: disk.map(|disk| disk.node(self.roots())),
                    why,
                }),
            }
        }
        for (device, case) in gone {
            let phantom = self.reap_one(&device, *case, dry_run, owner, phases, deadline);
            found.phantoms.push(phantom);
        }
        found
    }

    /// Takes away a device whose unit is gone, where that is asked for and may be.
    fn reap_one(
        &self,
        device: &ScsiDevice,
        case: Case,
        dry_run: bool,
        owner: Owner<'_>,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Phantom {
        let hctl = device.hctl();
        tracing::info!(%hctl, was = %case.was, evidence = %case.evidence, "a phantom");
        let volume = owner(&case.was, hctl);
        let fate = match &volume {
            Some(volume) => outcome::left_to(volume),
            None if dry_run => self.foresee(&case.disk, deadline),
            None => self.take_phantom(device, &case, owner, phases, deadline),
        };
        telemetry::phantom(case.evidence.as_str(), fate.as_str());
        Phantom {
            hctl,
            node: case.disk.node(self.roots()),
            devno: case.disk.devno(),
            diskseq: case.diskseq,
            identity: case.was,
            proof: case.evidence.to_string(),
            evidence: case.evidence,
            volume,
            fate,
        }
    }
}

#[cfg(test)]
mod tests;
