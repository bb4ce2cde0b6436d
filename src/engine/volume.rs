//! Attach, detach and resize of a volume by the caller's name of it, with the journal: the engine
//! writes down what it is about to do, does it, and reads the result back.

mod attach;
mod content;
mod detach;
mod devices_at_sources;
mod of_target;
pub(super) mod recover;
mod resize;

#[cfg(test)]
mod tests;

use crate::deadline::Deadline;
use crate::engine::journal::{Intent, Journal, Operation, Record, VolumeSpec};
use crate::engine::volume::attach::attach_guarded;
use crate::engine::volume::resize::end_nbd_resize;
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
    /// brought could be removed again and the kernel has ended its calls. One that times out
    /// leaves its intent, and a repeated attach, a detach or a [`recover`](Self::recover)
    /// continues it. If an unfinished resize has
    /// given an NBD device another size than the record's, the attach first resizes it, or
    /// restores the size from before, as a recovery does; an attach that ends in this step leaves
    /// the resize as begun. Minimum kernel: that of the attach, and 5.14 for NBD, whose devices
    /// are found again by their backend id.
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
    /// `journal`: the device is attached, as the error says. Those of
    /// [`resize`](Self::resize) if such a resize can neither be finished nor undone: it stays
    /// begun, and a detach ends it. Else those of [`attach`](Self::attach).
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
        end_nbd_resize(self, &guard, deadline)?;
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
