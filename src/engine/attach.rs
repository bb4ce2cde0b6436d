//! What an attach is asked and what it answers. The way itself is in
//! `attach_scsi` and `attach_nbd`.

use std::path::PathBuf;

use super::Engine;
use super::nbd_options::NbdOptions;
use super::phases::{Phase, Phases, StageObserver};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, DevNo, DiskSeq, Hctl, NbdIndex, Source, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::Identity;
use crate::uevent::{self, Proof, Settled, Watch};

/// What to attach, and what to expect.
#[derive(Debug, Clone)]
pub struct AttachRequest {
    pub(super) source: Source,
    pub(super) expected: Option<Wwid>,
    pub(super) nbd: NbdOptions,
    observer: Option<StageObserver>,
}

impl AttachRequest {
    /// An attach of `source`, whatever it turns out to be.
    pub fn new(source: impl Into<Source>) -> Self {
        Self {
            source: source.into(),
            expected: None,
            nbd: NbdOptions::default(),
            observer: None,
        }
    }

    /// Attaches only if the unit itself says that this is one of its names.
    /// For SCSI: an NBD server knows no such names.
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// How an NBD source is attached; other sources have no use for it.
    #[must_use]
    pub fn nbd(mut self, options: NbdOptions) -> Self {
        self.nbd = options;
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
    /// Its life's serial number (Linux 5.15). An NBD disk keeps it from one
    /// connection to the next.
    pub diskseq: Option<DiskSeq>,
    /// What is behind it.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub unit: Unit,
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

/// What is behind an attached device.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Unit {
    /// A SCSI logical unit.
    Scsi {
        /// Its address.
        hctl: Hctl,
        /// Its names, read from the unit with INQUIRY.
        identity: Identity,
    },
    /// An export of an NBD server.
    Nbd {
        /// The index of the device.
        index: NbdIndex,
        /// The backend id that the kernel keeps with it; `None` before Linux
        /// 5.14.
        backend: Option<BackendId>,
        /// How many connections carry its I/O.
        connections: usize,
    },
}

impl Attachment {
    /// The SCSI address, where it is a SCSI disk.
    #[must_use]
    pub fn hctl(&self) -> Option<Hctl> {
        match &self.unit {
            Unit::Scsi { hctl, .. } => Some(*hctl),
            Unit::Nbd { .. } => None,
        }
    }

    /// The names that the unit gave itself, where it is a SCSI disk.
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        match &self.unit {
            Unit::Scsi { identity, .. } => Some(identity),
            Unit::Nbd { .. } => None,
        }
    }

    /// The index, where it is an NBD device.
    #[must_use]
    pub fn nbd_index(&self) -> Option<NbdIndex> {
        match &self.unit {
            Unit::Nbd { index, .. } => Some(*index),
            Unit::Scsi { .. } => None,
        }
    }
}

impl Engine {
    /// Attaches one device and returns when it has settled.
    ///
    /// **SCSI**: scans for one logical unit and for nothing else, waits for its
    /// disk, proves its identity where one is expected. What is attached
    /// already is proven again. Linux 5.10 or later; needs write access to the
    /// host's `scan` attribute (root) and `CAP_SYS_ADMIN`.
    ///
    /// **NBD**: shakes hands with the server, hands the sockets to the kernel's
    /// driver over netlink under a backend id, and reads size, access and id
    /// back. A device that has this backend id already is returned as it is.
    /// Linux 5.14 or later for backend ids; 5.10 connects without. Needs the
    /// `nbd` module and `CAP_SYS_ADMIN` in the initial user namespace.
    ///
    /// What was attached already comes back with `changed: false`. A failure
    /// leaves nothing behind: what this call brought in is taken down again,
    /// except after a timeout, when it stands as the error says and a repeated
    /// attach goes on with it.
    ///
    /// # Errors
    /// `NoSuchHost`, `NotFound`, `IdentityMismatch`, `InUse` (no NBD index that
    /// is free), `NotSupported` (no disk; no `nbd` module), `NotReady` (blocked
    /// or offline), `Unreachable` and `Protocol` (the NBD server), `Refused`,
    /// `NotPermitted`, `Vanished`, `TimedOut` at the stage that it names, `Io`.
    #[tracing::instrument(skip_all, fields(source = %request.source))]
    pub fn attach(&self, request: &AttachRequest, deadline: Deadline) -> Result<Attachment> {
        let mut phases = Phases::new(request.observer.as_ref());
        let mut attachment = match &request.source {
            Source::Scsi(hctl) => self.attach_scsi(*hctl, request, &mut phases, deadline)?,
            Source::Nbd(uri) => self.attach_nbd(uri, request, &mut phases, deadline)?,
            source @ (Source::Iscsi(_) | Source::Fc(_)) => return Err(no_transport_yet(source)),
        };
        attachment.phases = phases.finish();
        Ok(attachment)
    }

    /// Waits until udev is done with the disk and with its partitions.
    pub(super) fn settle(
        &self,
        disk: &BlockDevice,
        watch: &mut Watch,
        deadline: Deadline,
    ) -> Result<Proof> {
        let (roots, mode) = (self.roots(), self.hub().mode());
        let proof = uevent::settle(watch, mode, roots, disk.dir(), deadline)?;
        for partition in disk.partitions()? {
            match uevent::settle(watch, mode, roots, partition.dir(), deadline) {
                // Somebody rereads the partition table; that is no fault here.
                Err(error) if error.kind() == ErrorKind::Vanished => {}
                result => drop(result?),
            }
        }
        Ok(proof)
    }
}

pub(super) fn no_transport_yet(source: &Source) -> Error {
    let message =
        format!("{source}: sources by transport are not supported yet; name scsi:H:C:T:L");
    Error::new(ErrorKind::NotSupported, message).at(Stage::Resolve)
}
