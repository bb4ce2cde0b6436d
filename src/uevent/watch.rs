//! One waiter's end of the hub, and what it has learned so far.

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
    ledger: Ledger,
}

/// What has been seen of each device path under a watch.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    paths: HashMap<String, Seen>,
    missed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The latest event of the kernel.
    pub(super) kernel: u64,
    /// The latest event that udevd is done with.
    pub(super) udev: Option<Arc<Event>>,
    /// The kernel's latest `remove`.
    pub(super) removed: Option<u64>,
    /// No `add` has followed it.
    pub(super) gone: bool,
}

impl Watch {
    pub(super) fn new(subscription: Subscription) -> Self {
        Self {
            subscription,
            ledger: Ledger::default(),
        }
    }

    /// Waits for the next notice; `None` when the deadline has passed. Where no
    /// events come ([`Mode::SysfsPoll`](super::Mode::SysfsPoll)) it is
    /// [`Notice::Resync`] after a pause of 1 to 50 ms.
    pub fn next(&mut self, deadline: Deadline) -> Option<Notice> {
        let notice = self.subscription.next(deadline)?;
        self.ledger.take_in(&notice);
        Some(notice)
    }

    /// Takes in what has come already, without waiting.
    pub(super) fn drain(&mut self) {
        while let Some(notice) = self.subscription.try_next() {
            self.ledger.take_in(&notice);
        }
    }

    /// Whether the kernel has announced this device path since the watch was
    /// taken.
    pub(crate) fn kernel_announced(&mut self, devpath: &str) -> bool {
        self.drain();
        let seen = self.ledger.of(devpath);
        seen.is_some_and(|seen| seen.kernel != 0 && !seen.gone)
    }

    /// Whether events were lost that nobody has made good yet.
    pub(crate) fn has_missed(&self) -> bool {
        self.ledger.missed
    }

    /// What was seen so far is not enough: the next proof is a barrier's.
    pub(super) fn distrust(&mut self) {
        self.ledger.missed = true;
    }

    /// Whether events were lost since the last call.
    pub(super) fn take_missed(&mut self) -> bool {
        std::mem::take(&mut self.ledger.missed)
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

impl Ledger {
    pub(super) fn of(&self, devpath: &str) -> Option<&Seen> {
        self.paths.get(devpath)
    }

    fn take_in(&mut self, notice: &Notice) {
        match notice {
            Notice::Event(event) => self.record(event),
            Notice::Resync => self.missed = true,
        }
    }

    fn record(&mut self, event: &Arc<Event>) {
        // A component's events name a handful of paths; a flood of made-up
        // ones must not grow this without bound.
        const MOST_PATHS: usize = 4096;
        if self.paths.len() >= MOST_PATHS && !self.paths.contains_key(&event.devpath) {
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
