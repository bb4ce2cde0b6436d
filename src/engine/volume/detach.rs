//! The detach of a volume by the caller's name of it.

use std::sync::Arc;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::addresses::wait_for_scans;
use crate::engine::detach::receipt::DetachFailure;
use crate::engine::detach::{DetachRequest, DetachTarget, Detachment, Place};
use crate::engine::iscsi::sessions::end_sessions_of;
use crate::engine::journal::{Detached, Intent, Journal, Operation, Record, VolumeGuard};
use crate::engine::nbd::backend::device_of_backend;
use crate::engine::timing::StageObserver;
use crate::engine::unit::KnownUnit;
use crate::engine::unit::place::may_be_one_unit;
use crate::engine::usage::{Extent, users_of};
use crate::engine::volume::devices_at_sources::{
    devices_at_sources, leads_to_another, may_bring_a_device, returned_disk_of, scsi_addresses_of,
};
use crate::engine::volume::of_target::detached_before;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Source, VolumeId, Wwid};
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
        request.keep_sessions = self.keep_sessions;
        request.observer.clone_from(&self.observer);
        request
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
    /// A refusal leaves the record as it was. A detach that was done in part, timed out or was
    /// cancelled stays in the record as begun, and a repeated detach or a
    /// [`recover`](Self::recover) finishes it.
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
            return Ok(detached_before(self, before)?);
        };
        let is_detach = |intent: &Intent| matches!(intent.operation, Operation::Detach { .. });
        if !how.abandon && record.intent.as_ref().is_some_and(is_detach) {
            wait_for_probe_of(self, &record, deadline)?;
        }
        detach_guarded(self, &guard, record, how, deadline)
    }
}

/// Waits for udev before an unfinished detach of an NBD device is tried again. The
/// process that was killed in it may have told the kernel to disconnect. The device then
/// stays until its last close, which may be that of udev's probe, and fails all I/O, so
/// that a flush would seem to lose what the flush before it wrote.
pub(super) fn wait_for_probe_of(
    engine: &Engine,
    record: &Record,
    deadline: Deadline,
) -> Result<()> {
    let Some(nbd) = &record.spec.nbd else {
        return Ok(());
    };
    let Some(device) = device_of_backend(engine, &nbd.backend)? else {
        return Ok(());
    };
    let (roots, mode, disk) = (engine.roots(), engine.hub().mode(), device.disk());
    let mut watch = engine.hub().watch(&device.index().name());
    let users = users_of(engine, disk, Extent::NotExcludedByClaim, deadline)?;
    if mode == Mode::Udev && users.has_udev() {
        // A probe may hang on a dead link, and then the flush is tried nevertheless.
        let limit = deadline.half();
        let _or_not = uevent::settle_again(&mut watch, mode, roots, disk.dir(), limit);
    }
    Ok(())
}

pub(super) fn detach_guarded(
    engine: &Engine,
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
    guard.write_intent(intent, deadline)?;
    let detach = GuardedDetach {
        engine,
        guard,
        record: &record,
        how,
        deadline,
    };
    let failure = match detach.run() {
        Ok(mut detachment) => {
            detachment.volume = Some(record.volume.clone());
            let detached = Detached::of(&detachment);
            return match guard.record_detach(record, detached, deadline.for_rollback()) {
                Ok(()) => Ok(detachment),
                Err(error) => Err(DetachFailure::after(error, detachment.receipt)),
            };
        }
        Err(failure) => failure,
    };
    let receipt = &failure.receipt;
    let in_part = receipt.paths.iter().any(|path| path.gone)
        || receipt.map.as_ref().is_some_and(|map| map.gone);
    // The kernel may go on with the last call of a detach that timed out or was cancelled.
    if !failure.kind().is_timeout_or_cancel()
        && !in_part
        && let Err(error) = guard.write(record, deadline.for_rollback())
    {
        tracing::warn!(%error, "the intent stays in the journal");
    }
    Err(failure)
}

/// The detach of a volume whose record says that it has begun.
struct GuardedDetach<'a> {
    engine: &'a Engine,
    guard: &'a VolumeGuard,
    record: &'a Record,
    how: &'a DetachVolume,
    deadline: Deadline,
}

impl GuardedDetach<'_> {
    fn run(&self) -> Result<Detachment, DetachFailure> {
        let mut done = self.detach_devices()?;
        let spec = &self.record.spec;
        if let Some(log_in) = spec.log_in.as_ref().filter(|_| !self.how.keep_sessions) {
            let initiator = &log_in.initiator;
            match end_sessions_of(self.engine, &spec.sources, initiator, self.deadline) {
                Ok(ended) => done.logged_out.extend(ended),
                Err(error) => return Err(DetachFailure::after(error, done.receipt)),
            }
        }
        Ok(done)
    }

    fn detach_devices(&self) -> Result<Detachment, DetachFailure> {
        let (engine, record) = (self.engine, self.record);
        let mut done = None;
        let names = record.names();
        let has_weak_name = names.first().is_some_and(|name| !name.is_unique());
        if has_weak_name || (names.is_empty() && self.has_weak_paths()?) {
            // Its name alone does not show that a device is the volume's, and a map needs
            // all of its paths in one request.
            return self.detach_at(&record.spec.sources);
        }
        if let Some(name) = names.first() {
            // The call checks for scans before the detach logs out the sessions over which
            // the kernel scans.
            let is_scanned = may_bring_a_device(engine, record)?;
            let unit = DetachTarget::Unit(name.clone());
            let detachment = engine.detach(self.how.request(unit), self.deadline)?;
            if detachment.safe_to_unmap {
                self.refuse_if_disk_stands(name)
                    .map_err(|error| DetachFailure::after(error, None))?;
            }
            if record.outcome.is_some() && !is_scanned {
                return Ok(detachment);
            }
            // A scan may have brought a device whose identity nobody has read yet.
            done = Some(detachment);
        }
        for source in &record.spec.sources {
            let next = self.detach_at(std::slice::from_ref(source));
            done = Some(match (done, next) {
                (None, next) => next?,
                (Some(done), Ok(next)) => done.and(next),
                (Some(done), Err(failure)) => return Err(failure.after_part(done.receipt)),
            });
        }
        done.ok_or_else(|| unknown(&record.volume).into())
    }

    /// Refuses where nothing has the unit's name any more, and the disk that the attach returned
    /// is there: the array has given its address to another unit, the kernel has read that one's
    /// names, and the record of the first names is lost.
    ///
    /// # Errors
    /// `IdentityMismatch`, which names the disk.
    fn refuse_if_disk_stands(&self, name: &Wwid) -> Result<()> {
        let Some(disk) = returned_disk_of(self.engine, self.record)? else {
            return Ok(());
        };
        let node = disk.node(self.engine.roots());
        let message = format!(
            "the attach of this volume returned {}, which is there and is not {name} any more: \
             the array has given its address to another unit; end its use and delete that \
             device, then detach again",
            node.display()
        );
        Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Identify))
    }

    /// Whether a volume whose unit is not identified yet has several paths now, all of one
    /// unit without a unique name. A map may hold them.
    fn has_weak_paths(&self) -> Result<bool> {
        let devices = devices_at_sources(self.engine, self.record)?.scsi;
        let mut identities = Vec::new();
        for device in &devices {
            identities.push(KnownUnit::of(self.engine, device)?.was);
        }
        let mut paths = devices.iter().zip(&identities);
        let Some(first) = paths.next().filter(|(_, identity)| identity.is_weak()) else {
            return Ok(false);
        };
        Ok(devices.len() > 1 && paths.all(|path| may_be_one_unit(self.engine, first, path)))
    }

    /// Detaches what is at these sources, all in one request.
    fn detach_at(&self, sources: &[Source]) -> Result<Detachment, DetachFailure> {
        let (engine, record, deadline) = (self.engine, self.record, self.deadline);
        let mut request: Option<DetachRequest> = None;
        for source in sources {
            if record.spec.nbd.is_none() {
                wait_for_scans(engine, &scsi_addresses_of(engine, source)?, deadline)?;
                if leads_to_another(engine, self.guard, record, source)? {
                    // Only its address is known, and the device there is not the volume's.
                    continue;
                }
            }
            request = Some(match request {
                Some(request) => request.path(source.clone()),
                None => self.how.request(source.clone()),
            });
        }
        let Some(mut request) = request else {
            return Ok(Detachment::unchanged(NOWHERE));
        };
        match &record.spec.nbd {
            Some(nbd) => request.backend = Some(nbd.backend.clone()),
            None => request.expected = record.names().first().cloned(),
        }
        engine.detach(request, deadline)
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
