//! The way of one SCSI detach: claim, flush, delete, confirm, in the order that
//! loses nothing.

use super::Engine;
use super::detach::{DetachRequest, Detachment, Flush, Place};
use super::lease::Lease;
use super::phases::Phases;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::id::Hctl;
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{self, ScsiDevice};
use crate::uevent::{self, Watch};

impl Engine {
    /// Detaches what is at `hctl`, or `named` alone where that is given.
    pub(super) fn detach_scsi(
        &self,
        hctl: Hctl,
        named: Option<&ScsiDevice>,
        request: &DetachRequest,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Detachment> {
        let roots = self.roots();
        phases.enter(Stage::Lock);
        let _lease = Lease::take(roots, &format!("scsi-{hctl}"), deadline)?;
        let mut watch = self.hub().watch(&hctl.to_string());

        let found = ScsiDevice::find(roots, hctl)?;
        // Gone, or what was named is gone and another life is there.
        let Some(device) = found.filter(|found| named.is_none_or(|named| named == found)) else {
            return Ok(Detachment::unchanged(Place::Scsi { hctl }));
        };
        let disk = device.disk()?;
        let diskseq = disk.as_ref().map(BlockDevice::diskseq).transpose()?;
        let flush = self.take_down(&device, request.abandon, &mut watch, phases, deadline)?;
        Ok(Detachment {
            node: disk.as_ref().map(|disk| disk.node(roots)),
            devno: disk.as_ref().map(BlockDevice::devno),
            diskseq: diskseq.flatten(),
            flush: Some(flush),
            changed: true,
            ..Detachment::unchanged(Place::Scsi { hctl })
        })
    }

    /// Takes the device down. The claim is held until the delete has returned,
    /// so that nobody can mount it in between.
    pub(super) fn take_down(
        &self,
        device: &ScsiDevice,
        abandon: bool,
        watch: &mut Watch,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Flush> {
        let (roots, mode) = (self.roots(), self.hub().mode());
        let Some(disk) = device.disk()? else {
            phases.enter(Stage::Delete);
            scsi::delete(device, &self.lanes, watch, deadline)?;
            return Ok(Flush::NoDisk);
        };
        let devpath = uevent::devpath(roots, disk.dir())?;
        let (flush, held) = self.claim_and_flush(&disk, abandon, watch, phases, deadline)?;

        phases.enter(Stage::Delete);
        scsi::delete(device, &self.lanes, watch, deadline)?;
        drop(held);

        phases.enter(Stage::Settle);
        uevent::settle_removal(watch, mode, roots, &devpath, disk.devno(), deadline)?;
        Ok(flush)
    }
}
