//! What an attach answers.

use std::fmt;
use std::path::PathBuf;

use crate::engine::timing::Phase;
use crate::error::Error;
use crate::id::{BackendId, ContentName, DevNo, DiskSeq, Hctl, NbdIndex, Source};
use crate::iscsi::UnmetSetting;
use crate::nbd::TlsInfo;
use crate::scsi::{AccessState, Identity};
use crate::transport::{RouteKind, RouteUnavailable};
use crate::uevent::Settled;

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
        /// Its names, read from the unit with INQUIRY, on every path.
        identity: Identity,
        /// Its paths, in the order of the sources; at least one.
        paths: Vec<UnitPath>,
        /// The paths that were asked for and are not there.
        missing: Vec<MissingPath>,
        /// The name of the multipath map, where the attached device is one.
        map: Option<String>,
        /// Why there is no map, where one was wanted: several paths were named and
        /// [`Multipath::Off`](crate::engine::Multipath::Off) was not asked for.
        no_map: Option<String>,
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
        /// What names its content, read from the server: of a partition table, an
        /// encrypted volume, an LVM physical volume or a file system. Empty where it is
        /// blank or holds what is not known here; `None` where the server answered the
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
    /// How it is reached.
    pub via: RouteKind,
    /// Its address.
    pub hctl: Hctl,
    /// The disk's node.
    pub node: PathBuf,
    /// The disk's number.
    pub devno: DevNo,
    /// The disk's life (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// In which ALUA access state the target serves the unit over it; `None` where the unit
    /// says nothing of that, and where it was not asked, since there is a map.
    pub access_state: Option<AccessState>,
    /// Of the settings that [`AttachRequest::log_in`](crate::AttachRequest::log_in) chooses,
    /// those that its session or the disk does not have, whoever made the session; none of a
    /// path without a session.
    pub unmet_settings: Vec<UnmetSetting>,
    /// Whether this call brought it.
    pub changed: bool,
}

/// A path that was asked for and is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MissingPath {
    /// How it would be reached.
    pub via: RouteKind,
    /// Why it is missing.
    pub why: String,
}

impl MissingPath {
    pub(in crate::engine) fn of_route(via: RouteKind, why: &RouteUnavailable) -> Self {
        let why = why.to_string();
        Self { via, why }
    }

    pub(in crate::engine) fn of_error(via: RouteKind, error: &Error) -> Self {
        let why = format!("{error:#}");
        Self { via, why }
    }
}

impl fmt::Display for MissingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.via, self.why)
    }
}

impl Attachment {
    /// The SCSI address of the first path, where it is a SCSI disk.
    #[must_use]
    pub fn hctl(&self) -> Option<Hctl> {
        self.paths().first().map(|path| path.hctl)
    }

    /// The paths, where it is a SCSI disk; none where it is not.
    #[must_use]
    pub fn paths(&self) -> &[UnitPath] {
        match &self.unit {
            Unit::Scsi { paths, .. } => paths,
            Unit::Nbd { .. } => &[],
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

    /// The TLS of an NBD device, where this process made its connections.
    #[must_use]
    pub fn tls(&self) -> Option<&TlsInfo> {
        match &self.unit {
            Unit::Scsi { .. } => None,
            Unit::Nbd { tls, .. } => tls.as_ref(),
        }
    }

    /// The names of the content, where it is an NBD device and they could be read.
    #[must_use]
    pub fn content(&self) -> Option<&[ContentName]> {
        match &self.unit {
            Unit::Nbd { content, .. } => content.as_deref(),
            Unit::Scsi { .. } => None,
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
