//! The way of one detach, from top to bottom.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::Engine;
use super::lease::Lease;
use super::phases::{Phase, Phases, StageObserver};
use super::take_down::Flush;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{DevNo, DiskSeq, Hctl, ParseIdError, Source};
use crate::kernel::blockdev::{self, BlockDevice};
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

/// What a detach did.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Detachment {
    /// The SCSI address, at which nothing is now.
    pub hctl: Hctl,
    /// The node that is gone; `None` where there was no disk.
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

impl Engine {
    /// Detaches one disk: proves that nobody uses it by claiming it
    /// exclusively, writes its pages and its cache back, deletes it, and
    /// returns when sysfs shows it no more and udev has handled its removal. A
    /// source of which nothing is there is detached already: `changed: false`.
    ///
    /// Linux 5.10 or later; needs write access to the device's `delete`
    /// attribute (root) and `CAP_SYS_ADMIN`.
    ///
    /// A refusal leaves the device as it was. After a timeout at stage `delete`
    /// or `confirm` the kernel goes on by itself; at stage `settle` the device
    /// is gone and udev has not handled that yet. A repeated detach is safe.
    ///
    /// # Errors
    /// `InUse`, naming by whom; `NotFound` where a path leads nowhere (which
    /// does not prove that the disk is gone: name the source); `InvalidInput`
    /// for a partition; `NotSupported` for a disk that is not SCSI; `Io` where
    /// the flush failed, and then nothing is deleted; `NotPermitted`;
    /// `TimedOut` at the stage that it names.
    #[tracing::instrument(skip_all, fields(%target))]
    pub fn detach(&self, target: &DetachTarget, deadline: Deadline) -> Result<Detachment> {
        self.detach_observed(target, None, deadline)
    }

    /// As [`detach`](Self::detach), and tells `observer` each stage.
    pub fn detach_observed(
        &self,
        target: &DetachTarget,
        observer: Option<&StageObserver>,
        deadline: Deadline,
    ) -> Result<Detachment> {
        let roots = self.roots();
        let mut phases = Phases::new(observer);

        phases.enter(Stage::Resolve);
        let (hctl, named) = match target {
            DetachTarget::Source(Source::Scsi(hctl)) => (*hctl, None),
            DetachTarget::Source(Source::Nbd(_)) => {
                let message = "NBD detach is not built yet";
                return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Resolve));
            }
            DetachTarget::Device(path) => {
                let device = self.device_of(path)?;
                (device.hctl(), Some(device))
            }
        };

        phases.enter(Stage::Lock);
        let _lease = Lease::take(roots, &format!("scsi-{hctl}"), deadline)?;
        let mut watch = self.hub().watch(&hctl.to_string());

        let device = match ScsiDevice::find(roots, hctl)? {
            Some(found) if named.as_ref().is_none_or(|named| *named == found) => found,
            // Gone, or what the path named is gone and another life is there.
            _ => {
                return Ok(Detachment {
                    hctl,
                    node: None,
                    devno: None,
                    diskseq: None,
                    flush: None,
                    phases: phases.finish(),
                    changed: false,
                });
            }
        };
        let disk = device.disk()?;
        let diskseq = disk.as_ref().map(BlockDevice::diskseq).transpose()?;
        let flush = self.take_down(&device, &mut watch, &mut phases, deadline)?;
        Ok(Detachment {
            hctl,
            node: disk.as_ref().map(|disk| disk.node(roots)),
            devno: disk.as_ref().map(BlockDevice::devno),
            diskseq: diskseq.flatten(),
            flush: Some(flush),
            phases: phases.finish(),
            changed: true,
        })
    }

    /// The SCSI device behind a node.
    fn device_of(&self, path: &Path) -> Result<ScsiDevice> {
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
        ScsiDevice::of_disk(&disk)
            .map_err(at)?
            .ok_or_else(not_found)
    }
}
