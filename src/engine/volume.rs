//! Attach, detach and resize of a volume by the caller's name of it, with the journal: the engine
//! writes down what it is about to do, does it, and reads the result back.

mod content;
mod detach;
mod devices_at_sources;
mod of_target;
pub(super) mod recover;
mod resize;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::deadline::Deadline;
use crate::engine::attach::UnitClaim;
use crate::engine::journal::{
    Intent, Journal, Operation, Outcome, Record, VolumeGuard, VolumeSpec,
};
use crate::engine::usage::failed_flush::{self, LossMarks};
use crate::engine::volume::devices_at_sources::{
    DevicesAtSources, devices_at_sources, is_being_scanned,
};
use crate::engine::{AttachRequest, Attachment, Engine};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::VolumeId;
use crate::kernel::machine;
pub use detach::DetachVolume;

impl Engine {
    /// As [`attach`](Self::attach), for a volume of the journal: the intent is on the disk
    /// before anything is done, and what was read back is on the disk when this returns.
    /// Repeating it is safe, also with further paths or other timeouts. Once the unit has
    /// reported its identity, the volume is that unit, even if the caller expects none.
    ///
    /// An attach that fails or is cancelled restores the record, if the devices that it
    /// brought could be removed again. One that times out leaves its intent, and a repeated
    /// attach, a detach or a [`recover`](Self::recover) continues it. Minimum kernel: that of
    /// the attach, and 5.14 for NBD, whose devices are found again by their backend id.
    ///
    /// # Errors
    /// Before anything is done: `InvalidInput` if the request holds a CHAP secret, which no
    /// journal stores; `InUse` if the volume must be detached first, because it is known from
    /// another source, under another backend id, as another initiator, or as an NBD device
    /// with another access, block size or count of connections; `InUse`, with both names, if
    /// the source, backend id or unit belongs to another volume; `IdentityMismatch` if the
    /// volume is known as another unit; at stage `journal` `Io` (the disk is full) and
    /// `TimedOut`. `InUse` also if the source turns out to lead to another volume's unit: the
    /// devices that the attach brought are then removed again. After the attach at stage
    /// `journal`: the device is attached, as the error says. Else those of
    /// [`attach`](Self::attach).
    #[tracing::instrument(skip_all, fields(%volume))]
    pub fn attach_volume(
        &self,
        journal: &Journal,
        volume: &VolumeId,
        request: &AttachRequest,
        deadline: Deadline,
    ) -> Result<Attachment> {
        let at = |error: Error| error.at(Stage::Journal);
        request.require_repeatable().map_err(at)?;
        let spec = VolumeSpec::of(request);
        let is_old =
            || Ok::<_, Error>(machine::kernel_version(self.roots()).map_err(at)? < (5, 14));
        if spec.nbd.is_some() && is_old()? {
            let message = "this kernel stores no backend ids, which a journal needs to find NBD \
                           devices: run Linux 5.14 or later";
            return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Journal));
        }
        let guard = journal.guard(volume, Some(&spec), deadline)?;
        let before = guard.record();
        let intent = Record {
            volume: volume.clone(),
            spec,
            intent: Some(Intent::now(Operation::Attach)),
            outcome: before.as_ref().and_then(|before| before.outcome.clone()),
            boot: None,
            detached: None,
        };
        attach_guarded(self, &guard, before, intent, request, deadline)
    }
}

/// Writes `intent`, and attaches the volume as it says.
pub(super) fn attach_guarded(
    engine: &Engine,
    guard: &Arc<VolumeGuard>,
    before: Option<Record>,
    intent: Record,
    request: &AttachRequest,
    deadline: Deadline,
) -> Result<Attachment> {
    let before_attach = devices_at_sources(engine, &intent)?;
    guard.write_intent(intent.clone(), deadline)?;
    let mut request = request.clone();
    let claimant = Arc::clone(guard);
    let claim = move |identity: &_, places: &[_]| claimant.claim_unit(identity, places);
    request.claim = Some(UnitClaim(Arc::new(claim)));
    // An attach that did not finish may have brought the devices that are there.
    let was_begun = |before: &Record| before.intent.is_some() || before.outcome.is_none();
    let may_resume = before.as_ref().is_none_or(was_begun);
    request.may_resume = may_resume;
    request.is_recorded = before.is_some();
    let read_last = intent.outcome.as_ref();
    request.known_content = read_last.and_then(|outcome| outcome.content.clone());
    match engine.attach(&request, deadline) {
        Ok(attachment) => {
            if may_resume && let Some(identity) = attachment.identity() {
                // A new attach acknowledges the failed flushes of earlier ones.
                failed_flush::purge_stale(engine.roots(), &identity.names, LossMarks::Remove);
            }
            let record = Record {
                intent: None,
                outcome: Some(Outcome::after(&attachment, read_last)),
                ..intent
            };
            guard
                .write(record, deadline.for_rollback())
                .map_err(|error| {
                    let stands = format!("attached, as {}", attachment.node.display());
                    error.with_last_seen(stands)
                })?;
            Ok(attachment)
        }
        Err(error) => {
            if error.kind() != ErrorKind::TimedOut {
                let deadline = deadline.for_rollback();
                rollback_record(engine, guard, before, &intent, &before_attach, deadline);
            }
            Err(error)
        }
    }
}

/// Restores the record as it was before an attach that failed. If the attach has left a
/// device, the intent stays.
fn rollback_record(
    engine: &Engine,
    guard: &Arc<VolumeGuard>,
    before: Option<Record>,
    intent: &Record,
    before_attach: &DevicesAtSources,
    deadline: Deadline,
) {
    // The call checks for scans before it reads the addresses: once a scan has ended, its
    // devices are there.
    let is_scanned = is_being_scanned(engine, intent).unwrap_or(true);
    let restored = match before {
        Some(before) => guard.write(before, deadline),
        None => match devices_at_sources(engine, intent) {
            Ok(now) if now.has_only_devices_of(before_attach) && !is_scanned => {
                guard.restore_record(deadline)
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        },
    };
    if let Err(error) = restored {
        // The next recovery tries again.
        tracing::warn!(%error, "the intent stays in the journal");
    }
}
