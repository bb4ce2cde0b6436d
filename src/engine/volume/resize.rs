//! The resize of a volume by the caller's name of it.

use std::sync::Arc;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::detach::DetachTarget;
use crate::engine::journal::{Intent, Journal, Operation, Outcome, Record, VolumeGuard};
use crate::engine::nbd::backend::{device_of_backend, lock_backend};
use crate::engine::resize::{ResizeRequest, Resized, serves_its_size};
use crate::engine::volume::detach::unknown;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::VolumeId;

impl Engine {
    /// As [`resize`](Self::resize), for a volume of the journal.
    ///
    /// # Errors
    /// `NotFound` if the journal has no such volume; `NotReady` if an attach or a detach of it
    /// is unfinished; at stage `journal` `Io` (the disk is full) and `TimedOut`. Else those of
    /// [`resize`](Self::resize).
    #[tracing::instrument(skip_all, fields(%volume))]
    pub fn resize_volume(
        &self,
        journal: &Journal,
        volume: &VolumeId,
        at_least: Option<u64>,
        deadline: Deadline,
    ) -> Result<Resized> {
        let guard = journal.guard(volume, None, deadline)?;
        let record = guard.record().ok_or_else(|| unknown(volume))?;
        if let Some(Operation::Attach | Operation::Detach { .. }) = record.operation() {
            let message = format!(
                "an attach or detach of volume {volume} is incomplete: repeat it or run `lunbd \
                 recover`, then resize"
            );
            return Err(Error::new(ErrorKind::NotReady, message).at(Stage::Journal));
        }
        resize_guarded(self, &guard, record, at_least, deadline)
    }
}

/// Finishes or undoes an unfinished resize that has given an NBD device another size than the
/// record's, before an attach. The attach would record the size that the kernel has, and only
/// this record has the size from before.
pub(super) fn end_nbd_resize(
    engine: &Engine,
    guard: &Arc<VolumeGuard>,
    deadline: Deadline,
) -> Result<()> {
    let Some(record) = guard.record() else {
        return Ok(());
    };
    let Some(Operation::Resize { at_least }) = record.operation() else {
        return Ok(());
    };
    let Some(nbd) = &record.spec.nbd else {
        return Ok(());
    };
    let shown = {
        // A command of a resize that timed out may still be on its way to the kernel.
        let _lock = lock_backend(engine, &nbd.backend, deadline)?;
        nbd_size(engine, &record)?
    };
    let recorded = record.outcome.as_ref().map(|outcome| outcome.size);
    if shown.is_none_or(|size| Some(size) == recorded) {
        // The kernel has not taken a new size, so a recovery does not need the intent. The
        // attach must not wait for a server that accepts no further connection.
        return Ok(());
    }
    match resize_guarded(engine, guard, record, at_least, deadline) {
        Err(error) if has_no_intent(guard) => {
            tracing::warn!(%error, "the resize is undone");
            Ok(())
        }
        ended => ended.map(drop),
    }
}

/// Whether there is a record, and it says that no operation is unfinished.
pub(super) fn has_no_intent(guard: &VolumeGuard) -> bool {
    guard
        .record()
        .is_some_and(|record| record.operation().is_none())
}

pub(super) fn resize_guarded(
    engine: &Engine,
    guard: &Arc<VolumeGuard>,
    mut record: Record,
    at_least: Option<u64>,
    deadline: Deadline,
) -> Result<Resized> {
    let names = record.names();
    let unique = names.first().filter(|name| name.is_unique());
    let mut request = match (unique, record.spec.sources.split_first()) {
        (Some(name), _) => ResizeRequest::new(DetachTarget::Unit(name.clone())),
        (None, Some((first, more))) => {
            let request = ResizeRequest::new(first.clone());
            let expected = names.first().into_iter().cloned();
            let request = more.iter().cloned().fold(request, ResizeRequest::path);
            expected.fold(request, ResizeRequest::expect)
        }
        (None, None) => return Err(unknown(&record.volume)),
    };
    if let Some(nbd) = &record.spec.nbd {
        request = request.backend(nbd.backend.clone());
    }
    if let Some(bytes) = at_least {
        request = request.at_least(bytes);
    }
    let is_interrupted = record.intent.is_some();
    let shown = nbd_size(engine, &record)?;
    if let Some((outcome, size)) = record.outcome.as_mut().zip(shown) {
        if is_interrupted {
            request = request.interrupted_at(outcome.size);
        } else {
            // Another process may have resized it without the journal.
            outcome.size = size;
        }
    }
    let mut intent = record.clone();
    intent.intent = Some(Intent::now(Operation::Resize { at_least }));
    guard.write_intent(intent, deadline)?;
    let result = engine.resize(&request, deadline);
    let mut after = record;
    after.intent = None;
    match &result {
        Ok(resized) => {
            if let Some(outcome) = &mut after.outcome {
                outcome.size = resized.size;
            }
            guard.write(after, deadline)?;
        }
        Err(error) if error.kind().is_timeout_or_cancel() => {}
        Err(error) => {
            let size = nbd_size(engine, &after).ok().flatten();
            if let Some((outcome, size)) = after.outcome.as_mut().zip(size)
                && serves_its_size(error)
            {
                outcome.size = size;
            }
            let has_recorded_size = |outcome: &Outcome| size.is_none_or(|now| now == outcome.size);
            if !after.outcome.as_ref().is_none_or(has_recorded_size) {
                // The next recovery needs the size from before.
                return result;
            }
            if let Err(error) = guard.write(after, deadline) {
                tracing::warn!(%error, "the intent stays in the journal");
            }
        }
    }
    result
}

/// The size of a volume's NBD device. `None` if it has none, or is being disconnected.
fn nbd_size(engine: &Engine, record: &Record) -> Result<Option<u64>> {
    let Some(nbd) = &record.spec.nbd else {
        return Ok(None);
    };
    let device = device_of_backend(engine, &nbd.backend)?;
    let size = device.map(|device| device.disk().size()).transpose()?;
    Ok(size.filter(|size| *size > 0))
}
