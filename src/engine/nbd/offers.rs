//! Connections that the kernel was offered.

use std::sync::Weak;

use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::nbd::server::Server;
use crate::id::BackendId;
use crate::nbd::{self, NewTimeouts};

/// A connection that the kernel was offered.
#[derive(Debug)]
pub(in crate::engine) struct Offer {
    pub(in crate::engine::nbd) server: Server,
    /// The timeouts that the device will have.
    pub(in crate::engine::nbd) timeouts: NewTimeouts,
    /// How many bytes it had received before it was offered; `None` if its socket does not
    /// count them.
    pub(in crate::engine::nbd) received: Option<u64>,
    /// How many receivers ran before it was offered.
    pub(in crate::engine::nbd) receivers_before: Option<usize>,
}

/// An offer of which the command had not returned at the deadline.
#[derive(Debug)]
pub(in crate::engine) struct UndecidedOffer {
    pub(in crate::engine::nbd) offer: Offer,
    pub(in crate::engine::nbd) backend: BackendId,
    pub(in crate::engine::nbd) connected_by: Option<u32>,
    /// The command has this lock until it returns.
    pub(in crate::engine::nbd) lock: Weak<DeviceLock>,
}

impl Offer {
    /// Whether the device has a request timeout for as long as the offer lasts only.
    pub(in crate::engine::nbd) fn is_marked(&self) -> bool {
        nbd::timeouts_that_mark(self.timeouts) != self.timeouts
    }
}
