//! The way of one SCSI attach, from top to bottom.

use std::collections::BTreeSet;

use super::attach::{AttachRequest, Attachment, MissingPath, Unit, UnitClaim, UnitPath};
use super::bring::{Brought, Lost};
use super::lease::Lease;
use super::log_in::Sessions;
use super::phases::Phases;
use super::{Engine, lost, undo};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{DiskSeq, Hctl, Lun, Source};
use crate::kernel::blockdev::{self, BlockDevice};
use crate::scsi::{self, Identity, ScsiDevice};
use crate::transport::{self, Route};
use crate::uevent::Settled;

impl Engine {
    pub(super) fn attach_scsi(
        &self,
        request: &AttachRequest,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Attachment> {
        phases.enter(Stage::Resolve);
        let (routes, mut sessions) = self.routes_with_sessions(request, phases, deadline)?;
        let attached = self.attach_over(routes, &mut sessions, request, phases, deadline);
        match attached {
            // What the kernel is still at would go with it.
            Err(error) if error.kind() != ErrorKind::TimedOut => {
                sessions.give_up(self.roots(), deadline);
                Err(error)
            }
            result => {
                sessions.keep();
                result
            }
        }
    }

    fn attach_over(
        &self,
        routes: Vec<Route>,
        sessions: &mut Sessions,
        request: &AttachRequest,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Attachment> {
        let mut ways = Vec::new();
        let mut missing = Vec::new();
        let mut cause = None;
        let alone = routes.len() == 1;
        for Route { via, place } in routes {
            match (place, sessions.why_none(&via)) {
                (Ok(hctl), _) => ways.push((via, hctl)),
                (Err(_), Some(error)) if alone => return Err(error),
                (Err(_), Some(error)) => {
                    missing.push(MissingPath::of_error(via, &error));
                    cause = Some(worse(cause, error));
                }
                (Err(why), None) => missing.push(MissingPath::of_route(via, &why)),
            }
        }
        // Two sources may name one path.
        let mut seen = BTreeSet::new();
        ways.retain(|(_, hctl)| seen.insert(*hctl));
        let mut cause = require_paths(request, ways.len(), &missing, cause).map(|()| None)?;

        phases.enter(Stage::Lock);
        let _leases = self.lease_addresses(seen, deadline)?;
        let alone = ways.len() == 1 && missing.is_empty();
        let mut unit = Gathered::default();
        for path in self.bring_all(ways, request, phases, deadline) {
            match path {
                Ok(path) => unit.paths.push(path),
                Err(Lost { error, .. }) if alone && error.kind() != ErrorKind::TooFewPaths => {
                    return Err(error);
                }
                Err(Lost { via, error }) => {
                    missing.push(MissingPath::of_error(via, &error));
                    cause = Some(worse(cause, error));
                }
            }
        }
        unit.missing = missing;
        match self.prove(&mut unit, request, cause, phases, deadline) {
            Err(error) if error.kind() != ErrorKind::TimedOut => {
                let mut error = error;
                for path in unit.paths.iter_mut().filter(|path| path.changed) {
                    let (device, watch) = (&path.device, &mut path.watch);
                    error = undo::device(self, error, device, watch, phases, deadline);
                }
                Err(error)
            }
            result => result,
        }
    }

    /// Where sources lead on this machine.
    pub(super) fn routes<'a>(
        &self,
        sources: impl Iterator<Item = &'a Source>,
    ) -> Result<Vec<Route>> {
        let roots = self.roots();
        let mut routes = Vec::new();
        for source in sources {
            match source {
                Source::Scsi(hctl) => {
                    scsi::require_host(roots, hctl.host)?;
                    routes.push(Route::by_address(*hctl));
                }
                Source::Iscsi(uri) => routes.extend(transport::iscsi_routes(roots, uri)?),
                Source::Fc(uri) => routes.extend(transport::fc_routes(roots, uri)?),
                Source::Nbd(uri) => {
                    let message = format!("{uri} is no path of a SCSI unit");
                    return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve));
                }
            }
        }
        Ok(routes)
    }

    /// The rights to work on these addresses, taken in their order, so that two
    /// that want the same ones do not wait for each other.
    pub(super) fn lease_addresses(
        &self,
        addresses: BTreeSet<Hctl>,
        deadline: Deadline,
    ) -> Result<Vec<Lease>> {
        let take = |hctl| Lease::take(self.roots(), &format!("scsi-{hctl}"), deadline);
        addresses.into_iter().map(take).collect()
    }

    /// From paths that have each said who they are to an attached unit.
    fn prove(
        &self,
        unit: &mut Gathered,
        request: &AttachRequest,
        cause: Option<Error>,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Attachment> {
        let roots = self.roots();
        require_paths(request, unit.paths.len(), &unit.missing, cause)?;
        let identity = unit.agree()?;
        if let Some(UnitClaim(claim)) = &request.claim {
            claim(&identity)?;
        }

        phases.enter(Stage::Lock);
        let _unit = self.lease_unit(&identity.names, deadline)?;
        self.adopt_aliases(unit, phases, deadline)?;
        require_paths(request, unit.paths.len(), &unit.missing, None)?;

        phases.enter(Stage::Settle);
        // Now, since udev is at work: the less is left to do when it is done.
        let gathering = self.gathering(request)?;
        let mut settled = self.settle_paths(unit, request, deadline)?;

        let map = match gathering {
            Some(gathering) => {
                self.gather_map(gathering, &unit.paths, &identity, phases, deadline)?
            }
            None => None,
        };
        unit.keep(request, |path| path.look_again())?;
        let first = unit.first()?;
        let (mut disk, mut diskseq) = (first.disk.clone(), first.diskseq);
        if let Some((map, proof)) = &map {
            disk = map.disk().clone();
            diskseq = disk.diskseq()?;
            settled = (proof.how, proof.links.clone());
        }
        let changed = unit.paths.iter().any(|path| path.changed);
        if changed {
            // Whoever takes the unit anew begins with what is on it.
            lost::sweep(roots, &identity.names, true);
        }
        let (how, links) = settled;
        Ok(Attachment {
            source: request.source.clone(),
            node: disk.node(roots),
            devno: disk.devno(),
            diskseq,
            size: disk.size()?,
            read_only: disk.read_only()?,
            links: blockdev::links_to(roots, disk.devno(), &links),
            settled: how,
            phases: Vec::new(),
            changed,
            unit: Unit::Scsi {
                identity,
                paths: unit.paths.iter().map(|path| path.facts(roots)).collect(),
                missing: std::mem::take(&mut unit.missing),
                map: map.map(|(map, _)| map.name().to_owned()),
            },
        })
    }

    /// Where a unit is there at another LUN of the same target too (an array may
    /// present LUN 1 as 16385), the disk that was there first is the one: two disks
    /// of one unit on one path would have a page cache each. What this attach
    /// scanned beside it is taken away again; what others did is left.
    fn adopt_aliases(
        &self,
        unit: &mut Gathered,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<()> {
        for path in &mut unit.paths {
            let Some(other) = path.earlier_alias()? else {
                continue;
            };
            tracing::info!(hctl = %path.device.hctl(), alias = %other.hctl(), "one unit, two LUNs");
            if path.changed {
                self.take_down(&path.device, &mut path.watch, phases, deadline)?;
                path.changed = false;
            }
            let hctl = other.hctl();
            let mut watch = self.hub().watch(&hctl.to_string());
            phases.enter(Stage::Identify);
            let disk = scsi::wait_for_disk(
                &other,
                false,
                self.roots(),
                &self.lanes,
                &mut watch,
                deadline,
            )?;
            let identity = scsi::read_identity(self.roots(), &self.lanes, &other, &disk, deadline)?;
            if !identity.is_same_unit(&path.identity) {
                let message = format!("{hctl} was scanned as the unit of another LUN and is not");
                return Err(Error::new(ErrorKind::Vanished, message).at(Stage::Identify));
            }
            (path.device, path.watch, path.identity) = (other, watch, identity);
            path.diskseq = disk.diskseq()?;
            path.disk = disk;
        }
        unit.have_each_once();
        Ok(())
    }

    /// Waits until udev is done with each path.
    fn settle_paths(
        &self,
        unit: &mut Gathered,
        request: &AttachRequest,
        deadline: Deadline,
    ) -> Result<(Settled, Vec<String>)> {
        let mut proof = None;
        unit.keep(request, |path| {
            let settled = self.settle(&path.disk, &mut path.watch, deadline)?;
            proof.get_or_insert((settled.how, settled.links));
            Ok(())
        })?;
        Ok(proof.unwrap_or((Settled::KernelOnly, Vec::new())))
    }
}

/// The paths of one attach so far.
#[derive(Default)]
struct Gathered {
    paths: Vec<Brought>,
    missing: Vec<MissingPath>,
}

impl Gathered {
    fn first(&self) -> Result<&Brought> {
        let none = || Error::new(ErrorKind::TooFewPaths, "no path is left");
        self.paths.first().ok_or_else(none)
    }

    /// Two addresses of one device are one path.
    fn have_each_once(&mut self) {
        let mut once: Vec<Brought> = Vec::new();
        for path in std::mem::take(&mut self.paths) {
            match once.iter_mut().find(|known| known.device == path.device) {
                Some(known) => known.changed |= path.changed,
                None => once.push(path),
            }
        }
        self.paths = once;
    }

    /// Keeps the paths that pass. One that does not, since it went away or udev
    /// does not answer for it, is missing, as long as enough are left.
    fn keep(
        &mut self,
        request: &AttachRequest,
        mut pass: impl FnMut(&mut Brought) -> Result<()>,
    ) -> Result<()> {
        let mut failures = Vec::new();
        for mut path in std::mem::take(&mut self.paths) {
            match pass(&mut path) {
                Ok(()) => self.paths.push(path),
                Err(error) => failures.push((path, error)),
            }
        }
        let enough = self.paths.len() >= request.min_paths.max(1);
        let mut first = Ok(());
        for (path, error) in failures {
            if enough {
                let missing = MissingPath::of_error(path.via.clone(), &error);
                self.missing.push(missing);
            } else {
                // It is taken down with the others.
                self.paths.push(path);
                first = first.and(Err(error));
            }
        }
        first
    }

    /// Who the unit is, by the word of every path.
    fn agree(&self) -> Result<Identity> {
        let first = self.first()?;
        for path in self.paths.iter().skip(1) {
            if !path.identity.is_same_unit(&first.identity) {
                let message = format!(
                    "the paths lead to different units: {} says that it is {}, {} that it is {}",
                    first.via, first.identity, path.via, path.identity
                );
                return Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Identify));
            }
        }
        Ok(first.identity.clone())
    }
}

impl Brought {
    /// The device that is handed out is the one that was proven, and serves I/O.
    fn look_again(&self) -> Result<()> {
        self.device.require_usable(Stage::Settle)?;
        let same = match self.diskseq {
            // One life, so one number as well.
            Some(life) => self.disk.diskseq()? == Some(life),
            None => BlockDevice::at(self.disk.dir())?.as_ref() == Some(&self.disk),
        };
        if same {
            return Ok(());
        }
        let message = format!("{} was replaced while it was attached", self.device.hctl());
        Err(Error::new(ErrorKind::Vanished, message).at(Stage::Settle))
    }

    /// The same unit at another LUN of the same target, where its disk was there
    /// before this one. Before Linux 5.15 nothing tells that of two that were both
    /// there before us, and then the lower LUN is taken.
    fn earlier_alias(&self) -> Result<Option<ScsiDevice>> {
        // A vendor's text may be the same on two units of one target.
        let Some(name) = self.identity.wwid().filter(|name| name.is_registered()) else {
            return Ok(None);
        };
        // One that this attach brought gives way to any: another attach may have
        // handed that one out, though its number is the higher (the kernel gives
        // it before it shows the disk).
        let mut first = (self.changed, self.diskseq, self.device.hctl().lun);
        let mut earlier = None;
        for other in self.device.siblings_that_may_be(name)? {
            match self.is_alias_since(&other) {
                Ok(Some(age)) if age < first => {
                    first = age;
                    earlier = Some(other);
                }
                // Another unit's, which goes away while we look.
                Err(error) if other.is_there() => return Err(error),
                _ => {}
            }
        }
        Ok(earlier)
    }

    fn is_alias_since(&self, other: &ScsiDevice) -> Result<Option<(bool, Option<DiskSeq>, Lun)>> {
        // Without a disk it is younger; its own attach will look here.
        let Some(disk) = other.disk()? else {
            return Ok(None);
        };
        let same = other.cached_identity()?.is_same_unit(&self.identity);
        let age = (false, disk.diskseq()?, other.hctl().lun);
        Ok(same.then_some(age))
    }

    fn facts(&self, roots: &crate::kernel::Roots) -> UnitPath {
        UnitPath {
            via: self.via.clone(),
            hctl: self.device.hctl(),
            node: self.disk.node(roots),
            devno: self.disk.devno(),
            diskseq: self.diskseq,
            changed: self.changed,
        }
    }
}

/// Of two failures the one that weighs more: another unit at a path's end is
/// no outage.
fn worse(earlier: Option<Error>, later: Error) -> Error {
    match earlier {
        Some(earlier) if later.kind() != ErrorKind::IdentityMismatch => earlier,
        _ => later,
    }
}

/// # Errors
/// `TooFewPaths`, naming those that are missing; a path that leads to another
/// unit is an error however many others there are.
fn require_paths(
    request: &AttachRequest,
    found: usize,
    missing: &[MissingPath],
    cause: Option<Error>,
) -> Result<()> {
    let other_unit = |error: &Error| error.kind() == ErrorKind::IdentityMismatch;
    if cause.as_ref().is_some_and(other_unit)
        && let Some(error) = cause
    {
        return Err(error);
    }
    let wanted = request.min_paths.max(1);
    if found >= wanted {
        return Ok(());
    }
    let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let message = format!(
        "{wanted} {} wanted and {found} there; missing: {}",
        if wanted == 1 { "path is" } else { "paths are" },
        missing.join("; ")
    );
    let error = Error::new(ErrorKind::TooFewPaths, message);
    Err(match cause {
        Some(cause) => {
            let stage = cause.stage().unwrap_or(Stage::Resolve);
            // Of a path that could not be taken back, or that a call is still at.
            let stands = cause.last_seen().map(str::to_owned);
            let error = error.at(stage).caused_by(cause);
            match stands {
                Some(stands) => error.with_last_seen(stands),
                None => error,
            }
        }
        None => error.at(Stage::Resolve),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::kernel::Roots;
    use crate::transport::Via;

    /// A device with a disk of the one unit of this target.
    fn device(target: &Path, lun: &str, disk: &str, diskseq: u64) {
        let dir = target.join(lun);
        let block = dir.join("block").join(disk);
        fs::create_dir_all(&block).unwrap();
        let naa = [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];
        let page = [&[0, 0x83, 0, 12, 2, 3, 0, 8][..], &naa].concat();
        fs::write(dir.join("vpd_pg83"), page).unwrap();
        fs::write(block.join("dev"), format!("8:{diskseq}\n")).unwrap();
        fs::write(block.join("diskseq"), format!("{diskseq}\n")).unwrap();
    }

    #[test]
    fn what_is_left_of_a_path_is_said_where_too_few_are_there() {
        let source: Source = "scsi:1:0:0:1".parse().unwrap();
        let request = AttachRequest::new(source).min_paths(2);
        let waited = std::time::Duration::from_secs(9);
        let cause = Error::timed_out(Stage::Identify, waited, "sdb to answer");
        let cause = cause.with_last_seen("state=running, disk sdb");
        let error = require_paths(&request, 1, &[], Some(cause)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooFewPaths);
        assert_eq!(error.stage(), Some(Stage::Identify));
        assert_eq!(error.last_seen(), Some("state=running, disk sdb"));
    }

    #[test]
    fn what_an_attach_has_brought_gives_way_to_another_lun_of_the_unit_whatever_their_numbers() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let target = roots.sysfs.join("devices/target2:0:0");
        device(&target, "2:0:0:1", "sda", 7);
        device(&target, "2:0:0:16385", "sdb", 8);
        let bus = roots.sysfs.join("bus/scsi/devices");
        fs::create_dir_all(&bus).unwrap();
        for lun in ["2:0:0:1", "2:0:0:16385"] {
            std::os::unix::fs::symlink(target.join(lun), bus.join(lun)).unwrap();
        }
        let engine = Engine::start(roots.clone()).unwrap();
        let alias = |lun: &str, changed| {
            let device = ScsiDevice::find(&roots, lun.parse().unwrap());
            let device = device.unwrap().unwrap();
            let disk = device.disk().unwrap().unwrap();
            let hctl = device.hctl();
            let path = Brought {
                via: Via::Address { hctl },
                diskseq: disk.diskseq().unwrap(),
                identity: device.cached_identity().unwrap(),
                watch: engine.hub().watch(lun),
                changed,
                device,
                disk,
            };
            let alias = path.earlier_alias().unwrap();
            alias.map(|device| device.hctl().to_string())
        };
        // Both stood: the one that came first is the one.
        assert_eq!(alias("2:0:0:1", false), None);
        assert_eq!(alias("2:0:0:16385", false).as_deref(), Some("2:0:0:1"));
        assert_eq!(alias("2:0:0:16385", true).as_deref(), Some("2:0:0:1"));
        // Its number is the lower, and the other may have been handed out before it
        // was to be seen.
        assert_eq!(alias("2:0:0:1", true).as_deref(), Some("2:0:0:16385"));
    }
}
