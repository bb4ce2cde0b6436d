//! The detach of a volume by the caller's name of it.

use std::sync::Arc;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::detach::receipt::DetachFailure;
use crate::engine::detach::{DetachRequest, DetachTarget, Detachment, Place};
use crate::engine::journal::{Detached, Intent, Journal, Operation, Record, VolumeGuard};
use crate::engine::timing::StageObserver;
use crate::engine::usage::Extent;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Source, VolumeId};
use crate::uevent::{self, Mode};

/// How a volume is detached.
#[derive(Debug, Clone, Default)]
pub struct DetachVolume {
    pub(super) abandon: bool,
    pub(super) keep_sessions: bool,
    pub(super) observer: Option<StageObserver>,
}

impl DetachVolume {
    /// As [`DetachRequest::abandon_unwritten`]: **what was not written is lost**.
    #[must_use]
    pub fn abandon_unwritten(mut self) -> Self {
        self.abandon = true;
        self
    }

    /// As [`DetachRequest::keep_sessions`].
    #[must_use]
    pub fn keep_sessions(mut self) -> Self {
        self.keep_sessions = true;
        self
    }

    /// Calls `observer` for each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }

    fn request(&self, target: impl Into<DetachTarget>) -> DetachRequest {
        let mut request = DetachRequest::new(target);
        if self.abandon {
            request = request.abandon_unwritten();
        }
        if self.keep_sessions {
            request = request.keep_sessions();
        }
        match &self.observer {
            Some(observer) => request.observe(observer.clone()),
            None => request,
        }
    }
}

impl Engine {
    /// As [`detach`](Self::detach), for a volume of the journal. Its devices are found by the
    /// names that were read back, wherever they are now. When nothing of it is left, its
    /// record says so, and a repeated detach answers from the record: with `changed: false`
    /// and what the first detach has proven, unless a device is there again where the volume
    /// was.
    ///
    /// If no attach finished, the volume's sources are detached as well, once the kernel has
    /// ended the scans that were begun there, even for a process that was killed; the answer
    /// is for all of them. A device there that belongs to another volume, or is another unit
    /// than expected, is left alone; one that does not report its identity refuses the
    /// detach. A session that was made for the volume is logged out, even if it brought no
    /// device, unless other devices are on it.
    ///
    /// A refusal leaves the record as it was. A detach that was done in part, or timed out,
    /// stays in the record as begun, and a repeated detach or a [`recover`](Self::recover)
    /// finishes it.
    ///
    /// # Errors
    /// `InUse` at stage `journal`, with both names, if the record of another volume claims the
    /// same source, backend id or unit: [forget](Journal::forget) the wrong one first.
    /// `NotFound` if the journal has no such volume and does not know its detach; at stage
    /// `journal` `Io` (the disk is full) and `TimedOut`. Else those of
    /// [`detach`](Self::detach).
    #[tracing::instrument(skip_all, fields(%volume))]
    pub fn detach_volume(
        &self,
        journal: &Journal,
        volume: &VolumeId,
        how: &DetachVolume,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        let guard = journal.guard(volume, None, deadline)?;
        let Some(record) = guard.record() else {
            let before = guard.detached().ok_or_else(|| unknown(volume))?;
            return Ok(self.detached_before(before)?);
        };
        let is_detach = |intent: &Intent| matches!(intent.operation, Operation::Detach { .. });
        if !how.abandon && record.intent.as_ref().is_some_and(is_detach) {
            self.wait_for_probe_of(&record, deadline)?;
        }
        self.detach_guarded(&guard, record, how, deadline)
    }

    /// Waits for udev before an unfinished detach of an NBD device is tried again. The
    /// process that was killed in it may have told the kernel to disconnect. The device then
    /// stays until its last close, which may be that of udev's probe, and fails all I/O, so
    /// that a flush would seem to lose what the flush before it wrote.
    pub(super) fn wait_for_probe_of(&self, record: &Record, deadline: Deadline) -> Result<()> {
        let Some(nbd) = &record.spec.nbd else {
            return Ok(());
        };
        let Some(device) = self.nbd_of(&nbd.backend)? else {
            return Ok(());
        };
        let (roots, mode, disk) = (self.roots(), self.hub().mode(), device.disk());
        let mut watch = self.hub().watch(&device.index().name());
        let users = self.users_of(disk, Extent::BesideClaim, deadline)?;
        if mode == Mode::Udev && users.has_udev() {
            // A probe may hang on a dead link, and then the flush is tried nevertheless.
            let limit = deadline.half();
            let _or_not = uevent::settle_again(&mut watch, mode, roots, disk.dir(), limit);
        }
        Ok(())
    }

    pub(super) fn detach_guarded(
        &self,
        guard: &Arc<VolumeGuard>,
        record: Record,
        how: &DetachVolume,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        guard.require_sole_owner(&record)?;
        let operation = Operation::Detach {
            abandon_unwritten: how.abandon,
        };
        let intent = Record {
            intent: Some(Intent::now(operation)),
            ..record.clone()
        };
        guard.begin(intent, deadline)?;
        let failure = match self.detach_all(guard, &record, how, deadline) {
            Ok(mut detachment) => {
                detachment.volume = Some(record.volume.clone());
                let detached = Detached::of(&detachment);
                return match guard.finish(record, detached, deadline.for_rollback()) {
                    Ok(()) => Ok(detachment),
                    Err(error) => Err(DetachFailure::after(error, detachment.receipt)),
                };
            }
            Err(failure) => failure,
        };
        let receipt = &failure.receipt;
        let in_part = receipt.paths.iter().any(|path| path.gone)
            || receipt.map.as_ref().is_some_and(|map| map.gone);
        if failure.kind() != ErrorKind::TimedOut
            && !in_part
            && let Err(error) = guard.write(record, deadline.for_rollback())
        {
            tracing::warn!(%error, "the intent stays in the journal");
        }
        Err(failure)
    }

    fn detach_all(
        &self,
        guard: &VolumeGuard,
        record: &Record,
        how: &DetachVolume,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        let mut done = self.detach_devices(guard, record, how, deadline)?;
        if let Some(log_in) = record.spec.log_in.as_ref().filter(|_| !how.keep_sessions) {
            let sources = &record.spec.sources;
            match self.end_sessions_of(sources, &log_in.initiator, deadline) {
                Ok(ended) => done.logged_out.extend(ended),
                Err(error) => return Err(DetachFailure::after(error, done.receipt)),
            }
        }
        Ok(done)
    }

    fn detach_devices(
        &self,
        guard: &VolumeGuard,
        record: &Record,
        how: &DetachVolume,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        let mut done = None;
        let names = record.names();
        let has_weak_name = names.first().is_some_and(|name| !name.is_unique());
        if has_weak_name || (names.is_empty() && self.has_weak_paths(record)?) {
            return self.detach_by_sources(guard, record, how, deadline);
        }
        if let Some(name) = names.first() {
            // Asked before the detach logs out the sessions over which the kernel scans.
            let may_come = self.is_being_scanned(record)?;
            let unit = DetachTarget::Unit(name.clone());
            let detachment = self.detach(how.request(unit), deadline)?;
            if record.outcome.is_some() && !may_come {
                return Ok(detachment);
            }
            // A scan may have brought a device whose identity nobody has read yet.
            done = Some(detachment);
        }
        for source in &record.spec.sources {
            let next = self.detach_source(guard, record, source, how, deadline);
            done = Some(match (done, next) {
                (None, next) => next?,
                (Some(done), Ok(next)) => done.and(next),
                (Some(done), Err(failure)) => return Err(failure.after_part(done.receipt)),
            });
        }
        done.ok_or_else(|| unknown(&record.volume).into())
    }

    /// Whether a volume whose unit is not identified yet has several paths now, all of one
    /// unit without a unique name. A map may hold them.
    fn has_weak_paths(&self, record: &Record) -> Result<bool> {
        let devices = self.address_scan(record)?.scsi;
        let mut identities = Vec::new();
        for device in &devices {
            identities.push(device.cached_identity()?);
        }
        let mut paths = devices.iter().zip(&identities);
        let Some(first) = paths.next().filter(|(_, identity)| identity.is_weak()) else {
            return Ok(false);
        };
        Ok(devices.len() > 1 && paths.all(|path| self.may_be_one_unit(first, path)))
    }

    /// Detaches a volume whose unit has no unique name. Its name alone does not show that a
    /// device is the volume's, so the devices at its sources are detached, all in one request,
    /// as a map needs it.
    fn detach_by_sources(
        &self,
        guard: &VolumeGuard,
        record: &Record,
        how: &DetachVolume,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        let names = record.names();
        let mut request: Option<DetachRequest> = None;
        for source in &record.spec.sources {
            self.wait_for_scans(&self.scsi_addresses_of(source)?, deadline)?;
            if self.leads_to_another(guard, record, source)? {
                continue;
            }
            request = Some(match request {
                Some(request) => request.path(source.clone()),
                None => how.request(source.clone()),
            });
        }
        let Some(mut request) = request else {
            return Ok(Detachment::unchanged(NOWHERE));
        };
        if let Some(expected) = names.first() {
            request = request.expect(expected.clone());
        }
        self.detach(request, deadline)
    }

    fn detach_source(
        &self,
        guard: &VolumeGuard,
        record: &Record,
        source: &Source,
        how: &DetachVolume,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        let mut request = how.request(source.clone());
        if let Some(nbd) = &record.spec.nbd {
            return self.detach(request.backend(nbd.backend.clone()), deadline);
        }
        let names = record.names();
        let expected = names.first();
        self.wait_for_scans(&self.scsi_addresses_of(source)?, deadline)?;
        if self.leads_to_another(guard, record, source)? {
            // Only its address is known, and the device there is not the volume's.
            return Ok(Detachment::unchanged(NOWHERE));
        }
        if let Some(expected) = expected {
            request = request.expect(expected.clone());
        }
        self.detach(request, deadline)
    }
}

/// The place of a detach that found no device of its volume.
const NOWHERE: Place = Place::Scsi {
    hctl: None,
    name: None,
};

pub(super) fn unknown(volume: &VolumeId) -> Error {
    let message = format!("the journal has no volume {volume}");
    Error::new(ErrorKind::NotFound, message).at(Stage::Journal)
}
