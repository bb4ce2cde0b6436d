//! What a detach is asked and what it answers. The way itself is in
//! `detach_scsi` and `detach_nbd`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::Engine;
use super::attach::no_transport_yet;
use super::phases::{Phase, Phases, StageObserver};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, DevNo, DiskSeq, Hctl, NbdIndex, ParseIdError, Source};
use crate::kernel::blockdev::{self, BlockDevice};
use crate::nbd::NbdDevice;
use crate::scsi::ScsiDevice;

/// What to detach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetachTarget {
    /// What an attach of this source brought.
    Source(Source),
    /// A disk's node, or a link to it.
    Device(PathBuf),
}

impl From<Source> for DetachTarget {
    fn from(source: Source) -> Self {
        Self::Source(source)
    }
}

impl FromStr for DetachTarget {
    type Err = Error;

    /// A path from the root, or a source.
    fn from_str(text: &str) -> Result<Self> {
        if text.starts_with('/') {
            return Ok(Self::Device(PathBuf::from(text)));
        }
        text.parse()
            .map(Self::Source)
            .map_err(|error: ParseIdError| {
                let message = format!("{error}, or the path of a disk's node");
                Error::new(ErrorKind::InvalidInput, message)
            })
    }
}

impl fmt::Display for DetachTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(source) => source.fmt(f),
            Self::Device(path) => path.display().fmt(f),
        }
    }
}

/// What to detach, and how.
#[derive(Debug, Clone)]
pub struct DetachRequest {
    pub(super) target: DetachTarget,
    pub(super) backend: Option<BackendId>,
    pub(super) abandon: bool,
    observer: Option<StageObserver>,
}

impl DetachRequest {
    /// A detach that loses nothing, or is refused.
    pub fn new(target: impl Into<DetachTarget>) -> Self {
        Self {
            target: target.into(),
            backend: None,
            abandon: false,
            observer: None,
        }
    }

    /// The id that an NBD source was attached under, where it was given one.
    #[must_use]
    pub fn backend(mut self, id: BackendId) -> Self {
        self.backend = Some(id);
        self
    }

    /// Goes on where the device cannot be written back, in half of the time: a
    /// server or a target that is gone for good. **What was not written is
    /// lost**; what the device is in use for is refused as ever.
    #[must_use]
    pub fn abandon_unwritten(mut self) -> Self {
        self.abandon = true;
        self
    }

    /// Has `observer` told each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

impl From<DetachTarget> for DetachRequest {
    fn from(target: DetachTarget) -> Self {
        Self::new(target)
    }
}

impl From<Source> for DetachRequest {
    fn from(source: Source) -> Self {
        Self::new(source)
    }
}

/// What a detach did.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Detachment {
    /// Where nothing is now.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub place: Place,
    /// The node: of SCSI it is gone, of NBD it is free. `None` where there was
    /// no disk.
    pub node: Option<PathBuf>,
    /// Its number.
    pub devno: Option<DevNo>,
    /// Its life's serial number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// What became of the dirty pages; `None` where nothing was attached.
    pub flush: Option<Flush>,
    /// Where the time went.
    pub phases: Vec<Phase>,
    /// Whether this call took it down; `false` where it was gone already.
    pub changed: bool,
}

/// Where a device was.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Place {
    /// A SCSI address.
    Scsi {
        /// The address.
        hctl: Hctl,
    },
    /// The kernel's NBD driver.
    Nbd {
        /// The index; `None` where no device had the backend id.
        index: Option<NbdIndex>,
        /// The backend id of the device.
        backend: Option<BackendId>,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scsi { hctl } => write!(f, "scsi:{hctl}"),
            Self::Nbd {
                backend: Some(id), ..
            } => id.fmt(f),
            Self::Nbd {
                index: Some(index), ..
            } => write!(f, "nbd{index}"),
            Self::Nbd { .. } => f.write_str("nbd"),
        }
    }
}

/// What became of the dirty pages and of the device's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Flush {
    /// `fsync` and `BLKFLSBUF` both succeeded, under an exclusive claim.
    Done,
    /// The device served no opens any more and nobody had it open, so nothing
    /// was left to write; the text is the kernel's refusal.
    Unreachable(String),
    /// It failed, and the caller had said to go on: what was not written is
    /// lost; the text is the failure.
    Abandoned(String),
    /// The device had no disk.
    NoDisk,
}

impl Detachment {
    /// Nothing was attached.
    pub(super) fn unchanged(place: Place) -> Self {
        Self {
            place,
            node: None,
            devno: None,
            diskseq: None,
            flush: None,
            phases: Vec::new(),
            changed: false,
        }
    }
}

impl Engine {
    /// Detaches one disk: proves that nobody uses it by claiming it
    /// exclusively, writes its pages and its cache back, and takes it down. A
    /// source of which nothing is attached is detached already: `changed:
    /// false`.
    ///
    /// **SCSI**: deletes the device and returns when sysfs shows it no more and
    /// udev has handled its removal. Linux 5.10 or later; needs write access to
    /// the device's `delete` attribute (root) and `CAP_SYS_ADMIN`.
    ///
    /// **NBD**: disconnects, and returns when the device is free: no `pid`, no
    /// size, nothing in flight, no holder. A source is found by its backend id,
    /// so that a device of another's is never touched; a node is taken at its
    /// word, whatever its id.
    ///
    /// A refusal leaves the device as it was. After a timeout at stage `delete`,
    /// `disconnect` or `confirm` the kernel goes on by itself; at stage `settle`
    /// the device is gone and udev has not handled that yet. A repeated detach
    /// is safe.
    ///
    /// # Errors
    /// `InUse`, naming by whom; `NotFound` where a path leads nowhere (which
    /// does not prove that the disk is gone: name the source); `InvalidInput`
    /// for a partition; `NotSupported` for a disk that is neither; `Io` where
    /// the flush failed, and then nothing is taken down; `NotPermitted`;
    /// `TimedOut` at the stage that it names.
    #[tracing::instrument(skip_all, fields(target))]
    pub fn detach(
        &self,
        request: impl Into<DetachRequest>,
        deadline: Deadline,
    ) -> Result<Detachment> {
        let request = request.into();
        tracing::Span::current().record("target", request.target.to_string());
        let mut phases = Phases::new(request.observer.as_ref());
        phases.enter(Stage::Resolve);
        let found = match &request.target {
            DetachTarget::Source(Source::Scsi(hctl)) => Found::ScsiAddress(*hctl),
            DetachTarget::Source(source @ Source::Nbd(_)) => {
                let derived = || BackendId::derived(&source.to_string());
                Found::NbdBackend(request.backend.clone().unwrap_or_else(derived))
            }
            DetachTarget::Source(source @ (Source::Iscsi(_) | Source::Fc(_))) => {
                return Err(no_transport_yet(source));
            }
            DetachTarget::Device(path) => self.behind(path)?,
        };
        let mut detachment = match found {
            Found::ScsiAddress(hctl) => {
                self.detach_scsi(hctl, None, &request, &mut phases, deadline)
            }
            Found::Scsi(device) => {
                let hctl = device.hctl();
                self.detach_scsi(hctl, Some(&device), &request, &mut phases, deadline)
            }
            Found::NbdBackend(id) => self.detach_nbd_backend(id, &request, &mut phases, deadline),
            Found::Nbd(device) => self.detach_nbd_device(&device, &request, &mut phases, deadline),
        }?;
        detachment.phases = phases.finish();
        Ok(detachment)
    }

    /// The device behind a node.
    fn behind(&self, path: &Path) -> Result<Found> {
        let at = |error: Error| error.at(Stage::Resolve);
        let not_found = || {
            let message = "no device is there: to prove that a disk is gone, name its source";
            at(Error::new(ErrorKind::NotFound, message).with_path(path))
        };
        let devno = blockdev::devno_at(path).map_err(at)?;
        let disk = BlockDevice::of(self.roots(), devno)?.ok_or_else(not_found)?;
        if disk.is_partition() {
            let message = format!("{} is a partition: name the whole disk", disk.name());
            return Err(at(
                Error::new(ErrorKind::InvalidInput, message).with_path(path)
            ));
        }
        if let Some(index) = NbdIndex::of_name(disk.name()) {
            let device = NbdDevice::find(self.roots(), index)?;
            return device.map(Found::Nbd).ok_or_else(not_found);
        }
        let device = ScsiDevice::of_disk(&disk).map_err(at)?;
        device.map(Found::Scsi).ok_or_else(not_found)
    }
}

/// What the target of a detach leads to.
enum Found {
    ScsiAddress(Hctl),
    Scsi(ScsiDevice),
    NbdBackend(BackendId),
    Nbd(NbdDevice),
}
