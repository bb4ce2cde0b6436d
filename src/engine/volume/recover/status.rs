//! The status of a journal's volumes as sysfs alone shows it: nothing is changed, and no
//! command is sent to a device.

mod snapshot;

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::engine::iscsi::login::routes_of_initiator;
use crate::engine::journal::{Journal, JournalView, Operation, Outcome, Record, VolumeSpec};
use crate::engine::nbd::known::{current_links, known_tls};
use crate::engine::volume::devices_at_sources::is_renumbered;
use crate::engine::volume::recover::Condition;
use crate::engine::volume::recover::observe::{Observed, handed_out_disk};
use crate::engine::volume::recover::status::snapshot::{Scanned, SysfsSnapshot};
use crate::engine::{Attachment, Engine, MissingPath, Unit};
use crate::error::{ErrorKind, Result};
use crate::id::{Hctl, NbdIndex, Portal, Source, VolumeId, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::Map;
use crate::nbd::{NbdDevice, TlsInfo};
use crate::scsi::{self, Identity};
use crate::transport::{MissingReason, Route, RouteKind};

/// The status of a journal's volume.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct VolumeStatus {
    /// The volume.
    pub volume: VolumeId,
    /// How it is attached, according to the journal.
    pub spec: VolumeSpec,
    /// The operation that is unfinished.
    pub under_way: Option<Operation>,
    /// Its condition.
    pub condition: Condition,
    /// Its condition in words.
    pub seen: String,
    /// The names that its unit reported when it was attached; empty for NBD.
    pub names: Vec<Wwid>,
    /// The node that was handed out, if its device is there.
    pub node: Option<PathBuf>,
    /// The size of that device in bytes, as the kernel shows it.
    pub size: Option<u64>,
    /// The addresses of the SCSI devices of its unit, sorted.
    pub paths: Vec<Hctl>,
    /// Those of them that do not run, such as blocked or offline ones.
    pub silent: Vec<Hctl>,
    /// The index of the NBD device.
    pub nbd_index: Option<NbdIndex>,
    /// The TLS of the NBD device's connections, as this process or else the journal knows
    /// it; `None` without TLS.
    pub tls: Option<TlsInfo>,
    /// Addresses of its sources that can be scanned and have no device.
    pub unscanned: Vec<Hctl>,
    /// Portals of its sources without a session, if the engine logs in for the volume.
    pub without_session: Vec<Portal>,
    /// Paths that its sources name and that lead nowhere now.
    pub missing: Vec<MissingPath>,
    /// Why a recovery must ask the device itself. sysfs shows one such reason: a path that
    /// runs and has no size. A caller that learns of another reason sets it.
    pub verify_reason: Option<String>,
}

impl VolumeStatus {
    /// A status with nothing but this condition, for plans that are made without a machine.
    #[must_use]
    pub fn new(volume: VolumeId, spec: VolumeSpec, condition: Condition) -> Self {
        Self {
            volume,
            spec,
            under_way: None,
            condition,
            seen: String::new(),
            names: Vec::new(),
            node: None,
            size: None,
            paths: Vec::new(),
            silent: Vec::new(),
            nbd_index: None,
            tls: None,
            unscanned: Vec::new(),
            without_session: Vec::new(),
            missing: Vec::new(),
            verify_reason: None,
        }
    }

    /// Whether a repeated attach may bring a path that is missing now.
    #[must_use]
    pub fn lacks_a_path(&self) -> bool {
        !self.unscanned.is_empty() || !self.without_session.is_empty()
    }

    /// The status of a volume that was attached just now.
    #[must_use]
    pub fn attached(volume: VolumeId, spec: VolumeSpec, attachment: &Attachment) -> Self {
        let mut new = Self::new(volume, spec, Condition::Complete);
        new.seen = format!("attached as {}", attachment.node.display());
        let identity = attachment.identity();
        new.names = identity.map_or_else(Vec::new, |identity| identity.names.clone());
        new.node = Some(attachment.node.clone());
        new.size = Some(attachment.size);
        new.paths = attachment.paths().iter().map(|path| path.hctl).collect();
        new.paths.sort_unstable();
        new.nbd_index = attachment.nbd_index();
        new.tls = attachment.tls().cloned();
        if let Unit::Scsi { missing, .. } = &attachment.unit {
            new.missing.clone_from(missing);
        }
        new
    }

    fn of(record: &Record) -> Self {
        let (volume, spec) = (record.volume.clone(), record.spec.clone());
        let mut new = Self::new(volume, spec, Condition::Gone);
        new.under_way = record.operation();
        let names = record.outcome.as_ref().map(|outcome| &outcome.names);
        new.names = names.cloned().unwrap_or_default();
        new
    }

    /// Records the paths of these routes that lead to none of the devices at `addresses`.
    fn note_missing_paths(&mut self, routes: Vec<Route>, addresses: &BTreeSet<Hctl>) {
        for route in routes {
            match route.address {
                Ok(hctl) if addresses.contains(&hctl) => {}
                Ok(hctl) => self.unscanned.push(hctl),
                Err(why) => {
                    if let RouteKind::Iscsi { portal, .. } = &route.via
                        && self.spec.log_in.is_some()
                        && why.reason == MissingReason::NoSession
                    {
                        self.without_session.push(portal.clone());
                    }
                    self.missing.push(MissingPath::new(route.via, &why));
                }
            }
        }
    }
}

impl Engine {
    /// Reads the status of every volume of the journal. It changes nothing, does not wait,
    /// and sends no command to a device: it knows a SCSI unit by the names that the kernel
    /// read at the scan, and an NBD device by its backend id. So it does not see that an
    /// array has since given an address to another unit, or that an NBD server is away;
    /// [`recover`](Self::recover), a repeated attach and a heal see that. A device that
    /// changes meanwhile may be seen as it was or as it will be.
    ///
    /// It makes one pass over the machine, however many volumes there are. Minimum kernel:
    /// 5.10, for NBD 5.14.
    ///
    /// # Errors
    /// If sysfs cannot be read.
    pub fn survey(&self, journal: &Journal) -> Result<Vec<VolumeStatus>> {
        survey_where(self, &journal.records(), |_| true)
    }

    /// As [`survey`](Engine::survey), for a journal that another process may hold.
    ///
    /// # Errors
    /// As [`survey`](Engine::survey).
    pub fn survey_read(&self, journal: &JournalView) -> Result<Vec<VolumeStatus>> {
        survey_where(self, &journal.records, |_| true)
    }

    /// As [`survey`](Engine::survey), for some volumes. Those that the journal does not know
    /// are left out.
    ///
    /// # Errors
    /// As [`survey`](Engine::survey).
    pub fn survey_of(
        &self,
        journal: &Journal,
        volumes: &BTreeSet<VolumeId>,
    ) -> Result<Vec<VolumeStatus>> {
        survey_where(self, &journal.records(), |volume| volumes.contains(volume))
    }
}

/// As [`survey`](Engine::survey), for records that are in no journal.
pub(in crate::engine) fn survey_records(
    engine: &Engine,
    records: &[Record],
) -> Result<Vec<VolumeStatus>> {
    survey_where(engine, records, |_| true)
}

fn survey_where(
    engine: &Engine,
    records: &[Record],
    wanted: impl Fn(&VolumeId) -> bool,
) -> Result<Vec<VolumeStatus>> {
    let mut snapshot = SysfsSnapshot::default();
    // A unit with a known owner is not that of a volume whose own unit is not known yet.
    for record in records {
        let mut names = record.outcome.iter().flat_map(|outcome| &outcome.names);
        if let Some(name) = names.find(|name| name.is_unique()) {
            snapshot.owners.insert(name.clone(), record.volume.clone());
        }
    }
    let wanted: Vec<&Record> = records.iter().filter(|r| wanted(&r.volume)).collect();
    if wanted.iter().any(|record| record.spec.nbd.is_none()) {
        snapshot.read_scsi(engine.roots())?;
    }
    if wanted.iter().any(|record| record.spec.nbd.is_some()) {
        snapshot.read_nbd(engine.roots())?;
    }
    wanted
        .into_iter()
        .map(|record| survey_one(engine, &snapshot, record))
        .collect()
}

fn survey_one(engine: &Engine, snapshot: &SysfsSnapshot, record: &Record) -> Result<VolumeStatus> {
    let mut found = VolumeStatus::of(record);
    let seen = match &record.spec.nbd {
        Some(nbd) => {
            let devices = snapshot.nbd.get(nbd.backend.as_str());
            let devices = devices.map_or(&[][..], Vec::as_slice);
            survey_nbd(engine, &mut found, devices, record.outcome.as_ref())?
        }
        None => survey_scsi(engine, &mut found, snapshot, record)?,
    };
    found.condition = seen.condition(record);
    found.seen = seen.to_string();
    Ok(found)
}

fn survey_nbd(
    engine: &Engine,
    found: &mut VolumeStatus,
    devices: &[NbdDevice],
    outcome: Option<&Outcome>,
) -> Result<Observed> {
    let device = match devices {
        [] => return Ok(Observed::Nothing),
        [device] => device,
        several => {
            let names: Vec<_> = several.iter().map(|d| d.index().name()).collect();
            let what = format!("{} all have its backend id", names.join(" and "));
            return Ok(Observed::Other(what));
        }
    };
    let (index, disk) = (device.index(), device.disk());
    found.nbd_index = Some(index);
    let handed_out = outcome.is_some_and(|outcome| outcome.devno == disk.devno());
    if handed_out {
        let recorded = outcome.and_then(|outcome| outcome.tls.as_ref());
        if let Some(nbd) = &found.spec.nbd {
            found.tls = known_tls(engine, device, &nbd.backend, recorded);
        }
        found.node = Some(disk.node(engine.roots()));
        found.size = size_if_there(disk)?;
    }
    let dead = current_links(engine, device)
        .get(&index)
        .is_some_and(|link| {
            Some(&link.backend) == found.spec.nbd.as_ref().map(|nbd| &nbd.backend) && link.is_dead()
        });
    if dead {
        let what = format!("the connections of {} have ended", index.name());
        return Ok(Observed::Silent(what));
    }
    let what = format!("connected as {}", index.name());
    Ok(Observed::answers(what, handed_out))
}

fn survey_scsi(
    engine: &Engine,
    found: &mut VolumeStatus,
    snapshot: &SysfsSnapshot,
    record: &Record,
) -> Result<Observed> {
    let routes = survey_routes(engine, found);
    let there = paths_of_volume(engine, snapshot, record, &routes);
    found.note_missing_paths(routes, &snapshot.addresses);
    found.paths = there.iter().map(|scanned| scanned.device.hctl()).collect();
    found.paths.sort_unstable();
    let silent = there.iter().filter(|scanned| !scanned.runs);
    found.silent = silent.map(|scanned| scanned.device.hctl()).collect();
    if there.is_empty() {
        for name in record.names().iter().filter(|name| name.is_unique()) {
            if let Some(map) = Map::find(engine.roots(), name)? {
                let what = format!("the map {} has no paths", map.name());
                return Ok(Observed::Silent(what));
            }
        }
        return Ok(Observed::Nothing);
    }
    let shown: Vec<String> = there.iter().map(ToString::to_string).collect();
    let what = shown.join("; ");
    if !there.iter().any(|scanned| scanned.runs) {
        return Ok(Observed::Silent(what));
    }
    let mut handed_out = false;
    if let Some(outcome) = &record.outcome {
        let mut disks = Vec::new();
        for scanned in &there {
            disks.extend(scanned.device.disk()?);
        }
        if let Some(disk) = handed_out_disk(engine, outcome, &disks)? {
            handed_out = true;
            found.node = Some(disk.node(engine.roots()));
            found.size = size_if_there(&disk)?;
        }
    }
    for scanned in &there {
        if scsi::shows_no_size(&scanned.device)? {
            let hctl = scanned.device.hctl();
            found.verify_reason = Some(format!("the kernel shows {hctl} without a size"));
        }
    }
    Ok(Observed::answers(what, handed_out))
}

/// The devices that are paths of the volume: by its unique name, and by its sources while
/// that name is not known or was not read back.
fn paths_of_volume<'a>(
    engine: &Engine,
    snapshot: &'a SysfsSnapshot,
    record: &Record,
    routes: &[Route],
) -> Vec<&'a Scanned> {
    let names = record.names();
    let unique = names.first().filter(|name| name.is_unique());
    let mut there = unique.map_or_else(Vec::new, |name| snapshot.named(name));
    let attached = record.outcome.is_some();
    if attached && unique.is_some() {
        return there;
    }
    let unit = Identity::of(names);
    let own = |scanned: &&Scanned| {
        let is_other = attached && unit.compare(&scanned.identity).is_different();
        !is_other && !snapshot.belongs_to_another(&scanned.identity, &record.volume)
    };
    for route in routes {
        if let RouteKind::Address { hctl } = route.via
            && is_renumbered(engine, record, &Source::Scsi(hctl))
        {
            continue;
        }
        let place = match &route.address {
            Ok(hctl) => Some(*hctl),
            Err(missing) => missing.hctl,
        };
        let mut scanned = snapshot.scsi.iter();
        let at = scanned.find(|scanned| Some(scanned.device.hctl()) == place);
        there.extend(at.filter(own));
    }
    there
}

/// The routes of the volume's sources. An address whose route cannot be read counts as
/// missing.
fn survey_routes(engine: &Engine, found: &mut VolumeStatus) -> Vec<Route> {
    let mut routes: Vec<Route> = Vec::new();
    let log_in = found.spec.log_in.as_ref();
    let initiator = log_in.map(|log_in| log_in.initiator.clone());
    for source in &found.spec.sources {
        match routes_of_initiator(engine, source, initiator.as_ref()) {
            Ok(found) => routes.extend(found),
            Err(error) => {
                if let Source::Scsi(hctl) = source {
                    let via = RouteKind::Address { hctl: *hctl };
                    found.missing.push(MissingPath::new(via, &error));
                }
            }
        }
    }
    routes
}

/// The disk's size; `None` if the disk goes away meanwhile.
fn size_if_there(disk: &BlockDevice) -> Result<Option<u64>> {
    match disk.size() {
        Err(error) if error.kind() == ErrorKind::Vanished => Ok(None),
        size => size.map(Some),
    }
}
