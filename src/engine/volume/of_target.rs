//! Finds the volume of a journal to which the target of a detach belongs.

use std::fmt::Write as _;

use crate::deadline::Deadline;
use crate::engine::detach::receipt::Receipt;
use crate::engine::detach::resolve::{Resolved, ResolvedUnit, resolve_target};
use crate::engine::detach::{DetachTarget, Detachment, Place};
use crate::engine::journal::{Detached, JournalView, Record};
use crate::engine::unit::devices_named;
use crate::engine::volume::recover::status::survey_records;
use crate::engine::volume::recover::{Condition, VolumeStatus};
use crate::engine::{DetachRequest, Engine};
use crate::error::Result;
use crate::id::{Hctl, VolumeId};
use crate::scsi::ScsiDevice;

impl Engine {
    /// The volume of a journal that a [`detach`](Self::detach) of this request would remove.
    /// Another process may hold the journal. A detach of a device and not of its volume leaves
    /// the record, and the journal's holder attaches the volume again: see
    /// [`detach_volume`](Self::detach_volume).
    ///
    /// # Errors
    /// `NotFound` if the target is a path that leads nowhere; `TimedOut` if a file system on
    /// that path does not answer; `Io` where sysfs cannot be read. If no record is the
    /// target's, and a file of the journal may be its record and cannot be read: `NotSupported`
    /// if a later version wrote the file, else `NotReady`.
    pub fn volume_of(
        &self,
        journal: &JournalView,
        request: &DetachRequest,
        deadline: Deadline,
    ) -> Result<Option<VolumeId>> {
        let found = resolve_target(self, &request.target, request.backend.clone(), deadline)?;
        let mut by_source = None;
        for (record, there) in journal.records.iter().zip(self.survey_read(journal)?) {
            if is_at(self, &found, record, &there)? {
                return Ok(Some(there.volume));
            }
            if by_source.is_none() && is_named(&request.target, &found, record) {
                by_source = Some(there.volume);
            }
        }
        if by_source.is_none() {
            journal.require_read()?;
        }
        Ok(by_source)
    }

    /// What an earlier detach of a volume has proven, for a request that found nothing;
    /// `None` if the journal knows no detach of it.
    ///
    /// # Errors
    /// As of [`volume_of`](Self::volume_of).
    pub fn detachment_before(
        &self,
        journal: &JournalView,
        request: &DetachRequest,
        deadline: Deadline,
    ) -> Result<Option<Detachment>> {
        journal.require_read()?;
        let found = resolve_target(self, &request.target, request.backend.clone(), deadline)?;
        let named = |record: &&Record| is_named(&request.target, &found, record);
        let records = journal.detached.iter().filter(named);
        let last = records.max_by_key(|record| record.detached.as_ref().map(Detached::order));
        last.map(|record| detached_before(self, record)).transpose()
    }
}

/// The answer to a repeated detach of a volume.
pub(super) fn detached_before(engine: &Engine, record: &Record) -> Result<Detachment> {
    let names = record.names();
    let place = match &record.spec.nbd {
        Some(nbd) => Place::Nbd {
            index: None,
            backend: Some(nbd.backend.clone()),
        },
        None => Place::Scsi {
            hctl: None,
            name: names.first().cloned(),
        },
    };
    let mut again = Detachment::unchanged(place);
    again.volume = Some(record.volume.clone());
    let Some(detached) = &record.detached else {
        return Ok(again);
    };
    let live = Record {
        detached: None,
        ..record.clone()
    };
    let stands = survey_records(engine, &[live])?.pop();
    let stands = stands.filter(|found| found.condition != Condition::Gone);
    let mut note = format!("it was detached at {}", detached.at);
    if let Some(there) = &stands {
        let _ = write!(note, "; sysfs now shows: {}", there.seen);
    }
    again.detached_at = Some(detached.at.clone());
    again.safe_to_unmap = detached.safe_to_unmap && stands.is_none();
    again.not_looked_at.clone_from(&detached.not_looked_at);
    again.receipt = Some(Receipt {
        names,
        notes: vec![note],
        not_looked_at: detached.not_looked_at.clone(),
        safe_to_unmap: again.safe_to_unmap,
        ..Receipt::default()
    });
    Ok(again)
}

/// Whether the target that was found is a present device of the volume.
fn is_at(engine: &Engine, found: &Resolved, record: &Record, there: &VolumeStatus) -> Result<bool> {
    let wanted = match found {
        Resolved::NbdBackend(id) => {
            let own = record.spec.nbd.as_ref().map(|nbd| &nbd.backend);
            return Ok(own == Some(id));
        }
        Resolved::Nbd(device) => return Ok(there.nbd_index == Some(device.index())),
        Resolved::Scsi(wanted) => wanted,
    };
    let paths = addresses(engine, wanted)?;
    Ok(paths.iter().any(|path| there.paths.contains(path)))
}

/// The addresses of the devices of a SCSI unit that was found.
fn addresses(engine: &Engine, wanted: &ResolvedUnit) -> Result<Vec<Hctl>> {
    let mut paths: Vec<Hctl> = wanted.locked_addresses().into_iter().collect();
    if let Some(map) = &wanted.map {
        for disk in map.paths()? {
            paths.extend(ScsiDevice::of_disk(&disk)?.map(|device| device.hctl()));
        }
    }
    if let Some(name) = &wanted.name {
        let devices = devices_named(engine, name)?;
        paths.extend(devices.iter().map(ScsiDevice::hctl));
    }
    Ok(paths)
}

/// Whether a record says that the target is its volume, wherever the volume is.
fn is_named(target: &DetachTarget, found: &Resolved, record: &Record) -> bool {
    match (target, found) {
        (_, Resolved::NbdBackend(id)) => {
            let own = record.spec.nbd.as_ref().map(|nbd| &nbd.backend);
            own == Some(id)
        }
        (DetachTarget::Source(source), _) => record.spec.has_a_path_of(source),
        (DetachTarget::Unit(name), _) => name.is_unique() && record.names().contains(name),
        (DetachTarget::Device(_), _) => false,
    }
}
