//! The kernel's own minimum of uevents for one SCSI disk, measured with `scsi_debug`, with
//! `sd_mod` and `sg` loaded before.
//!
//! Every measured kernel sends 9 events for a disk, 1 more for the first LUN of a target, 8 for
//! a delete, and 1 more when the target goes with it. `sd` probes beside the scan, so the lists
//! are sorted.
//!
//! - Up to 6.1 a running udevd causes one more `change` of the disk itself, by a write to its
//!   `uevent` file (the event has `SYNTH_UUID=0`), if the disk exists when its worker handles
//!   the `scsi_device`'s `change` (`60-block.rules`). It mostly does; a fast udevd would be too
//!   early. From 6.12 on, and without udevd on any kernel, there is none.
//! - One of the 9 is `scsi_device` `change` with `SDEV_UA=POWER_ON_RESET_OCCURRED`: the
//!   target's report of its own reset, which a target of another kind may not send. From 6.12
//!   on it comes before the device's `add`, with the DEVPATH `/H:C:T:L`, because the device has
//!   no parent in sysfs yet.
#![allow(unreachable_pub, reason = "the lab has it too, and shows it")]

/// (action, subsystem, devtype or `""`).
pub type Kind = (&'static str, &'static str, &'static str);

/// One kernel's lists, each sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Minimum {
    /// The first series with this minimum.
    pub since: (u32, u32),
    /// A further LUN of an existing target: the kernel's events alone.
    pub disk: &'static [Kind],
    /// The events that a running udevd may make the kernel send besides.
    pub udevd_adds: &'static [Kind],
    /// `delete` of a LUN whose target keeps other LUNs.
    pub delete: &'static [Kind],
    /// The events that the first LUN of a target adds.
    pub target_added: &'static [Kind],
    /// The events that `delete` of the last LUN of a target adds.
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
    /// The minimum of a kernel. A kernel between two measured ones uses the older one, so that
    /// a test shows when it no longer holds.
    #[must_use]
    pub fn of(kernel: (u32, u32)) -> &'static Self {
        let mut measured = MEASURED.iter().rev();
        measured
            .find(|minimum| minimum.since <= kernel)
            .unwrap_or_else(|| panic!("no minimum was measured for kernels as old as {kernel:?}"))
    }

    /// All events of the first LUN of a target.
    #[must_use]
    pub fn first_lun(&self) -> Vec<Kind> {
        sorted(&[self.disk, self.target_added])
    }

    /// All events of `delete` of the last LUN of a target.
    #[must_use]
    pub fn delete_last_lun(&self) -> Vec<Kind> {
        sorted(&[self.delete, self.target_removed])
    }
}

fn sorted(lists: &[&[Kind]]) -> Vec<Kind> {
    let mut kinds = lists.concat();
    kinds.sort_unstable();
    kinds
}
