//! What an engine holds for as long as it lives.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::engine::inventory::file_system_query::FileSystemQueries;
use crate::engine::lock::run_dir;
use crate::engine::nbd::reads::NbdReads;
use crate::error::Result;
use crate::id::NbdIndex;
use crate::kernel::Roots;
use crate::nbd::{Backends, Link, NbdDevice};
use crate::scsi::{CallScheduler, StuckCall, Units};
use crate::uevent::{Hub, HubOptions};

/// A machine and the thread that listens to its kernel. One serves a whole
/// process: share it by reference or in an `Arc`.
#[derive(Debug)]
pub struct Engine {
    pub(super) roots: Roots,
    pub(super) hub: Hub,
    /// The blocking calls of SCSI hosts and devices.
    pub(super) scheduler: CallScheduler,
    /// Our ends of the links of the NBD devices that this process connected.
    pub(super) links: Mutex<BTreeMap<NbdIndex, Link>>,
    /// Which NBD device has which backend id.
    pub(super) backends: Mutex<Backends>,
    /// Which NBD devices are being read.
    pub(super) nbd_reads: NbdReads,
    /// At which addresses a SCSI unit may be.
    pub(super) units: Mutex<Units>,
    /// What mounted file systems were asked and have not answered.
    pub(super) file_system_queries: FileSystemQueries,
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
        run_dir::make_private(&roots);
        let hub = Hub::start(&roots, options)?;
        tracing::info!(mode = hub.mode().as_str(), "listening");
        let scheduler = CallScheduler::new(&roots);
        let backends = Mutex::new(Backends::new(&hub));
        let units = Mutex::new(Units::new(&hub));
        Ok(Self {
            roots,
            hub,
            scheduler,
            links: Mutex::default(),
            backends,
            nbd_reads: NbdReads::default(),
            units,
            file_system_queries: FileSystemQueries::default(),
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
        self.scheduler.stuck()
    }

    pub(super) fn links(&self) -> MutexGuard<'_, BTreeMap<NbdIndex, Link>> {
        // No code under this lock can leave the map half changed.
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same without the link of an earlier device of this number: another process may
    /// have detached it, and connected another export under the same id.
    pub(super) fn links_beside(
        &self,
        device: &NbdDevice,
    ) -> MutexGuard<'_, BTreeMap<NbdIndex, Link>> {
        let now = device.pid().ok().flatten();
        let mut links = self.links();
        let is_earlier = |link: &Link| link.is_of_an_earlier_device(now);
        if links.get(&device.index()).is_some_and(is_earlier) {
            links.remove(&device.index());
        }
        links
    }

    pub(super) fn backends(&self) -> MutexGuard<'_, Backends> {
        // What an error leaves there is read anew.
        self.backends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn units(&self) -> MutexGuard<'_, Units> {
        // As of the backends.
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The hub: which events come here, and watches of one's own.
    #[must_use]
    pub fn hub(&self) -> &Hub {
        &self.hub
    }
}
