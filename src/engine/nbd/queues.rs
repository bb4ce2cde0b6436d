//! What this process knows of the queues of NBD devices.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::engine::nbd::reads::NbdReads;
use crate::id::NbdIndex;
use crate::nbd::QueueFacts;

/// What the queues of devices showed last, and the reads of their attributes that are under way.
#[derive(Debug, Default)]
pub(in crate::engine) struct NbdQueues {
    /// The thread that connected each device, and the facts of its queue.
    known: Mutex<BTreeMap<NbdIndex, (u32, QueueFacts)>>,
    pub(in crate::engine) reads: NbdReads,
}

impl NbdQueues {
    /// The facts of the device that this thread connected.
    pub(in crate::engine) fn known(
        &self,
        index: NbdIndex,
        connected_by: Option<u32>,
    ) -> Option<QueueFacts> {
        let known = self.known.lock().get(&index).cloned();
        let known = known.filter(|(then, _)| Some(*then) == connected_by);
        known.map(|(_, facts)| facts)
    }

    /// Keeps the facts of the device that this thread connected.
    pub(in crate::engine) fn note(
        &self,
        index: NbdIndex,
        connected_by: Option<u32>,
        facts: QueueFacts,
    ) {
        if let Some(connected_by) = connected_by {
            self.known.lock().insert(index, (connected_by, facts));
        }
    }
}
