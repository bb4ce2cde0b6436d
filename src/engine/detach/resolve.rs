//! Resolves the target of a detach or of a resize.

use std::collections::BTreeSet;
use std::path::Path;

use super::request::DetachTarget;
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, Hctl, NbdIndex, Source, Wwid};
use crate::kernel::blockdev::{self, BlockDevice};
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

impl Engine {
    /// Resolves a target.
    pub(in crate::engine) fn find(
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

    /// The addresses to which a source leads, even where its session or port is down: the
    /// kernel keeps the devices.
    pub(in crate::engine) fn addresses_of(&self, source: &Source) -> Result<BTreeSet<Hctl>> {
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
            let message = "there is no device: to prove that a disk is gone, name its source or \
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
