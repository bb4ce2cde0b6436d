//! The way of one SCSI attach, from top to bottom.

use super::Engine;
use super::attach::{AttachRequest, Attachment, Unit};
use super::lease::Lease;
use super::phases::Phases;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{DiskSeq, Hctl};
use crate::kernel::blockdev::{self, BlockDevice};
use crate::scsi::{self, Identity, ScsiDevice};
use crate::uevent::Watch;

impl Engine {
    pub(super) fn attach_scsi(
        &self,
        hctl: Hctl,
        request: &AttachRequest,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Attachment> {
        let roots = self.roots();

        phases.enter(Stage::Resolve);
        scsi::require_host(roots, hctl.host)?;

        phases.enter(Stage::Lock);
        let _lease = Lease::take(roots, &format!("scsi-{hctl}"), deadline)?;

        // Before the scan, or its answer could be missed.
        let mut watch = self.hub().watch(&hctl.to_string());

        let there = ScsiDevice::find(roots, hctl)?;
        let changed = there.is_none();
        let device = if let Some(device) = there {
            device
        } else {
            phases.enter(Stage::Scan);
            scsi::scan(roots, &self.lanes, hctl, deadline)?
        };
        let found = Found {
            engine: self,
            request,
            device: &device,
            changed,
        };
        match found.prove(&mut watch, phases, deadline) {
            Err(error) if changed && error.kind() != ErrorKind::TimedOut => {
                Err(self.undo(error, &device, &mut watch, phases, deadline))
            }
            result => result,
        }
    }

    /// Takes down what this attach brought in; the error says so where that
    /// failed too.
    fn undo(
        &self,
        error: Error,
        device: &ScsiDevice,
        watch: &mut Watch,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Error {
        tracing::info!(%error, "taking the device down again");
        match self.take_down(device, false, watch, phases, deadline) {
            Ok(_) => error,
            Err(failure) => {
                let stands = format!(
                    "the device {} was brought in and could not be taken down again: {failure}",
                    device.hctl()
                );
                error.with_last_seen(stands)
            }
        }
    }
}

/// A SCSI device that is there and of which nothing is proven yet.
struct Found<'a> {
    engine: &'a Engine,
    request: &'a AttachRequest,
    device: &'a ScsiDevice,
    changed: bool,
}

impl Found<'_> {
    fn prove(
        &self,
        watch: &mut Watch,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Attachment> {
        let roots = self.engine.roots();
        phases.enter(Stage::Probe);
        let lanes = &self.engine.lanes;
        let disk = scsi::wait_for_disk(self.device, self.changed, roots, lanes, watch, deadline)?;
        let diskseq = disk.diskseq()?;

        phases.enter(Stage::Identify);
        let identity = scsi::read_identity(roots, lanes, self.device, &disk, deadline)?;
        self.compare(&identity)?;

        phases.enter(Stage::Settle);
        let proof = self.engine.settle(&disk, watch, deadline)?;

        self.look_again(&disk, diskseq)?;
        Ok(Attachment {
            source: self.request.source.clone(),
            node: disk.node(roots),
            devno: disk.devno(),
            diskseq,
            unit: Unit::Scsi {
                hctl: self.device.hctl(),
                identity,
            },
            size: disk.size()?,
            read_only: disk.read_only()?,
            links: blockdev::links_to(roots, disk.devno(), &proof.links),
            settled: proof.how,
            phases: Vec::new(),
            changed: self.changed,
        })
    }

    fn compare(&self, identity: &Identity) -> Result<()> {
        let Some(expected) = &self.request.expected else {
            return Ok(());
        };
        if identity.is(expected) {
            return Ok(());
        }
        let names: Vec<String> = identity.names.iter().map(ToString::to_string).collect();
        let names = match names.as_slice() {
            [] => "says no name of its own".to_owned(),
            names => format!("says that it is {}", names.join(", ")),
        };
        let message = format!(
            "expected {expected} at {}, which {names}",
            self.device.hctl()
        );
        Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Identify))
    }

    /// The device that is handed out is the one that was proven.
    fn look_again(&self, disk: &BlockDevice, diskseq: Option<DiskSeq>) -> Result<()> {
        let same = self.device.is_there()
            && BlockDevice::at(disk.dir())?.as_ref() == Some(disk)
            && disk.diskseq()? == diskseq;
        if same {
            return Ok(());
        }
        let message = format!("{} was replaced while it was attached", self.device.hctl());
        Err(Error::new(ErrorKind::Vanished, message).at(Stage::Settle))
    }
}
