//! Connections that the kernel was offered.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::engine::nbd::dialled_connection::DialledConnection;
use crate::id::{BackendId, NbdIndex};
use crate::kernel::Roots;
use crate::nbd::{self, NbdDevice, NewTimeouts};

/// A connection that the kernel was offered.
#[derive(Debug)]
pub(in crate::engine) struct Offer {
    pub(in crate::engine::nbd) server: DialledConnection,
    /// The timeouts that the device will have.
    pub(in crate::engine::nbd) timeouts: NewTimeouts,
    /// How many bytes it had received before it was offered; `None` if its socket does not
    /// count them.
    pub(in crate::engine::nbd) received: Option<u64>,
    /// How many receivers ran before it was offered. `None` if it is not known, or if a receiver
    /// of another connection may have begun since.
    pub(in crate::engine::nbd) receivers_before: Option<usize>,
    /// Whether a connection of this process had ended, so that the kernel had room for it.
    pub(in crate::engine::nbd) replaces_dead: bool,
}

impl Offer {
    /// Whether the device has a request timeout for as long as the offer lasts only.
    pub(in crate::engine::nbd) fn is_marked(&self) -> bool {
        nbd::timeouts_that_mark(self.timeouts) != self.timeouts
    }
}

/// The offers of which the command had not returned at the deadline: at most one of each device.
/// A command holds the lock of the device's connections until it returns.
#[derive(Debug, Default)]
pub(in crate::engine) struct UndecidedOffers(Mutex<BTreeMap<NbdIndex, UndecidedOffer>>);

#[derive(Debug)]
struct UndecidedOffer {
    offer: Offer,
    backend: BackendId,
    /// The thread that had connected the device.
    connected_by: u32,
}

impl UndecidedOffers {
    pub(in crate::engine::nbd) fn insert(
        &self,
        index: NbdIndex,
        offer: Offer,
        backend: BackendId,
        connected_by: u32,
    ) {
        let undecided = UndecidedOffer {
            offer,
            backend,
            connected_by,
        };
        self.0.lock().insert(index, undecided);
    }

    pub(in crate::engine::nbd) fn contains(&self, index: NbdIndex) -> bool {
        self.0.lock().contains_key(&index)
    }

    /// Takes the offer of this device out. It is `None`, and the connection is closed, if the
    /// device was connected anew since. The caller has the lock of the device's connections.
    pub(in crate::engine::nbd) fn take(
        &self,
        device: &NbdDevice,
        backend: &BackendId,
    ) -> Option<Offer> {
        let undecided = self.0.lock().remove(&device.index())?;
        let is_current = undecided.backend == *backend
            && device.pid().ok().flatten() == Some(undecided.connected_by);
        is_current.then_some(undecided.offer)
    }

    /// Closes the connection that a device was offered, since it was disconnected.
    pub(in crate::engine) fn close(&self, index: NbdIndex) {
        self.0.lock().remove(&index);
    }

    /// Closes the connections of devices that were disconnected since.
    pub(in crate::engine) fn close_those_of_gone_devices(&self, roots: &Roots) {
        self.0.lock().retain(|index, undecided| {
            let now = NbdDevice::find(roots, *index)
                .and_then(|device| device.map_or(Ok(None), |device| device.pid()));
            // What cannot be read is not known to be gone.
            now.map_or(true, |now| now == Some(undecided.connected_by))
        });
    }
}
