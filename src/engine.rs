//! Attach and detach: the only place where the rooms below are put together.
//! Start reading at [`attach`](Engine::attach).

mod attach;
#[cfg(feature = "journal")]
mod change_events;
mod detach;
mod inventory;
mod iscsi;
#[cfg(feature = "journal")]
pub mod journal;
mod lock;
mod nbd;
mod preflight;
mod resize;
mod stale;
mod telemetry;
mod timing;
#[cfg(feature = "journal")]
mod transports;
mod unit;
mod usage;
#[cfg(feature = "journal")]
mod volume;

pub use attach::nbd_options::NbdOptions;
pub use attach::{AttachRequest, Attachment, MissingPath, Multipath, Unit, UnitPath};
#[cfg(feature = "journal")]
pub use change_events::{ChangeEvent, ChangeListener};
pub use detach::receipt::{DetachFailure, Flush, MapReceipt, PathReceipt, Receipt};
pub use detach::{DetachRequest, DetachTarget, Detachment, Place};
pub use inventory::capacity::{Capacity, FileSystem};
pub use inventory::{
    Inventory, InventoryMap, InventoryPath, InventoryUnit, NbdUnit, ScsiUnit, UnitKind,
};
pub use iscsi::recovery::{
    SessionRecovery, SessionRecoveryOptions, SessionRecoveryOutcome, SessionRecoveryReport,
    SessionRecoveryStop,
};
#[cfg(feature = "journal")]
pub use journal::Journal;
pub use nbd::heal::{HealOutcome, HealReport, Healer, ReconnectHandle};
pub use preflight::{Check, Finding};
pub use resize::{ResizeRequest, Resized};
pub use stale::{Evidence, ReapOutcome, ReapReport, ReapRequest, StaleLun, Unproven};
pub use timing::{Phase, StageObserver};
#[cfg(feature = "journal")]
pub(crate) use transports::{ScsiTransport, ScsiTransports};
pub use usage::{Holder, NotLookedAt};
#[cfg(feature = "journal")]
pub use volume::DetachVolume;
#[cfg(feature = "journal")]
pub use volume::recover::{Action, Condition, Foreign, Recovered, Recovery, VolumeStatus};

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Result;
use crate::id::NbdIndex;
use crate::kernel::Roots;
use crate::nbd::{Backends, Link, NbdDevice};
use crate::scsi::{CallScheduler, StuckCall, Units};
use crate::uevent::{Hub, HubOptions};
use inventory::capacity::FileSystemQueries;
use nbd::reads::NbdReads;

/// A machine and the thread that listens to its kernel. One serves a whole
/// process: share it by reference or in an `Arc`.
#[derive(Debug)]
pub struct Engine {
    roots: Roots,
    hub: Hub,
    /// The blocking calls of SCSI hosts and devices.
    lanes: CallScheduler,
    /// Our ends of the links of the NBD devices that this process connected.
    links: Mutex<BTreeMap<NbdIndex, Link>>,
    /// Which NBD device has which backend id.
    backends: Mutex<Backends>,
    /// Which NBD devices are being read.
    nbd_reads: NbdReads,
    /// At which addresses a SCSI unit may be.
    units: Mutex<Units>,
    /// What mounted file systems were asked and have not answered.
    questions: FileSystemQueries,
}

impl Engine {
    /// Starts listening.
    ///
    /// # Errors
    /// `Io` where the netlink sockets or the thread cannot be had.
    pub fn start(roots: Roots) -> Result<Self> {
        Self::with_options(roots, &HubOptions::default())
    }

    /// As [`start`](Self::start), with options for the hub.
    pub fn with_options(roots: Roots, options: &HubOptions) -> Result<Self> {
        lock::run_dir::make_private(&roots);
        let hub = Hub::start(&roots, options)?;
        tracing::info!(mode = hub.mode().as_str(), "listening");
        let lanes = CallScheduler::new(&roots);
        let backends = Mutex::new(Backends::new(&hub));
        let units = Mutex::new(Units::new(&hub));
        Ok(Self {
            roots,
            hub,
            lanes,
            links: Mutex::default(),
            backends,
            nbd_reads: NbdReads::default(),
            units,
            questions: FileSystemQueries::default(),
        })
    }

    /// Where this machine's file systems are.
    #[must_use]
    pub fn roots(&self) -> &Roots {
        &self.roots
    }

    /// The kernel calls for SCSI hosts and devices whose callers have given up
    /// and that have not come back: what is quarantined, and why. Empty on a
    /// machine in order.
    #[must_use]
    pub fn stuck_calls(&self) -> Vec<StuckCall> {
        self.lanes.stuck()
    }

    fn links(&self) -> MutexGuard<'_, BTreeMap<NbdIndex, Link>> {
        // No code under this lock can leave the map half changed.
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same without the link of an earlier device of this number: another process may
    /// have detached it, and connected another export under the same id.
    fn links_beside(&self, device: &NbdDevice) -> MutexGuard<'_, BTreeMap<NbdIndex, Link>> {
        let now = device.pid().ok().flatten();
        let mut links = self.links();
        let is_earlier = |link: &Link| link.is_of_an_earlier_device(now);
        if links.get(&device.index()).is_some_and(is_earlier) {
            links.remove(&device.index());
        }
        links
    }

    fn backends(&self) -> MutexGuard<'_, Backends> {
        // What an error leaves there is read anew.
        self.backends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn units(&self) -> MutexGuard<'_, Units> {
        // As of the backends.
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The hub: which events come here, and watches of one's own.
    #[must_use]
    pub fn hub(&self) -> &Hub {
        &self.hub
    }
}
