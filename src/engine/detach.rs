//! What a detach is asked and what it answers. The way itself is in
//! [`scsi`] and [`nbd`].

mod flush_paths;
mod foreign_unit;
mod nbd;
pub(super) mod receipt;
mod remove_device;
mod remove_map;
pub(super) mod remove_paths;
pub(super) mod scsi;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::Engine;
use super::telemetry::{self, Call};
use super::timing::{Phase, StageObserver, StageTimer};
use super::usage::NotLookedAt;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, DevNo, DiskSeq, Hctl, NbdIndex, ParseIdError, SessionId, Source, Wwid};
use crate::kernel::blockdev::{self, BlockDevice};
use crate::multipath::Map;
use crate::nbd::NbdDevice;
use crate::scsi::ScsiDevice;
use receipt::{DetachFailure, Flush, Receipt};
use scsi::ResolvedUnit;

/// What to detach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetachTarget {
    /// What an attach of this source brought.
    Source(Source),
    /// A node, or a link to it: of a disk or of a multipath map.
    Device(PathBuf),
    /// A SCSI unit, by a [unique](Wwid::is_unique) name of it. Any other name is refused
    /// where a device has it: that may be another unit's.
    Unit(Wwid),
}

impl From<Source> for DetachTarget {
    fn from(source: Source) -> Self {
        Self::Source(source)
    }
}

impl FromStr for DetachTarget {
    type Err = Error;

    /// A path from the root; `unit:` and a name of the unit in any of its
    /// spellings; or a source.
    fn from_str(text: &str) -> Result<Self> {
        if text.starts_with('/') {
            return Ok(Self::Device(PathBuf::from(text)));
        }
        if let Some(name) = text.strip_prefix("unit:") {
            return Ok(Self::Unit(name.parse()?));
        }
        text.parse()
            .map(Self::Source)
            .map_err(|error: ParseIdError| {
                let message = format!("{error}, the path of a disk's node, or unit:NAME");
                Error::new(ErrorKind::InvalidInput, message)
            })
    }
}

impl fmt::Display for DetachTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(source) => source.fmt(f),
            Self::Device(path) => path.display().fmt(f),
            Self::Unit(name) => write!(f, "unit:{name}"),
        }
    }
}

/// What to detach, and how.
#[derive(Debug, Clone)]
pub struct DetachRequest {
    pub(super) target: DetachTarget,
    more: Vec<Source>,
    pub(super) expected: Option<Wwid>,
    pub(super) backend: Option<BackendId>,
    pub(super) abandon: bool,
    keep_sessions: bool,
    observer: Option<StageObserver>,
}

impl DetachRequest {
    /// A detach that loses nothing, or is refused.
    pub fn new(target: impl Into<DetachTarget>) -> Self {
        Self {
            target: target.into(),
            more: Vec::new(),
            expected: None,
            backend: None,
            abandon: false,
            keep_sessions: false,
            observer: None,
        }
    }

    /// Detaches only the SCSI unit that has this name. Where the source leads nowhere any
    /// more, it finds the unit's paths by a [unique](Wwid::is_unique) name.
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// Another source of the same SCSI unit: the paths that a unit without a
    /// [unique](Wwid::is_unique) name has through other targets are found by it alone.
    #[must_use]
    pub fn path(mut self, source: impl Into<Source>) -> Self {
        self.more.push(source.into());
        self
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

    /// Leaves the iSCSI sessions that the engine made logged in, also where no
    /// device is left on one.
    #[must_use]
    pub fn keep_sessions(mut self) -> Self {
        self.keep_sessions = true;
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
    /// All was flushed and nothing of it is left on this machine: each was read
    /// back. Where it is `false`, the receipt's notes say what is not proven.
    pub safe_to_unmap: bool,
    /// Where somebody may have had it open who was not seen: what such a user wrote
    /// after the flush is lost. Of a SCSI unit the same as in its receipt.
    pub not_looked_at: Vec<NotLookedAt>,
    /// What was read back of a SCSI unit, path by path.
    pub receipt: Option<Receipt>,
    /// The iSCSI sessions that were logged out: made by the engine, and with no
    /// device left.
    pub logged_out: Vec<SessionId>,
}

/// Where a device was.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Place {
    /// A SCSI unit.
    Scsi {
        /// The address of its first path; `None` where none was there and the
        /// caller named none.
        hctl: Option<Hctl>,
        /// Its strongest name, where somebody could say it.
        name: Option<Wwid>,
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
            Self::Scsi {
                hctl: Some(hctl), ..
            } => write!(f, "scsi:{hctl}"),
            Self::Scsi {
                name: Some(name), ..
            } => name.fmt(f),
            Self::Scsi { .. } => f.write_str("scsi"),
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
            safe_to_unmap: false,
            not_looked_at: Vec::new(),
            receipt: None,
            logged_out: Vec::new(),
        }
    }

    /// One answer for this one and the `next` one, of another source of the same
    /// volume. One that found nothing says nothing beside one that did.
    pub(super) fn and(mut self, mut next: Self) -> Self {
        self.phases.append(&mut next.phases);
        self.logged_out.append(&mut next.logged_out);
        if self.found_nothing() && (next.changed || next.receipt.is_some()) {
            (next.phases, next.logged_out) = (self.phases, self.logged_out);
            return next;
        }
        if next.found_nothing() {
            return self;
        }
        if next.changed && !self.changed {
            std::mem::swap(&mut self, &mut next);
            (self.phases, self.logged_out) = (next.phases, next.logged_out);
        }
        self.safe_to_unmap &= next.safe_to_unmap;
        NotLookedAt::note(&mut self.not_looked_at, &next.not_looked_at);
        match (&mut self.receipt, next.receipt) {
            (Some(receipt), Some(next)) => receipt.append(next),
            (receipt @ None, next) => *receipt = next,
            (Some(_), None) => {}
        }
        self
    }

    fn found_nothing(&self) -> bool {
        !self.changed && self.receipt.as_ref().is_none_or(Receipt::found_nothing)
    }
}

impl Engine {
    /// Detaches one device: proves that nobody uses it by claiming it
    /// exclusively and by looking for those that a claim does not exclude (processes
    /// that have it open for writing, loop devices, targets of the kernel), writes its
    /// pages and its cache back, and takes it down. What is not there is detached
    /// already: `changed: false`. A process that only reads does not keep a disk; a map
    /// is kept by whoever has it open.
    ///
    /// **SCSI**: all paths of the unit, found by its identity at that moment,
    /// those that come late included, after its multipath map. Where no name of the unit is
    /// [unique](Wwid::is_unique), its paths are those that the caller named and those that
    /// lead to the same LUN of the same iSCSI target or Fibre Channel port; another device
    /// with the same names is left, and the receipt names it. The order is that
    /// which loses nothing: claim and flush the map, remove it, claim and flush
    /// each path, delete each; a flush that fails stops the deletes. Then the end of
    /// what this machine still scans at its source's addresses, be it for a process that
    /// was killed, is waited for, and what that brings goes too. Returns when
    /// sysfs shows none of them, udev has handled their removal and multipathd
    /// has forgotten them. Linux 5.10 or later; needs write access to the
    /// devices' `delete` attribute (root) and `CAP_SYS_ADMIN`.
    ///
    /// **NBD**: disconnects, and returns when the device is free: no `pid`, no
    /// size, nothing in flight, no holder. A source is found by its backend id,
    /// so that a device of another's is never touched; a node is taken at its
    /// word, whatever its id.
    ///
    /// A refusal leaves the device as it was. After a timeout at stage `delete`,
    /// `disconnect` or `confirm` the kernel goes on by itself; at stage `settle`
    /// the device is gone and udev has not handled that yet. A repeated detach
    /// is safe. What may pass by itself is tried again until the deadline.
    ///
    /// # Errors
    /// Each with the receipt of what was done. `InUse`, which names the users; `NotFound`
    /// where a path leads nowhere (which does not prove that the disk is gone:
    /// name the source or the unit); `IdentityMismatch` where another unit is
    /// there than the expected one; `InvalidInput` for a partition;
    /// `NotSupported` for a disk that is neither, and before Linux 5.14 for an NBD
    /// source while any NBD device is connected: name the node; `Io` where the flush failed,
    /// and then nothing is taken down; `NotPermitted`; `TimedOut` at the stage
    /// that it names.
    #[tracing::instrument(skip_all, fields(target, node))]
    pub fn detach(
        &self,
        request: impl Into<DetachRequest>,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        let request = request.into();
        tracing::Span::current().record("target", request.target.to_string());
        telemetry::measured(Call::Detach, || self.detach_timed(&request, deadline))
    }

    fn detach_timed(
        &self,
        request: &DetachRequest,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        let mut timer = StageTimer::new(Call::Detach, request.observer.as_ref());
        timer.enter(Stage::Resolve);
        let backend = request.backend.clone();
        let mut detachment = match self.find(&request.target, backend)? {
            Resolved::Scsi(mut resolved) => {
                for source in &request.more {
                    resolved.addresses.extend(self.addresses_of(source)?);
                }
                let done = self.detach_scsi(&resolved, request, &mut timer, deadline)?;
                self.end_sessions(done, &resolved, request, &mut timer, deadline)?
            }
            Resolved::NbdBackend(id) => {
                self.detach_nbd_backend(id, request, &mut timer, deadline)?
            }
            Resolved::Nbd(device) => {
                self.detach_nbd_device(&device, request, &mut timer, deadline)?
            }
        };
        detachment.phases = timer.finish();
        if let Some(node) = &detachment.node {
            tracing::Span::current().record("node", tracing::field::display(node.display()));
        }
        Ok(detachment)
    }

    /// Logs out the sessions of ours that the unit was on, where nothing else is
    /// on them. An attach that uses one is waited for, so nothing is held here that
    /// it could wait for.
    fn end_sessions(
        &self,
        mut detachment: Detachment,
        resolved: &ResolvedUnit,
        request: &DetachRequest,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        if request.keep_sessions {
            return Ok(detachment);
        }
        match self.end_sessions_behind(&detachment, resolved, request, timer, deadline) {
            Ok(ended) => {
                detachment.logged_out = ended;
                Ok(detachment)
            }
            Err(error) => Err(DetachFailure::after(error, detachment.receipt)),
        }
    }

    fn end_sessions_behind(
        &self,
        detachment: &Detachment,
        resolved: &ResolvedUnit,
        request: &DetachRequest,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<Vec<SessionId>> {
        let at = |error: Error| error.at(Stage::Logout);
        let paths = detachment.receipt.iter().flat_map(|receipt| &receipt.paths);
        let mut hosts: BTreeSet<_> = paths.map(|path| path.hctl.host).collect();
        hosts.extend(resolved.addresses.iter().map(|hctl| hctl.host));
        let first = match &request.target {
            DetachTarget::Source(source) => Some(source),
            DetachTarget::Device(_) | DetachTarget::Unit(_) => None,
        };
        for source in first.into_iter().chain(&request.more) {
            if let Source::Iscsi(uri) = source {
                hosts.extend(self.hosts_of_ended(uri.target()).map_err(at)?);
            }
        }
        if !self.has_own_session(&hosts).map_err(at)? {
            return Ok(Vec::new());
        }
        timer.enter(Stage::Logout);
        self.end_unused_sessions(&hosts, deadline)
    }

    /// The SCSI unit that a target names.
    pub(super) fn find(
        &self,
        target: &DetachTarget,
        backend: Option<BackendId>,
    ) -> Result<Resolved> {
        match target {
            DetachTarget::Source(source @ Source::Nbd(_)) => {
                let derived = || BackendId::derived(&source.to_string());
                let id = backend.unwrap_or_else(derived);
                Ok(Resolved::NbdBackend(id))
            }
            DetachTarget::Source(source) => {
                let addresses = self.addresses_of(source)?;
                Ok(Resolved::Scsi(ResolvedUnit {
                    addresses,
                    ..ResolvedUnit::default()
                }))
            }
            DetachTarget::Device(path) => self.behind(path),
            DetachTarget::Unit(name) => Ok(Resolved::Scsi(ResolvedUnit {
                name: Some(name.clone()),
                ..ResolvedUnit::default()
            })),
        }
    }

    /// Where a source leads, also where its session or port is down: the kernel
    /// keeps the devices.
    pub(super) fn addresses_of(&self, source: &Source) -> Result<BTreeSet<Hctl>> {
        if let Source::Scsi(hctl) = source {
            return Ok(BTreeSet::from([*hctl]));
        }
        let routes = self.routes(std::iter::once(source))?;
        Ok(routes
            .into_iter()
            .filter_map(|route| match route.place {
                Ok(hctl) => Some(hctl),
                Err(missing) => missing.hctl,
            })
            .collect())
    }

    /// The device behind a node.
    fn behind(&self, path: &Path) -> Result<Resolved> {
        let at = |error: Error| error.at(Stage::Resolve);
        let not_found = || {
            let message = "no device is there: to prove that a disk is gone, name its source or \
                           its unit";
            at(Error::new(ErrorKind::NotFound, message).with_path(path))
        };
        let devno = blockdev::devno_at(self.roots(), path).map_err(at)?;
        let disk = BlockDevice::of(self.roots(), devno).map_err(at)?;
        let disk = disk.ok_or_else(not_found)?;
        if disk.is_partition() {
            let message = format!("{} is a partition: name the whole disk", disk.name());
            return Err(at(
                Error::new(ErrorKind::InvalidInput, message).with_path(path)
            ));
        }
        if let Some(index) = NbdIndex::of_name(disk.name()) {
            let device = NbdDevice::find(self.roots(), index).map_err(at)?;
            return device.map(Resolved::Nbd).ok_or_else(not_found);
        }
        if let Some(map) = Map::of_disk(&disk)? {
            return Ok(Resolved::Scsi(ResolvedUnit {
                map: Some(map),
                ..ResolvedUnit::default()
            }));
        }
        if Map::is_going(self.roots(), disk.name()) {
            return Err(not_found());
        }
        let device = ScsiDevice::of_disk(&disk).map_err(at)?;
        Ok(Resolved::Scsi(ResolvedUnit {
            device: Some(device.ok_or_else(not_found)?),
            ..ResolvedUnit::default()
        }))
    }
}

/// What the target of a detach, or of a resize, leads to.
pub(super) enum Resolved {
    Scsi(ResolvedUnit),
    NbdBackend(BackendId),
    Nbd(NbdDevice),
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::kernel::Roots;

    #[test]
    fn the_receipt_of_what_was_taken_down_is_in_the_failure_to_look_for_its_session() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        // It cannot be listed.
        let class = engine.roots().sysfs.join("class");
        fs::create_dir_all(&class).unwrap();
        fs::write(class.join("iscsi_session"), "").unwrap();
        let request = DetachRequest::new(
            "iscsi://127.0.0.1/iqn.2026-01.net.example:a/3"
                .parse::<DetachTarget>()
                .unwrap(),
        );
        let place = Place::Scsi {
            hctl: None,
            name: None,
        };
        let mut detachment = Detachment::unchanged(place);
        let notes = vec!["taken down".to_owned()];
        detachment.receipt = Some(Receipt {
            notes: notes.clone(),
            ..Receipt::default()
        });
        let mut timer = StageTimer::new(Call::Detach, None);
        let deadline = Deadline::after(std::time::Duration::from_secs(30));
        let ended = engine.end_sessions(
            detachment,
            &ResolvedUnit::default(),
            &request,
            &mut timer,
            deadline,
        );
        let failure = ended.unwrap_err();
        assert_eq!(failure.stage(), Some(Stage::Logout), "{failure}");
        assert_eq!(failure.receipt.notes, notes);
    }
}
