//! The right to work on one volume of a journal, and to write its record.

use std::sync::{Arc, PoisonError};

use super::conflict::{self, Reservation};
use super::record::{Record, VolumeSpec};
use super::{InFlight, Journal, Shared, Table, file};
use crate::crash::point;
use crate::deadline::Deadline;
use crate::engine::unit::place::PathPlace;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, VolumeId};
use crate::kernel::worker;
use crate::scsi::Identity;

/// One caller's turn at a volume. A write that the file system does not come
/// back from keeps it, so that nothing older can come after something newer.
#[derive(Debug)]
pub(in crate::engine) struct VolumeGuard {
    shared: Arc<Shared>,
    volume: VolumeId,
}

impl Journal {
    /// Waits until nobody works on the volume, and takes the turn. With `wanted`
    /// it is to be attached so: what stands against that is refused here.
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
            let woken = self.shared.freed.wait_timeout(table, deadline.max_sleep());
            table = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        if let Some(wanted) = wanted {
            if let Some(known) = table.records.get(volume) {
                conflict::with_itself(known, wanted)?;
            }
            for other in table.others(volume) {
                conflict::with_another(volume, wanted, other)?;
            }
        }
        let in_flight = InFlight {
            spec: wanted.cloned(),
            names: Vec::new(),
        };
        table.in_flight.insert(volume.clone(), in_flight);
        drop(table);
        Ok(Arc::new(VolumeGuard {
            shared: Arc::clone(&self.shared),
            volume: volume.clone(),
        }))
    }

    /// The volume that a unit is, or that is meant to be at its address.
    pub(in crate::engine) fn owner_of(&self, identity: &Identity, hctl: Hctl) -> Option<VolumeId> {
        Reservation::owner(self.shared.table().reservations(), identity, hctl)
    }
}

impl Table {
    /// What all volumes lay claim to.
    fn reservations(&self) -> impl Iterator<Item = Reservation<'_>> {
        let in_flight = self.in_flight.iter().filter_map(|(volume, in_flight)| {
            // Who was not told how it is wanted goes on with what its record says.
            let known = || self.records.get(volume).map(|record| &record.spec);
            let (spec, names) = (in_flight.spec.as_ref().or_else(known)?, &*in_flight.names);
            Some(Reservation {
                volume,
                spec,
                names,
            })
        });
        let known = self.records.values().map(Reservation::of);
        known.chain(in_flight)
    }

    /// What the other volumes lay claim to.
    fn others<'a>(&'a self, volume: &'a VolumeId) -> impl Iterator<Item = Reservation<'a>> {
        let reservations = self.reservations();
        reservations.filter(move |other| other.volume != volume)
    }
}

impl VolumeGuard {
    /// The volume's record.
    pub(in crate::engine) fn record(&self) -> Option<Record> {
        self.shared.table().records.get(&self.volume).cloned()
    }

    /// Claims the unit that the volume's source was found to lead to.
    ///
    /// # Errors
    /// `InUse` where it is another volume's; `IdentityMismatch` where the volume
    /// was another unit.
    pub(in crate::engine) fn claim_unit(
        &self,
        identity: &Identity,
        places: &[PathPlace],
    ) -> Result<()> {
        let mut table = self.shared.table();
        if let Some(known) = table.records.get(&self.volume) {
            conflict::with_own_unit(known, identity)?;
        }
        for other in table.others(&self.volume) {
            conflict::with_unit(&self.volume, (identity, places), other)?;
        }
        if let Some(in_flight) = table.in_flight.get_mut(&self.volume) {
            in_flight.names.clone_from(&identity.names);
        }
        Ok(())
    }

    /// Whether the unit at this place is another volume's.
    pub(in crate::engine) fn is_anothers(&self, identity: &Identity, place: &PathPlace) -> bool {
        let table = self.shared.table();
        let mut others = table.others(&self.volume);
        others.any(|other| other.owns(identity, place))
    }

    /// Writes the record; one that says of no boot is of this one.
    ///
    /// # Errors
    /// `Io` where the disk is full; `InUse` where something is at its place that
    /// could not be set aside; `TimedOut` at stage `journal`, and then it may
    /// still be written.
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
            let known = guard.shared.table().records.contains_key(&guard.volume);
            if !known && path.symlink_metadata().is_ok() {
                let message =
                    "the file at its place is no readable record, or could not be set aside";
                return Err(Error::new(ErrorKind::InUse, message).with_path(path));
            }
            file::replace(directory, name, &bytes)?;
            // It is there, whatever becomes of the rest.
            let volume = guard.volume.clone();
            guard.shared.table().records.insert(volume, record);
            (guard.shared.sync)(directory)?;
            point!(JournalKept);
            Ok(())
        })
    }

    /// Writes down what is about to be done. Where that fails nothing may be done, and the
    /// record is as it was before: nobody finishes what its caller was refused. After a
    /// timeout the intent may still be written, and stays.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(in crate::engine) fn begin(
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
                None => self.remove(limit),
            };
            if let Err(error) = restored {
                tracing::warn!(%error, "the record is restored, and may not outlive the machine");
            }
        }
        Err(error)
    }

    /// Removes the record: nothing of the volume is left on this machine.
    ///
    /// # Errors
    /// `Io` where the record stays, or where it went and the disk was not told so;
    /// `TimedOut` at stage `journal`, and then it may still go.
    pub(in crate::engine) fn remove(self: &Arc<Self>, deadline: Deadline) -> Result<()> {
        self.run(deadline, |guard, name| {
            file::remove(&guard.shared.directory, name)?;
            // It is gone, whatever becomes of the rest.
            guard.shared.table().records.remove(&guard.volume);
            (guard.shared.sync)(&guard.shared.directory)?;
            point!(JournalForgotten);
            Ok(())
        })
    }

    fn run(
        self: &Arc<Self>,
        deadline: Deadline,
        act: impl FnOnce(&Self, &str) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let guard = Arc::clone(self);
        let name = file::name_of(&self.volume);
        worker::run(
            Stage::Journal,
            &format!("the record of volume {} to be written", self.volume),
            deadline,
            || "the journal's file system has not returned".to_owned(),
            move || act(&guard, &name),
        )
    }
}

impl Drop for VolumeGuard {
    fn drop(&mut self) {
        self.shared.table().in_flight.remove(&self.volume);
        self.shared.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::{AttachRequest, Engine};
    use crate::id::Source;
    use crate::kernel::Roots;

    #[test]
    fn a_unit_is_claimed_once_also_by_those_who_go_on_with_what_their_records_say() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let deadline = Deadline::after(Duration::from_secs(30));
        let journal = engine.open_journal(deadline).unwrap();
        let turns = [1, 2].map(|lun| {
            let volume: VolumeId = format!("pvc-{lun}").parse().unwrap();
            let source: Source = format!("scsi:{lun}:0:0:1").parse().unwrap();
            let record = Record {
                volume: volume.clone(),
                spec: VolumeSpec::of(&AttachRequest::new(source)),
                intent: None,
                outcome: None,
                boot: None,
            };
            let guard = journal.guard(&volume, None, deadline).unwrap();
            guard.write(record, deadline).unwrap();
            guard
        });
        let identity = Identity {
            names: vec!["naa.5000c500a1b2c3d4".parse().unwrap()],
            ..Identity::default()
        };
        turns[0].claim_unit(&identity, &[]).unwrap();
        let error = turns[1].claim_unit(&identity, &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        assert!(error.to_string().contains("pvc-1"), "{error}");
    }
}
