//! One waiter's watch, and the events that it has seen so far.

use std::collections::HashMap;
use std::sync::Arc;

use super::event::{Event, Notice, Origin};
use super::subscription::Subscription;
use crate::deadline::Deadline;

/// A subscription to the events of one component of a device path. Dropping it
/// ends it.
#[derive(Debug)]
pub struct Watch {
    subscription: Subscription,
    seen_events: SeenEvents,
}

/// The events that a watch has seen, by device path.
#[derive(Debug, Default)]
pub(super) struct SeenEvents {
    paths: HashMap<String, Seen>,
    missed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The number of the kernel's latest event; 0 if there was none.
    pub(super) kernel: u64,
    /// The latest event that udevd has handled.
    pub(super) udev: Option<Arc<Event>>,
    /// The number of the kernel's latest `remove`.
    pub(super) removed: Option<u64>,
    /// Whether no `add` has followed that `remove`.
    pub(super) gone: bool,
}

impl Watch {
    pub(super) fn new(subscription: Subscription) -> Self {
        Self {
            subscription,
            seen_events: SeenEvents::default(),
        }
    }

    /// Waits for the next notice; `None` when the deadline has passed. Without
    /// events ([`Mode::SysfsPoll`](super::Mode::SysfsPoll)) it returns
    /// [`Notice::Resync`] after a pause of 1 to 50 ms.
    pub fn next(&mut self, deadline: Deadline) -> Option<Notice> {
        let notice = self.subscription.next(deadline)?;
        self.seen_events.record(&notice);
        Some(notice)
    }

    /// Records the notices that have come already, without waiting.
    pub(super) fn drain(&mut self) {
        while let Some(notice) = self.subscription.try_next() {
            self.seen_events.record(&notice);
        }
    }

    /// Whether the kernel has announced this device path since the watch was
    /// taken, and has not removed it.
    pub(crate) fn kernel_announced(&mut self, devpath: &str) -> bool {
        self.drain();
        let seen = self.seen_events.of(devpath);
        seen.is_some_and(|seen| seen.kernel != 0 && !seen.gone)
    }

    /// Whether events were lost and no caller has looked again since.
    pub(crate) fn has_missed(&self) -> bool {
        self.seen_events.missed
    }

    /// Makes the next proof a barrier's, because the events seen so far are not
    /// enough.
    pub(super) fn require_barrier(&mut self) {
        self.seen_events.missed = true;
    }

    /// Whether events were lost since the last call.
    pub(super) fn take_missed(&mut self) -> bool {
        std::mem::take(&mut self.seen_events.missed)
    }

    pub(super) fn seen_events(&self) -> &SeenEvents {
        &self.seen_events
    }
}

impl SeenEvents {
    pub(super) fn of(&self, devpath: &str) -> Option<&Seen> {
        self.paths.get(devpath)
    }

    fn record(&mut self, notice: &Notice) {
        match notice {
            Notice::Event(event) => self.record_event(event),
            Notice::Resync => self.missed = true,
        }
    }

    fn record_event(&mut self, event: &Arc<Event>) {
        // A component's events name a handful of paths. A flood of invented
        // paths must not grow this without bound.
        const MAX_PATHS: usize = 4096;
        if self.paths.len() >= MAX_PATHS && !self.paths.contains_key(&event.devpath) {
            self.missed = true;
            return;
        }
        let seen = self.paths.entry(event.devpath.clone()).or_default();
        match (event.origin, event.action.as_str()) {
            (Origin::Udev, _) => seen.udev = Some(Arc::clone(event)),
            (Origin::Kernel, action) => {
                seen.kernel = event.seqnum;
                match action {
                    "remove" => (seen.removed, seen.gone) = (Some(event.seqnum), true),
                    "add" => seen.gone = false,
                    _ => {}
                }
            }
        }
    }
}
