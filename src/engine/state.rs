//! The state of an engine.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::engine::inventory::file_system_query::FileSystemQueries;
use crate::engine::lock::run_dir;
use crate::engine::nbd::offers::UndecidedOffers;
use crate::engine::nbd::queues::NbdQueues;
use crate::engine::nbd::reads::NbdReads;
use crate::error::Result;
use crate::id::NbdIndex;
use crate::kernel::Roots;
use crate::nbd::{Backends, Link};
use crate::scsi::{CallScheduler, StuckCall, Units};
use crate::uevent::{Hub, HubOptions};

/// The engine: the machine's devices and a thread that listens to the kernel. One engine
/// serves a whole process: share it by reference or in an `Arc`.
#[derive(Debug)]
pub struct Engine {
    pub(super) roots: Roots,
    pub(super) hub: Hub,
    /// Runs the blocking calls for SCSI hosts and devices.
    pub(super) scheduler: CallScheduler,
    /// lunbd's ends of the connections of NBD devices that this process connected.
    pub(super) links: Mutex<BTreeMap<NbdIndex, Link>>,
    /// The connections of NBD devices of which it is not known yet whether the kernel took them.
    pub(super) nbd_offers: UndecidedOffers,
    /// The backend ids of the NBD devices.
    pub(super) backends: Mutex<Backends>,
    /// The reads of NBD devices that are under way.
    pub(super) nbd_reads: NbdReads,
    /// What the queues of NBD devices showed last.
    pub(super) nbd_queues: NbdQueues,
    /// The addresses at which a SCSI unit may be.
    pub(super) units: Mutex<Units>,
    /// The unanswered queries of mounted file systems.
    pub(super) file_system_queries: FileSystemQueries,
}

impl Engine {
    /// Starts the engine.
    ///
    /// # Errors
    /// `Io` where the netlink sockets or the thread cannot be created.
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
            nbd_offers: UndecidedOffers::default(),
            backends,
            nbd_reads: NbdReads::default(),
            nbd_queues: NbdQueues::default(),
            units,
            file_system_queries: FileSystemQueries::default(),
        })
    }

    /// The roots of this machine's file systems.
    #[must_use]
    pub fn roots(&self) -> &Roots {
        &self.roots
    }

    /// The kernel calls for SCSI hosts and devices that have not returned after their
    /// callers gave up: what is quarantined, and why. Empty on a healthy machine.
    #[must_use]
    pub fn stuck_calls(&self) -> Vec<StuckCall> {
        self.scheduler.stuck()
    }

    /// The hub, which delivers kernel events and opens further watches.
    #[must_use]
    pub fn hub(&self) -> &Hub {
        &self.hub
    }
}
