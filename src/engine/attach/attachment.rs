//! The result of an attach.

use std::path::PathBuf;

use crate::engine::timing::Phase;
use crate::error::MissingPath;
use crate::id::{BackendId, ContentName, DevNo, DiskSeq, Hctl, NbdIndex, Source};
use crate::iscsi::UnmetSetting;
use crate::nbd::TlsInfo;
use crate::scsi::{AccessState, Identity};
use crate::transport::RouteKind;
use crate::uevent::Settled;

/// An attached device. Every value was read back from the system.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Attachment {
    /// What was attached.
    pub source: Source,
    /// The device node.
    pub node: PathBuf,
    /// The device number of the node.
    pub devno: DevNo,
    /// The kernel's sequence number of the disk (Linux 5.15). An NBD disk keeps it from one
    /// connection to the next.
    pub diskseq: Option<DiskSeq>,
    /// The unit behind the device.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub unit: Unit,
    /// Its size in bytes.
    pub size: u64,
    /// Whether the kernel refuses writes.
    pub read_only: bool,
    /// The udev links that lead to the device.
    pub links: Vec<PathBuf>,
    /// How it was proven that udev had settled.
    pub settled: Settled,
    /// The time that each stage took.
    pub phases: Vec<Phase>,
    /// Whether this call brought the device; `false` where it was attached already.
    pub changed: bool,
}

/// The unit behind an attached device.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Unit {
    /// A SCSI logical unit.
    Scsi {
        /// Its names, read from the unit with INQUIRY, on every path.
        identity: Identity,
        /// Its paths, in the order of the sources; at least one.
        paths: Vec<UnitPath>,
        /// The requested paths that are not there.
        missing: Vec<MissingPath>,
        /// The name of the multipath map, where the attached device is one.
        map: Option<String>,
        /// Why there is no map, where several paths were named without
        /// [`Multipath::Off`](crate::engine::Multipath::Off).
        no_map: Option<String>,
    },
    /// An export of an NBD server.
    Nbd {
        /// The index of the device.
        index: NbdIndex,
        /// The backend id that the kernel stores with the device; `None` before Linux 5.14.
        backend: Option<BackendId>,
        /// How many connections carry its I/O.
        connections: usize,
        /// The names of its content, read from the server: of a partition table, an
        /// encrypted volume, an LVM physical volume or a file system. Empty where the device
        /// is blank or its content has no known format; `None` where the server answered the
        /// read with an error.
        content: Option<Vec<ContentName>>,
        /// The TLS of its last connection that this process made; `None` without TLS, and
        /// where another process made the connections.
        tls: Option<TlsInfo>,
    },
}

/// One path of an attached SCSI unit.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct UnitPath {
    /// The route to the unit.
    pub via: RouteKind,
    /// Its SCSI address.
    pub hctl: Hctl,
    /// The disk's node.
    pub node: PathBuf,
    /// The disk's device number.
    pub devno: DevNo,
    /// The disk's sequence number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// The ALUA access state of the unit over this path. `None` where the unit does not
    /// report it, and where there is a map, since the unit is not asked then.
    pub access_state: Option<AccessState>,
    /// The settings of [`AttachRequest::log_in`](crate::AttachRequest::log_in) that the
    /// session or the disk does not have, no matter which program logged in. Empty without a
    /// session.
    pub unmet_settings: Vec<UnmetSetting>,
    /// Whether this call brought the path.
    pub changed: bool,
}

impl Attachment {
    /// The SCSI address of the first path of a SCSI disk.
    #[must_use]
    pub fn hctl(&self) -> Option<Hctl> {
        self.paths().first().map(|path| path.hctl)
    }

    /// The paths of a SCSI disk; empty for any other device.
    #[must_use]
    pub fn paths(&self) -> &[UnitPath] {
        match &self.unit {
            Unit::Scsi { paths, .. } => paths,
            Unit::Nbd { .. } => &[],
        }
    }

    /// The names that the unit of a SCSI disk reported.
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        match &self.unit {
            Unit::Scsi { identity, .. } => Some(identity),
            Unit::Nbd { .. } => None,
        }
    }

    /// The TLS of an NBD device, where this process made its connections.
    #[must_use]
    pub fn tls(&self) -> Option<&TlsInfo> {
        match &self.unit {
            Unit::Scsi { .. } => None,
            Unit::Nbd { tls, .. } => tls.as_ref(),
        }
    }

    /// The names of the content of an NBD device, where they could be read.
    #[must_use]
    pub fn content(&self) -> Option<&[ContentName]> {
        match &self.unit {
            Unit::Nbd { content, .. } => content.as_deref(),
            Unit::Scsi { .. } => None,
        }
    }

    /// The index of an NBD device.
    #[must_use]
    pub fn nbd_index(&self) -> Option<NbdIndex> {
        match &self.unit {
            Unit::Nbd { index, .. } => Some(*index),
            Unit::Scsi { .. } => None,
        }
    }
}
