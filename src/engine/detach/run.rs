//! The state of a SCSI detach.

use crate::engine::detach::DetachRequest;
use crate::engine::detach::receipt::{PathReceipt, Receipt};
use crate::engine::unit::place::UnprovenPath;
use crate::engine::unit::{KnownPath, PathIdentity};
use crate::engine::usage::claim::Claim;
use crate::engine::{Engine, first_names};
use crate::error::Result;
use crate::kernel::blockdev::{BlockDevice, OpenDisk};
use crate::multipath::{Daemon, Map};
use crate::scsi::{Identity, ScsiDevice};
use crate::uevent::Watch;

pub(in crate::engine) struct DetachRun<'a> {
    pub(in crate::engine) engine: &'a Engine,
    pub(in crate::engine) request: &'a DetachRequest,
    /// The devices that the caller named.
    pub(in crate::engine) named_devices: Vec<ScsiDevice>,
    /// The map that the caller named.
    pub(in crate::engine) map: Option<Map>,
    pub(in crate::engine) unit: Identity,
    /// Sees every map that comes and goes.
    pub(in crate::engine) maps: Watch,
    pub(in crate::engine) daemon: Option<Daemon>,
    pub(in crate::engine) receipt: Receipt,
    /// The devices of the receipt's paths, in their order.
    pub(in crate::engine) devices: Vec<ScsiDevice>,
    /// The paths below the map, until they have written their own pages back.
    pub(in crate::engine) open_paths: Vec<OpenPath>,
    /// The paths below the map that may have lost pages of their own.
    pub(in crate::engine) unwritten_paths: Vec<ScsiDevice>,
    pub(in crate::engine) unit_cache: UnitCache,
    /// The paths that were read before the first pass.
    pub(in crate::engine) first_paths: Vec<KnownPath>,
    /// The devices that the last pass found and could not prove to be paths of the unit.
    pub(in crate::engine) unproven_paths: Vec<UnprovenPath>,
    /// A path did not answer a request of this detach in time. That request releases the
    /// device when it returns.
    pub(in crate::engine) timed_out: bool,
    /// An earlier flush of the map, or of a map of its partitions, may be under way.
    pub(in crate::engine) map_may_have_flush: bool,
    /// A device was refused as in use, and no holder was visible afterwards.
    pub(in crate::engine) holder_vanished: bool,
    /// The paths at which another unit has answered, with the names of that unit.
    pub(in crate::engine) replaced: Vec<(ScsiDevice, PathIdentity)>,
}

/// The unit's write cache, as far as the flushes of this detach have shown it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum UnitCache {
    /// No path has shown one.
    NotShown,
    /// A path has shown one, or could not be asked, and no path has sent a flush of it after all
    /// paths had written their pages.
    Unflushed,
    /// A path has sent such a flush.
    Flushed,
}

/// A path that is claimed and about to be deleted.
pub(super) struct ClaimedPath {
    pub(in crate::engine) path: KnownPath,
    pub(in crate::engine) watch: Watch,
    pub(in crate::engine) claim: Option<Claim>,
    /// All data of this path went through its map, which was flushed.
    pub(super) in_map: bool,
}

/// A path below the map, with its partitions.
pub(in crate::engine) struct OpenPath {
    pub(super) device: ScsiDevice,
    pub(super) disk: BlockDevice,
    pub(super) files: OpenDisk,
}

impl DetachRun<'_> {
    /// Adds the path to the receipt once, and its disk as soon as that has appeared.
    pub(super) fn add_to_receipt(&mut self, path: &KnownPath) -> Result<()> {
        let roots = self.engine.roots();
        if !self.devices.contains(&path.device) {
            self.devices.push(path.device.clone());
            self.receipt.paths.push(PathReceipt {
                hctl: path.device.hctl(),
                node: None,
                devno: None,
                diskseq: None,
                flush: None,
                gone: false,
                forgotten: None,
                in_map: false,
                wrote_own_pages: false,
            });
        }
        if let Some(disk) = &path.disk
            && let Some(entry) = self.entry(&path.device)
        {
            entry.node = Some(disk.node(roots));
            entry.devno = Some(disk.devno());
            entry.diskseq = disk.diskseq()?;
        }
        Ok(())
    }

    /// The receipt's entry of a device.
    pub(in crate::engine) fn entry(&mut self, device: &ScsiDevice) -> Option<&mut PathReceipt> {
        let at = self.devices.iter().position(|known| known == device)?;
        self.receipt.paths.get_mut(at)
    }

    /// Reads back which of the receipt's paths are gone, no matter which process removed
    /// them.
    pub(in crate::engine) fn read_back(&mut self) {
        for (device, path) in self.devices.iter().zip(&mut self.receipt.paths) {
            path.gone = !device.is_there();
            if path.gone {
                first_names::forget(self.engine.roots(), path.hctl);
            }
        }
    }
}
