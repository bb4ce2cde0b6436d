//! The attach of a volume whose record is locked.

use std::sync::Arc;

use crate::deadline::Deadline;
use crate::engine::attach::UnitClaim;
use crate::engine::journal::{Operation, Outcome, Record, VolumeGuard};
use crate::engine::usage::failed_flush::{self, LossMarks};
use crate::engine::volume::devices_at_sources::{
    DevicesAtSources, devices_at_sources, may_bring_a_device,
};
use crate::engine::{AttachRequest, Attachment, Engine};
use crate::error::{ErrorKind, Result};

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
    let was_begun = |before: &Record| {
        let is_unfinished = match before.operation() {
            Some(Operation::Attach | Operation::Detach { .. }) => true,
            Some(Operation::Resize { .. }) | None => false,
        };
        is_unfinished || before.outcome.is_none()
    };
    let may_resume = before.as_ref().is_none_or(was_begun);
    request.may_resume = may_resume;
    request.is_recorded = before.is_some();
    let read_last = intent.outcome.as_ref();
    request.last_device = read_last.map(|outcome| (outcome.devno, outcome.diskseq));
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
            // A connect of another process has the lock by which this finds one under way. Only
            // a call that was cancelled leaves its own.
            let may_be_under_way =
                intent.spec.nbd.is_none() || error.kind() == ErrorKind::Cancelled;
            // The call checks this before it reads the addresses: once a scan has ended, its
            // devices are there.
            let is_under_way =
                may_be_under_way && may_bring_a_device(engine, &intent).unwrap_or(true);
            if error.kind() != ErrorKind::TimedOut && !is_under_way {
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
    let restored = match before {
        Some(before) => guard.write(before, deadline),
        None => match devices_at_sources(engine, intent) {
            Ok(now) if now.has_only_devices_of(before_attach) => guard.restore_record(deadline),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        },
    };
    if let Err(error) = restored {
        // The next recovery tries again.
        tracing::warn!(%error, "the intent stays in the journal");
    }
}
