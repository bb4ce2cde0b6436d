//! The way of one attach, from top to bottom.

use std::path::PathBuf;

use super::Engine;
use super::lease::Lease;
use super::phases::{Phase, Phases, StageObserver};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{DevNo, DiskSeq, Hctl, Source, Wwid};
use crate::kernel::blockdev::{self, BlockDevice};
use crate::scsi::{self, Identity, ScsiDevice};
use crate::uevent::{self, Settled, Watch};

/// What to attach, and what to expect.
#[derive(Debug, Clone)]
pub struct AttachRequest {
    source: Source,
    expected: Option<Wwid>,
    observer: Option<StageObserver>,
}

impl AttachRequest {
    /// An attach of `source`, whatever it turns out to be.
    pub fn new(source: impl Into<Source>) -> Self {
        Self {
            source: source.into(),
            expected: None,
            observer: None,
        }
    }

    /// Attaches only if the unit itself says that this is one of its names.
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// Has `observer` told each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

/// An attached device. Everything here was read back.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Attachment {
    /// What was attached.
    pub source: Source,
    /// The device node.
    pub node: PathBuf,
    /// Its number.
    pub devno: DevNo,
    /// Its life's serial number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// Its SCSI address.
    pub hctl: Hctl,
    /// Its names, read from the unit with INQUIRY.
    pub identity: Identity,
    /// Its size in bytes.
    pub size: u64,
    /// Whether the kernel refuses writes.
    pub read_only: bool,
    /// The links of udev that lead to it.
    pub links: Vec<PathBuf>,
    /// How it was proven that it had settled.
    pub settled: Settled,
    /// Where the time went.
    pub phases: Vec<Phase>,
    /// Whether this call brought it; `false` where it was attached already.
    pub changed: bool,
}

impl Engine {
    /// Attaches one logical unit: scans for it and for nothing else, waits for
    /// its disk, proves its identity where one is expected, and returns when
    /// udev is done with it and with its partitions. What is attached already
    /// is proven again and returned with `changed: false`.
    ///
    /// Linux 5.10 or later; needs write access to the host's `scan` attribute
    /// (root) and `CAP_SYS_ADMIN`.
    ///
    /// A failure leaves nothing behind: a device that this call brought in is
    /// taken down again, except after a timeout, when it stands as the error
    /// says and a repeated attach goes on with it.
    ///
    /// # Errors
    /// `NoSuchHost`, `NotFound`, `IdentityMismatch`, `NotSupported` (no disk),
    /// `NotReady` (blocked or offline), `Refused`, `NotPermitted`, `Vanished`,
    /// `TimedOut` at the stage that it names, `Io`.
    #[tracing::instrument(skip_all, fields(source = %request.source))]
    pub fn attach(&self, request: &AttachRequest, deadline: Deadline) -> Result<Attachment> {
        let Source::Scsi(hctl) = request.source else {
            let message = "NBD attach is not built yet";
            return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Resolve));
        };
        let roots = self.roots();
        let mut phases = Phases::new(request.observer.as_ref());

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
            scsi::scan(roots, hctl, deadline)?
        };
        let found = Found {
            engine: self,
            request,
            device: &device,
            changed,
        };
        match found.prove(&mut watch, &mut phases, deadline) {
            Ok(mut attachment) => {
                attachment.phases = phases.finish();
                Ok(attachment)
            }
            Err(error) if changed && error.kind() != ErrorKind::TimedOut => {
                Err(self.undo(error, &device, &mut watch, &mut phases, deadline))
            }
            Err(error) => Err(error),
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
        match self.take_down(device, watch, phases, deadline) {
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
        let (roots, mode) = (self.engine.roots(), self.engine.hub().mode());
        phases.enter(Stage::Probe);
        let disk = scsi::wait_for_disk(self.device, self.changed, roots, watch, deadline)?;
        let diskseq = disk.diskseq()?;

        phases.enter(Stage::Identify);
        let identity = scsi::read_identity(roots, &disk, deadline)?;
        self.compare(&identity)?;

        phases.enter(Stage::Settle);
        let proof = uevent::settle(watch, mode, roots, disk.dir(), deadline)?;
        for partition in disk.partitions()? {
            match uevent::settle(watch, mode, roots, partition.dir(), deadline) {
                // Somebody rereads the partition table; that is no fault here.
                Err(error) if error.kind() == ErrorKind::Vanished => {}
                result => drop(result?),
            }
        }

        self.look_again(&disk, diskseq)?;
        Ok(Attachment {
            source: self.request.source.clone(),
            node: disk.node(roots),
            devno: disk.devno(),
            diskseq,
            hctl: self.device.hctl(),
            identity,
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
