//! A detach of a SCSI unit under way.

use crate::engine::Engine;
use crate::engine::detach::DetachRequest;
use crate::engine::detach::receipt::Receipt;
use crate::engine::unit::{KnownPath, PathIdentity};
use crate::engine::usage::claim::Claim;
use crate::multipath::{Daemon, Map};
use crate::scsi::{Identity, ScsiDevice};
use crate::uevent::Watch;

/// A detach under way.
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
    /// What was found out before the first turn.
    pub(in crate::engine) looked_at: Vec<KnownPath>,
    /// A path had not answered us in time: that question, when it comes back,
    /// lets go of the device.
    pub(in crate::engine) timed_out: bool,
    /// Nobody was seen any more who held what had been refused to us.
    pub(in crate::engine) holder_vanished: bool,
    /// Paths at which another unit has answered, and which.
    pub(in crate::engine) replaced: Vec<(ScsiDevice, PathIdentity)>,
}

/// A path that is claimed and about to go.
pub(super) struct ClaimedPath {
    pub(in crate::engine) path: KnownPath,
    pub(in crate::engine) watch: Watch,
    pub(in crate::engine) claim: Option<Claim>,
    /// All that it held went through its map, whose flush was done.
    pub(super) in_map: bool,
}
