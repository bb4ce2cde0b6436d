//! Resolves the target of a detach or of a resize.

use std::collections::BTreeSet;
use std::path::Path;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::addresses::routes_to;
use crate::engine::detach::request::DetachTarget;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, DevNo, Hctl, NbdIndex, Source, Wwid};
use crate::kernel::blockdev::{self, BlockDevice};
use crate::kernel::worker;
use crate::multipath::Map;
use crate::nbd::NbdDevice;
use crate::scsi::ScsiDevice;

/// A SCSI unit as the target names it.
#[derive(Debug, Default)]
pub(in crate::engine) struct ResolvedUnit {
    /// The addresses to which the sources lead.
    pub(in crate::engine) addresses: BTreeSet<Hctl>,
    /// The device that was named by its node. A later device at its address is not meant.
    pub(in crate::engine) device: Option<ScsiDevice>,
    /// The map that was named by its node.
    pub(in crate::engine) map: Option<Map>,
    /// A name of the unit.
    pub(in crate::engine) name: Option<Wwid>,
}

impl ResolvedUnit {
    /// The addresses to lock against other processes.
    pub(in crate::engine) fn locked_addresses(&self) -> BTreeSet<Hctl> {
        let mut addresses = self.addresses.clone();
        addresses.extend(self.device.as_ref().map(ScsiDevice::hctl));
        addresses
    }
}

/// What the target of a detach or of a resize names.
pub(in crate::engine) enum Resolved {
    Scsi(ResolvedUnit),
    NbdBackend(BackendId),
    Nbd(NbdDevice),
}

/// Resolves a target.
///
/// # Errors
/// `NotFound` and `InvalidInput`; `TimedOut` where the path of a node leads to a file
/// server that does not answer; all at stage `resolve`.
pub(in crate::engine) fn resolve_target(
    engine: &Engine,
    target: &DetachTarget,
    backend: Option<BackendId>,
    deadline: Deadline,
) -> Result<Resolved> {
    match target {
        DetachTarget::Source(source @ Source::Nbd(_)) => {
            let derived = || BackendId::derived(&source.to_string());
            let id = backend.unwrap_or_else(derived);
            Ok(Resolved::NbdBackend(id))
        }
        DetachTarget::Source(source) => {
            let addresses = addresses_of(engine, source)?;
            Ok(Resolved::Scsi(ResolvedUnit {
                addresses,
                ..ResolvedUnit::default()
            }))
        }
        DetachTarget::Device(path) => resolve_node(engine, path, deadline),
        DetachTarget::Unit(name) => Ok(Resolved::Scsi(ResolvedUnit {
            name: Some(name.clone()),
            ..ResolvedUnit::default()
        })),
    }
}

/// The addresses to which a source leads, even where its session or port is down: the
/// kernel keeps the devices.
pub(in crate::engine) fn addresses_of(engine: &Engine, source: &Source) -> Result<BTreeSet<Hctl>> {
    if let Source::Scsi(hctl) = source {
        return Ok(BTreeSet::from([*hctl]));
    }
    let routes = routes_to(engine, std::iter::once(source))?;
    Ok(routes
        .into_iter()
        .filter_map(|route| match route.address {
            Ok(hctl) => Some(hctl),
            Err(missing) => missing.hctl,
        })
        .collect())
}

/// The number of the device that a path leads to. The path is any path of the caller's,
/// and a walk of it can wait for a file server.
fn devno_at(engine: &Engine, path: &Path, deadline: Deadline) -> Result<DevNo> {
    let what = format!("{} to lead to a device", path.display());
    let last_seen = || "a file system on the way does not answer".to_owned();
    let (roots, path) = (engine.roots().clone(), path.to_owned());
    let look = move || {
        worker::run_with_own_fd_table(Stage::Resolve, move || blockdev::devno_at(&roots, &path))
    };
    worker::run(Stage::Resolve, &what, deadline, last_seen, look)
}

/// The device behind a node.
fn resolve_node(engine: &Engine, path: &Path, deadline: Deadline) -> Result<Resolved> {
    let at = |error: Error| error.at(Stage::Resolve);
    let not_found = || {
        let message = "there is no device: to prove that a disk is gone, name its source or \
                       its unit";
        at(Error::new(ErrorKind::NotFound, message).with_path(path))
    };
    let devno = devno_at(engine, path, deadline).map_err(at)?;
    let disk = BlockDevice::of(engine.roots(), devno).map_err(at)?;
    let disk = disk.ok_or_else(not_found)?;
    if disk.is_partition() {
        let message = format!("{} is a partition: name the whole disk", disk.name());
        return Err(at(
            Error::new(ErrorKind::InvalidInput, message).with_path(path)
        ));
    }
    if let Some(index) = NbdIndex::of_name(disk.name()) {
        let device = NbdDevice::find(engine.roots(), index).map_err(at)?;
        return device.map(Resolved::Nbd).ok_or_else(not_found);
    }
    if let Some(map) = Map::of_disk(&disk)? {
        return Ok(Resolved::Scsi(ResolvedUnit {
            map: Some(map),
            ..ResolvedUnit::default()
        }));
    }
    if Map::is_being_removed(engine.roots(), disk.name()) {
        return Err(not_found());
    }
    let device = ScsiDevice::of_disk(&disk).map_err(at)?;
    Ok(Resolved::Scsi(ResolvedUnit {
        device: Some(device.ok_or_else(not_found)?),
        ..ResolvedUnit::default()
    }))
}
