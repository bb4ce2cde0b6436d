//! Attach and detach: the only place where the rooms below are put together.
//! Start reading at [`attach`](Engine::attach).

mod attach;
mod claim;
mod detach;
mod in_use;
mod lease;
mod list;
mod phases;
mod preflight;
mod take_down;

pub use attach::{AttachRequest, Attachment};
pub use detach::{DetachTarget, Detachment};
pub use in_use::Holder;
pub use list::Disk;
pub use phases::{Phase, StageObserver};
pub use preflight::{Check, Finding};
pub use take_down::Flush;

use crate::error::Result;
use crate::kernel::Roots;
use crate::uevent::{Hub, HubOptions};

/// A machine and the thread that listens to its kernel. One serves a whole
/// process: share it by reference or in an `Arc`.
#[derive(Debug)]
pub struct Engine {
    roots: Roots,
    hub: Hub,
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
        let hub = Hub::start(&roots, options)?;
        tracing::info!(mode = hub.mode().as_str(), "listening");
        Ok(Self { roots, hub })
    }

    /// Where this machine's file systems are.
    #[must_use]
    pub fn roots(&self) -> &Roots {
        &self.roots
    }

    /// The hub: which events come here, and watches of one's own.
    #[must_use]
    pub fn hub(&self) -> &Hub {
        &self.hub
    }
}
