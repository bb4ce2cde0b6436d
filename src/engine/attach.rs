//! What an attach is asked and what it answers. The way itself is in
//! [`scsi`] and [`nbd`].

mod alias;
mod best_path;
mod multipath_map;
mod multipathd;
pub(super) mod nbd;
pub(super) mod nbd_options;
mod rollback;
mod scsi;
mod scsi_path;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::Engine;
use super::telemetry::{self, Call};
use super::timing::{Phase, StageObserver, StageTimer};
use super::unit::place::PathPlace;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BackendId, ContentName, DevNo, DiskSeq, Hctl, NbdIndex, Source, Wwid};
use crate::iscsi::SessionOptions;
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{AccessState, Identity};
use crate::transport::{RouteKind, RouteUnavailable};
use crate::uevent::{self, Proof, Settled, Watch};
use nbd_options::NbdOptions;

/// What to attach, and what to expect.
#[derive(Debug, Clone)]
pub struct AttachRequest {
    pub(super) source: Source,
    pub(super) more: Vec<Source>,
    pub(super) min_paths: usize,
    pub(super) multipath: Multipath,
    pub(super) expected: Option<Wwid>,
    pub(super) nbd: NbdOptions,
    pub(super) log_in: Option<SessionOptions>,
    pub(super) claim: Option<UnitClaim>,
    /// What stands may be left of an attach that was not to see its end.
    pub(super) finishing: bool,
    /// What the volume held by the journal's word; `None` where that is not known.
    pub(super) known_content: Option<Vec<ContentName>>,
    observer: Option<StageObserver>,
}

impl AttachRequest {
    /// An attach of `source`, whatever it turns out to be.
    pub fn new(source: impl Into<Source>) -> Self {
        Self {
            source: source.into(),
            more: Vec::new(),
            min_paths: 1,
            multipath: Multipath::default(),
            expected: None,
            nbd: NbdOptions::default(),
            log_in: None,
            claim: None,
            finishing: false,
            known_content: None,
            observer: None,
        }
    }

    /// Attaches only if the unit itself says that this is one of its names.
    /// For SCSI: an NBD server knows no such names, and the content of its volume has
    /// names of [its own](NbdOptions::expect).
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// Another source of the same unit: further paths of one attach, where one
    /// source does not name them all (an array with a target name a port). For SCSI. Paths
    /// whose names agree and are not [unique](Wwid::is_unique) are taken for one unit,
    /// unless they lead to two iSCSI targets.
    #[must_use]
    pub fn path(mut self, source: impl Into<Source>) -> Self {
        self.more.push(source.into());
        self
    }

    /// How many paths must lead to a SCSI unit for the attach to succeed; 1 by
    /// default. Those that are missing are in [`Unit::Scsi`] with why.
    #[must_use]
    pub fn min_paths(mut self, count: usize) -> Self {
        self.min_paths = count;
        self
    }

    /// Whether the device that is handed out is a multipath map.
    #[must_use]
    pub fn multipath(mut self, multipath: Multipath) -> Self {
        self.multipath = multipath;
        self
    }

    /// Whether the volume and its source are written down in a journal.
    pub(super) fn is_in_a_journal(&self) -> bool {
        self.claim.is_some()
    }

    pub(super) fn sources(&self) -> impl Iterator<Item = &Source> {
        std::iter::once(&self.source).chain(&self.more)
    }

    /// How an NBD source is attached; other sources have no use for it.
    #[must_use]
    pub fn nbd(mut self, options: NbdOptions) -> Self {
        self.nbd = options;
        self
    }

    /// Logs in where no session leads to an iSCSI source: through all of its
    /// portals at once, without a daemon. A session that is there is used, ours or
    /// the daemon's, where it is of the same initiator. One that this makes stands
    /// until the last device on it is detached. For a volume of a journal the CHAP
    /// secret must be [where the next process finds it](SessionOptions::credentials_from).
    #[must_use]
    pub fn log_in(mut self, options: SessionOptions) -> Self {
        self.log_in = Some(options);
        self
    }

    /// Has `observer` told each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

/// Asked of a SCSI unit as soon as it has said who it is, and before it is
/// handed out: a refusal takes down again what the attach brought.
#[derive(Clone)]
pub(super) struct UnitClaim(pub(super) Arc<Claim>);

type Claim = dyn Fn(&Identity, &[PathPlace]) -> Result<()> + Send + Sync;

impl fmt::Debug for UnitClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnitClaim")
    }
}

/// Whether a SCSI unit is used through a multipath map.
///
/// multipathd with its own defaults (`find_multipaths strict`) makes a map only of a
/// unit that it has mapped before or is told to map. It is told (`add map`) where the
/// caller wants a map: with [`Multipath::Require`], and with [`Multipath::Prefer`] where
/// the attach names two paths or more. multipathd then writes the unit's name into its
/// file, `/etc/multipath/wwids`, as it does for every map that it makes, and maps the
/// unit by itself whenever it comes again; `multipath -w` takes the name out. Its
/// blacklists always count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Multipath {
    /// The map must be there and hold every path of the attach: waits for it. Fails at
    /// once where multipathd says that it makes none.
    Require,
    /// The map where multipathd makes one of these paths, else the first path, and
    /// [`Unit::Scsi`] says why there is no map. One path alone is mapped only where
    /// multipathd maps it by itself.
    #[default]
    Prefer,
    /// The first path; multipathd is not asked.
    Off,
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
        /// Its names, read from the unit with INQUIRY, on every path.
        identity: Identity,
        /// Its paths, in the order of the sources; at least one.
        paths: Vec<UnitPath>,
        /// The paths that were asked for and are not there.
        missing: Vec<MissingPath>,
        /// The name of the multipath map, where the attached device is one.
        map: Option<String>,
        /// Why there is no map, where one was wanted: several paths were named and
        /// [`Multipath::Off`] was not asked for.
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
    pub(super) fn of_route(via: RouteKind, why: &RouteUnavailable) -> Self {
        let why = why.to_string();
        Self { via, why }
    }

    pub(super) fn of_error(via: RouteKind, error: &Error) -> Self {
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

impl Engine {
    /// Attaches one device and returns when it has settled.
    ///
    /// **SCSI**: finds where the sources lead, scans for one logical unit on each
    /// path and for nothing else, waits for the disks, asks each who it is: all
    /// must be one unit, and the expected one. A device that is there already is
    /// asked too; where the array has given its address to another unit since it
    /// was scanned, it is replaced if nobody uses it, and never handed out. With
    /// multipathd the map is handed out. Linux 5.10 or later; needs write access
    /// to the hosts' `scan` attribute (root) and `CAP_SYS_ADMIN`.
    ///
    /// **NBD**: shakes hands with the server, hands the sockets to the kernel's
    /// driver over netlink under a backend id, and reads size, access and id
    /// back. Before that it reads what names the content from the server. A device that has this backend id already is returned as it is.
    /// Linux 5.14 or later for backend ids; 5.10 connects without. Needs the
    /// `nbd` module and `CAP_SYS_ADMIN` in the initial user namespace.
    ///
    /// What was attached already comes back with `changed: false`. A failure
    /// leaves nothing behind: what this call brought in is taken down again,
    /// except after a timeout, when it stands as the error says and a repeated
    /// attach goes on with it. A call that is [cancelled](crate::Cancel) has 15 seconds for
    /// that.
    ///
    /// # Errors
    /// `InvalidInput` (an NBD source with further paths or an expected name, or as a
    /// further path), `NoSuchHost`, `NotFound`, `TooFewPaths`, `IdentityMismatch`,
    /// `InUse` (a stale disk that somebody holds; no NBD index that is free; an NBD
    /// device that stands under another index than the wanted one, or writable and is
    /// wanted read-only), `Quarantined`,
    /// `NotSupported` (no disk; no `nbd` module), `NotReady` (blocked
    /// or offline; no path serves I/O in its ALUA access state), `Unreachable` and `Protocol`
    /// (the NBD server), `Refused`, `NotPermitted`, `Vanished`, `TimedOut` and `Cancelled` at
    /// the stage that they name, `Io`.
    #[tracing::instrument(skip_all, fields(source = %request.source, node))]
    pub fn attach(&self, request: &AttachRequest, deadline: Deadline) -> Result<Attachment> {
        telemetry::measured(Call::Attach, || self.attach_timed(request, deadline))
    }

    fn attach_timed(&self, request: &AttachRequest, deadline: Deadline) -> Result<Attachment> {
        let mut timer = StageTimer::new(Call::Attach, request.observer.as_ref());
        let mut attachment = match &request.source {
            Source::Scsi(_) | Source::Iscsi(_) | Source::Fc(_) => {
                self.attach_scsi(request, &mut timer, deadline)?
            }
            Source::Nbd(uri) => self.attach_nbd(uri, request, &mut timer, deadline)?,
        };
        attachment.phases = timer.finish();
        let node = attachment.node.display();
        tracing::Span::current().record("node", tracing::field::display(node));
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
