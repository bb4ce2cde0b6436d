//! The kernel's own minimum of uevents for one SCSI disk, on the running kernel.

use std::time::Duration;

use super::{KernelUevent, UeventCounter, udevd};

#[path = "../../../tests/behaviour/minimum.rs"]
mod lists;

pub use lists::{Kind, Minimum};

/// The limit for events that must come.
const LIMIT: Duration = Duration::from_secs(120);
/// How long no further event may come, after all expected ones and after udevd has finished.
const QUIET: Duration = Duration::from_secs(2);

impl Minimum {
    /// The minimum of the running kernel.
    #[must_use]
    pub fn of_this_kernel() -> &'static Self {
        Self::of(super::kernel())
    }

    /// Waits until all of `wanted` have come since the counter's start. Panics if any other
    /// event came, except those that udevd may add.
    pub fn require(&self, counter: &UeventCounter, wanted: &[Kind]) {
        super::wait_until("the minimum of events", LIMIT, || {
            (counter.count() >= wanted.len()).then_some(())
        });
        let mut may_add: &[Kind] = &[];
        if udevd::pid().is_some() {
            udevd::settle();
            if wanted.contains(&("add", "block", "disk")) {
                may_add = self.udevd_adds;
            }
        }
        let mut events = counter.until_quiet(QUIET);
        for adds in may_add {
            let by_udevd = |event: &KernelUevent| event.kind() == *adds && event.is_udevds();
            if let Some(at) = events.iter().position(by_udevd) {
                events.remove(at);
            }
        }
        assert_eq!(kinds(&events), wanted);
    }
}

/// The kinds of these events, sorted to compare them with a minimum.
fn kinds(events: &[KernelUevent]) -> Vec<(&str, &str, &str)> {
    let mut kinds: Vec<_> = events.iter().map(KernelUevent::kind).collect();
    kinds.sort_unstable();
    kinds
}
