//! The right to work on one volume of a journal, and to write its record.

use std::sync::Arc;

use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::engine::journal::conflict::{self, Reservation};
use crate::engine::journal::record::{Detached, Record};
use crate::engine::journal::spec::VolumeSpec;
use crate::engine::journal::{InFlight, Journal, Shared, file};
use crate::engine::unit::place::PathPlace;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, VolumeId};
use crate::kernel::worker;
use crate::scsi::Identity;

/// One caller's right to work on a volume. A write that hangs in the file system keeps the
/// guard, so that no older record can replace a newer one.
#[derive(Debug)]
pub(in crate::engine) struct VolumeGuard {
    shared: Arc<Shared>,
    volume: VolumeId,
    /// The record of the volume's detach, as it was when the guard was taken.
    detached: Option<Record>,
}

impl Journal {
    /// Waits until no other caller works on the volume, and takes its guard. If `wanted` is
    /// given, the caller is about to attach the volume with these options, and this call
    /// refuses conflicts.
    ///
    /// # Errors
    /// `TimedOut` at stage `lock`; the refusals of `conflict`.
    pub(in crate::engine) fn guard(
        &self,
        volume: &VolumeId,
        wanted: Option<&VolumeSpec>,
        deadline: Deadline,
    ) -> Result<Arc<VolumeGuard>> {
        let mut table = self.shared.table();
        while table.in_flight.contains_key(volume) {
            if deadline.has_passed() {
                let what = format!("another thread to finish with volume {volume}");
                return Err(Error::timed_out(Stage::Lock, deadline, &what));
            }
            self.shared.freed.wait_for(&mut table, deadline.max_sleep());
        }
        if let Some(wanted) = wanted {
            if let Some(known) = table.records.get(volume) {
                conflict::refuse_spec_change(known, wanted)?;
            }
            for other in table.others(volume) {
                conflict::refuse_shared_claim(volume, wanted, other)?;
            }
        }
        let in_flight = InFlight {
            spec: wanted.cloned(),
            names: Vec::new(),
        };
        table.in_flight.insert(volume.clone(), in_flight);
        let detached = table.detached.get(volume).cloned();
        drop(table);
        Ok(Arc::new(VolumeGuard {
            shared: Arc::clone(&self.shared),
            volume: volume.clone(),
            detached,
        }))
    }

    /// The volume to which a unit belongs, or which is meant to be at its address.
    pub(in crate::engine) fn owner_of(&self, identity: &Identity, hctl: Hctl) -> Option<VolumeId> {
        Reservation::owner(self.shared.table().reservations(), identity, hctl)
    }
}

impl VolumeGuard {
    /// The volume's record.
    pub(in crate::engine) fn record(&self) -> Option<Record> {
        self.shared.table().records.get(&self.volume).cloned()
    }

    /// The record of the volume's detach, if that was proven before the guard was taken.
    pub(in crate::engine) fn detached(&self) -> Option<&Record> {
        self.detached.as_ref()
    }

    /// Claims the unit to which the volume's source leads.
    ///
    /// # Errors
    /// `InUse` if the unit belongs to another volume; `IdentityMismatch` if the volume was
    /// another unit.
    pub(in crate::engine) fn claim_unit(
        &self,
        identity: &Identity,
        places: &[PathPlace],
    ) -> Result<()> {
        let mut table = self.shared.table();
        if let Some(known) = table.records.get(&self.volume) {
            conflict::refuse_other_unit(known, identity)?;
        }
        for other in table.others(&self.volume) {
            conflict::refuse_shared_unit(&self.volume, (identity, places), other)?;
        }
        if let Some(in_flight) = table.in_flight.get_mut(&self.volume) {
            in_flight.names.clone_from(&identity.names);
        }
        Ok(())
    }

    /// # Errors
    /// `InUse` if another volume has a source, the backend id or the unit of this record.
    pub(in crate::engine) fn require_sole_owner(&self, record: &Record) -> Result<()> {
        let units = record.names().into_iter().map(|name| VolumeSpec {
            expect: Some(name),
            ..record.spec.clone()
        });
        let table = self.shared.table();
        for claimed in units.chain([record.spec.clone()]) {
            for other in table.others(&self.volume) {
                conflict::refuse_shared_claim(&self.volume, &claimed, other)?;
            }
        }
        Ok(())
    }

    /// Whether the unit at this place belongs to another volume.
    pub(in crate::engine) fn belongs_to_another(
        &self,
        identity: &Identity,
        place: &PathPlace,
    ) -> bool {
        let table = self.shared.table();
        let mut others = table.others(&self.volume);
        others.any(|other| other.owns(identity, place))
    }

    /// Writes the record. A record without a boot gets the present one.
    ///
    /// # Errors
    /// `Io` if the disk is full; `InUse` if a file that could not be set aside is at its
    /// place; `TimedOut` at stage `journal`, and then the record may still be written.
    pub(in crate::engine) fn write(
        self: &Arc<Self>,
        mut record: Record,
        deadline: Deadline,
    ) -> Result<()> {
        if record.boot.is_none() {
            record.boot.clone_from(&self.shared.boot);
        }
        let bytes = record.to_bytes()?;
        self.run(deadline, move |guard, name| {
            let directory = &guard.shared.directory;
            let path = directory.join(name);
            let table = guard.shared.table();
            let is_live = table.records.contains_key(&guard.volume);
            let known = is_live || table.detached.contains_key(&guard.volume);
            drop(table);
            if !known && path.symlink_metadata().is_ok() {
                let message =
                    "the file at its place is no readable record, or could not be set aside";
                return Err(Error::new(ErrorKind::InUse, message).with_path(path));
            }
            file::replace(directory, name, &bytes)?;
            // The record is there, even if the sync fails.
            guard.shared.table().insert(record);
            (guard.shared.sync)(directory)?;
            crash_point!(JournalKept);
            Ok(())
        })
    }

    /// Writes the intent. If the write fails, the caller must not do the operation. This call then
    /// restores the record, so that no recovery finishes the refused operation. After a timeout the
    /// intent may still be written, and then it stays.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(in crate::engine) fn write_intent(
        self: &Arc<Self>,
        intent: Record,
        deadline: Deadline,
    ) -> Result<()> {
        let before = self.record();
        let Err(error) = self.write(intent, deadline) else {
            return Ok(());
        };
        if !error.kind().is_timeout_or_cancel() && self.record() != before {
            let limit = deadline.for_rollback();
            let restored = match before {
                Some(before) => self.write(before, limit),
                None => self.restore_record(limit),
            };
            if let Err(error) = restored {
                tracing::warn!(%error, "the record is restored, and may not outlive the machine");
            }
        }
        Err(error)
    }

    /// Writes into the record that nothing of the volume is left on this machine. If the
    /// write fails, as on a full disk, this call removes the record. Then only the answer
    /// to a repeated detach is lost.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub(in crate::engine) fn record_detach(
        self: &Arc<Self>,
        record: Record,
        mut detached: Detached,
        deadline: Deadline,
    ) -> Result<()> {
        detached.sequence = self.shared.table().next_sequence();
        let record = Record {
            intent: None,
            detached: Some(detached),
            ..record
        };
        match self.write(record, deadline) {
            Ok(()) => {}
            Err(error) if error.kind().is_timeout_or_cancel() => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "lunbd cannot record the detach and removes the record");
                return self.remove(deadline);
            }
        }
        let removed = self.run(deadline, |guard, _| guard.shared.remove_oldest_detached());
        if let Err(error) = removed {
            // The next detach of any volume tries again.
            tracing::warn!(%error, "old records of detached volumes stay");
        }
        Ok(())
    }

    /// Restores the record as it was before an attach that has left nothing.
    ///
    /// # Errors
    /// As [`write`](Self::write) and [`remove`](Self::remove).
    pub(in crate::engine) fn restore_record(self: &Arc<Self>, deadline: Deadline) -> Result<()> {
        match &self.detached {
            Some(record) => self.write(record.clone(), deadline),
            None => self.remove(deadline),
        }
    }

    /// Removes the record, also that of a proven detach.
    ///
    /// # Errors
    /// `Io` if the record stays, or if it went and the directory could not be synced;
    /// `TimedOut` at stage `journal`, and then the record may still go.
    pub(in crate::engine) fn remove(self: &Arc<Self>, deadline: Deadline) -> Result<()> {
        self.run(deadline, |guard, name| {
            file::remove(&guard.shared.directory, name)?;
            // The record is gone, even if the sync fails.
            guard.shared.table().remove(&guard.volume);
            (guard.shared.sync)(&guard.shared.directory)?;
            crash_point!(JournalForgotten);
            Ok(())
        })
    }

    fn run(
        self: &Arc<Self>,
        deadline: Deadline,
        work: impl FnOnce(&Self, &str) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let guard = Arc::clone(self);
        let name = file::name_of(&self.volume);
        worker::run(
            Stage::Journal,
            &format!("the record of volume {} to be written", self.volume),
            deadline,
            || "the journal's file system has not returned".to_owned(),
            move || work(&guard, &name),
        )
    }
}

impl Shared {
    /// Removes the records of the volumes that were detached longest ago, beyond those that are
    /// kept. Meanwhile no caller gets the guard of such a volume: its new record would be
    /// removed.
    fn remove_oldest_detached(&self) -> Result<()> {
        // Two callers at once would each count the records that the other one removes.
        let Some(_alone) = self.removal.try_lock() else {
            return Ok(());
        };
        let volumes = self.table().guard_oldest_detached();
        let remove = |volume: &VolumeId| {
            file::remove(&self.directory, &file::name_of(volume))?;
            self.table().detached.remove(volume);
            Ok(())
        };
        let removed = volumes.iter().try_for_each(remove);
        let mut table = self.table();
        for volume in &volumes {
            table.in_flight.remove(volume);
        }
        drop(table);
        self.freed.notify_all();
        removed
    }
}

impl Drop for VolumeGuard {
    fn drop(&mut self) {
        self.shared.table().in_flight.remove(&self.volume);
        self.shared.freed.notify_all();
    }
}

#[cfg(test)]
mod tests;
