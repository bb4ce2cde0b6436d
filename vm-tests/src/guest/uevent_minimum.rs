//! The kernel's own minimum of uevents for one SCSI disk, measured with
//! `scsi_debug` and `sd_mod` and `sg` loaded before.
//!
//! The order is not part of it: `sd` probes beside the scan. What is the same
//! on every kernel measured: 9 for a disk, 1 more for the first LUN of a target,
//! 8 for a delete, 1 more when the target goes with it.
//!
//! - Up to 6.1 a running udevd raises one more `change` of the disk itself, by
//!   writing to its `uevent` file (the event has `SYNTH_UUID=0`), if the disk is
//!   there when its worker comes to the `scsi_device`'s `change`
//!   (`60-block.rules`): mostly, and a quick udevd would be too early. From 6.12
//!   on, and without udevd on any kernel, there is none.
//! - One of the 9 is `scsi_device` `change` with
//!   `SDEV_UA=POWER_ON_RESET_OCCURRED`: the target's news of its own reset, which
//!   a target of another kind may not send. From 6.12 on it comes before the
//!   device's `add`, with the DEVPATH `/H:C:T:L`, since the device has no
//!   parent in sysfs yet.

use std::time::Duration;

use super::{KernelUevent, UeventCounter, udevd};

/// For events that are sure to come.
const LIMIT: Duration = Duration::from_secs(120);
/// For those that are not to come, after all that are and after udevd's end.
const QUIET: Duration = Duration::from_secs(2);

/// (action, subsystem, devtype or `""`).
pub type Kind = (&'static str, &'static str, &'static str);

/// One kernel's lists, each sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Minimum {
    /// The first series for which this holds.
    pub since: (u32, u32),
    /// A further LUN of a target that is there: the kernel's alone.
    pub disk: &'static [Kind],
    /// What a running udevd may make the kernel send besides.
    pub udevd_adds: &'static [Kind],
    /// `delete` of a LUN whose target keeps others.
    pub delete: &'static [Kind],
    /// What the first LUN of a target adds.
    pub target_added: &'static [Kind],
    /// What `delete` of the last LUN of a target adds.
    pub target_removed: &'static [Kind],
}

/// Measured on 5.10, 6.1, 6.12 and 7.2; oldest first.
const MEASURED: &[Minimum] = &[
    Minimum {
        since: (5, 10),
        udevd_adds: &[("change", "block", "disk")],
        ..SAME_ON_ALL
    },
    Minimum {
        since: (6, 1),
        udevd_adds: &[("change", "block", "disk")],
        ..SAME_ON_ALL
    },
    Minimum {
        since: (6, 12),
        ..SAME_ON_ALL
    },
    Minimum {
        since: (7, 2),
        ..SAME_ON_ALL
    },
];

const SAME_ON_ALL: Minimum = Minimum {
    since: (0, 0),
    disk: &[
        ("add", "bdi", ""),
        ("add", "block", "disk"),
        ("add", "bsg", ""),
        ("add", "scsi", "scsi_device"),
        ("add", "scsi_device", ""),
        ("add", "scsi_disk", ""),
        ("add", "scsi_generic", ""),
        ("bind", "scsi", "scsi_device"),
        ("change", "scsi", "scsi_device"),
    ],
    udevd_adds: &[],
    delete: &[
        ("remove", "bdi", ""),
        ("remove", "block", "disk"),
        ("remove", "bsg", ""),
        ("remove", "scsi", "scsi_device"),
        ("remove", "scsi_device", ""),
        ("remove", "scsi_disk", ""),
        ("remove", "scsi_generic", ""),
        ("unbind", "scsi", "scsi_device"),
    ],
    target_added: &[("add", "scsi", "scsi_target")],
    target_removed: &[("remove", "scsi", "scsi_target")],
};

impl Minimum {
    /// The running kernel's. A kernel between two that were measured goes by
    /// the older one, so that a test says when it no longer holds.
    #[must_use]
    pub fn of_this_kernel() -> &'static Self {
        let running = super::kernel();
        MEASURED
            .iter()
            .rev()
            .find(|minimum| minimum.since <= running)
            .unwrap_or_else(|| panic!("no minimum was measured for kernels as old as {running:?}"))
    }

    /// The first LUN of a target.
    #[must_use]
    pub fn first_lun(&self) -> Vec<Kind> {
        sorted(&[self.disk, self.target_added])
    }

    /// `delete` of the last LUN of a target.
    #[must_use]
    pub fn delete_last_lun(&self) -> Vec<Kind> {
        sorted(&[self.delete, self.target_removed])
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
            let by_udevd = |event: &KernelUevent| {
                let mark = event.properties.get("SYNTH_UUID");
                event.kind() == *adds && mark.is_some_and(|mark| mark == "0")
            };
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

fn sorted(lists: &[&[Kind]]) -> Vec<Kind> {
    let mut kinds = lists.concat();
    kinds.sort_unstable();
    kinds
}
