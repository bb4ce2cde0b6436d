//! The kernel's own minimum of uevents for one SCSI disk, on the running kernel.

use std::time::Duration;

use super::{KernelUevent, UeventCounter, udevd};

#[path = "../../../tests/behaviour/minimum.rs"]
mod lists;

pub use lists::{Kind, Minimum};

/// For events that are sure to come.
const LIMIT: Duration = Duration::from_secs(120);
/// For those that are not to come, after all that are and after udevd's end.
const QUIET: Duration = Duration::from_secs(2);

impl Minimum {
    /// The running kernel's.
    #[must_use]
    pub fn of_this_kernel() -> &'static Self {
        Self::of(super::kernel())
    }

    /// Waits until all of `wanted` have come since the counter's start, and panics
    /// if anything else came but what udevd may add to them.
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

/// Sorted, to be compared with a minimum.
fn kinds(events: &[KernelUevent]) -> Vec<(&str, &str, &str)> {
    let mut kinds: Vec<_> = events.iter().map(KernelUevent::kind).collect();
    kinds.sort_unstable();
    kinds
}
