//! The way of one NBD detach, from top to bottom.

use super::Engine;
use super::attach_nbd::lease_of;
use super::detach::{DetachRequest, Detachment, Place};
use super::lease::Lease;
use super::lost::Lost;
use super::phases::Phases;
use super::receipt::Flush;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::BackendId;
use crate::nbd::{self, NbdDevice};
use crate::uevent;

impl Engine {
    /// Detaches the device of this backend id, and no other.
    pub(super) fn detach_nbd_backend(
        &self,
        backend: BackendId,
        request: &DetachRequest,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Detachment> {
        phases.enter(Stage::Lock);
        let _lease = Lease::take(self.roots(), &lease_of(&backend), deadline)?;
        match self.nbd_of(&backend)? {
            Some(device) => self.disconnect(&device, Some(&backend), request, phases, deadline),
            None => Ok(Detachment::unchanged(Place::Nbd {
                index: None,
                backend: Some(backend),
            })),
        }
    }

    /// Detaches the device that was named, whatever its backend id.
    pub(super) fn detach_nbd_device(
        &self,
        device: &NbdDevice,
        request: &DetachRequest,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Detachment> {
        phases.enter(Stage::Lock);
        // Another client's id may be one that we would not give.
        let id = device
            .backend()?
            .and_then(|id| id.parse::<BackendId>().ok());
        let lease = |id| Lease::take(self.roots(), &lease_of(id), deadline);
        let _lease = id.as_ref().map(lease).transpose()?;
        self.disconnect(device, id.as_ref(), request, phases, deadline)
    }

    fn disconnect(
        &self,
        device: &NbdDevice,
        backend: Option<&BackendId>,
        request: &DetachRequest,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Detachment> {
        let (roots, index, disk) = (self.roots(), device.index(), device.disk());
        let _lease = Lease::take(roots, &index.name(), deadline)?;
        let mut watch = self.hub().watch(&index.name());
        let place = Place::Nbd {
            index: Some(index),
            backend: backend.cloned(),
        };
        if device.pid()?.is_none() {
            return Ok(Detachment::unchanged(place));
        }

        let lost = Lost::of(roots, disk)?;
        let (flush, held) =
            self.claim_and_flush(disk, request.abandon, &mut watch, phases, deadline)?;
        // Under the claim nobody else can have begun to use it; but another
        // client can have connected the index anew before.
        let now = device.backend()?;
        if backend.is_some() && now.as_deref() != backend.map(BackendId::as_str) {
            let now = now.unwrap_or_default();
            let message = format!("nbd{index} has backend id {now:?} now: it was left alone");
            return Err(Error::new(ErrorKind::Vanished, message).at(Stage::Disconnect));
        }

        phases.enter(Stage::Disconnect);
        // The kernel says goodbye on each connection first, which a peer that
        // is dead or hangs would block with its full buffer.
        let link = self.links().remove(&index);
        if let Some(link) = link.filter(|link| flush != Flush::Done || link.is_dead()) {
            link.shut_down();
        }
        nbd::disconnect(roots, index, deadline)?;
        // The last close lets the configuration go.
        drop(held);

        phases.enter(Stage::Confirm);
        nbd::wait_until_free(roots, index, &mut watch, deadline)?;

        // A flush that hung has closed the device by now, and said what it had to.
        lost.clear();

        phases.enter(Stage::Settle);
        match uevent::settle_again(&mut watch, self.hub().mode(), roots, disk.dir(), deadline) {
            // A device made for one connection is gone after it.
            Err(error) if error.kind() == ErrorKind::Vanished => {}
            result => drop(result?),
        }
        Ok(Detachment {
            node: Some(disk.node(roots)),
            devno: Some(disk.devno()),
            diskseq: disk.diskseq()?,
            safe_to_unmap: flush == Flush::Done,
            flush: Some(flush),
            changed: true,
            ..Detachment::unchanged(place)
        })
    }
}
