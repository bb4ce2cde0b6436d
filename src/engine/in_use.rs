//! Who uses a disk.

use std::fmt;
use std::path::PathBuf;

use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::DevNo;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, mounts, process};
use crate::multipath::Map;

/// One user of a disk or of a partition of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Holder {
    /// It is mounted.
    Mount {
        /// Where.
        path: PathBuf,
        /// A process that sees the mount there, where it is not in our own
        /// mount namespace.
        pid: Option<u32>,
    },
    /// Another block device is stacked on it.
    Stacked {
        /// That device's name: `dm-0`, `md127`.
        device: String,
    },
    /// The kernel swaps on it.
    Swap {
        /// The swap area.
        device: DevNo,
    },
    /// A process has it open.
    Open {
        /// The process.
        pid: u32,
        /// Its command name.
        command: String,
    },
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mount { path, pid: None } => write!(f, "mounted on {}", path.display()),
            Self::Mount {
                path,
                pid: Some(pid),
            } => write!(
                f,
                "mounted on {} in the mount namespace of process {pid}",
                path.display()
            ),
            Self::Stacked { device } => write!(f, "held by {device}"),
            Self::Swap { device } => write!(f, "swapped on ({device})"),
            Self::Open { pid, command } => write!(f, "open in process {pid} ({command})"),
        }
    }
}

/// Mounts, stacked devices and swap areas of the disk and of its partitions.
pub(super) fn find_holders(roots: &Roots, disk: &BlockDevice) -> Result<Vec<Holder>> {
    let partitions = disk.partitions()?;
    let devices: Vec<&BlockDevice> = std::iter::once(disk).chain(&partitions).collect();
    let numbers: Vec<DevNo> = devices.iter().map(|device| device.devno()).collect();

    let mut holders = Vec::new();
    for mount in mounts::read_mounts(roots)? {
        if numbers.contains(&mount.device) {
            let (path, pid) = (mount.path, mount.pid);
            holders.push(Holder::Mount { path, pid });
        }
    }
    for device in &devices {
        let names = device.holders()?;
        holders.extend(names.into_iter().map(|device| Holder::Stacked { device }));
    }
    for device in mounts::read_swaps(roots)? {
        if numbers.contains(&device) {
            holders.push(Holder::Swap { device });
        }
    }
    Ok(holders)
}

/// The processes that have the disk or a partition of it open.
pub(super) fn find_openers(roots: &Roots, disk: &BlockDevice) -> Result<Vec<Holder>> {
    let mut numbers = vec![disk.devno()];
    numbers.extend(disk.partitions()?.iter().map(BlockDevice::devno));
    let openers = process::read_openers(roots, &numbers)?;
    Ok(openers
        .into_iter()
        .map(|opener| Holder::Open {
            pid: opener.pid,
            command: opener.command,
        })
        .collect())
}

/// Whether it is a worker of udevd, or a program that its rules run for every disk:
/// both open it for a moment.
pub(super) fn is_udevs(holder: &Holder) -> bool {
    // `60-persistent-storage.rules`; `55-scsi-sg3_id.rules` of sg3-utils.
    let of_rules = ["scsi_id", "ata_id", "sg_inq"];
    // `systemd-udevd`, `(udev-worker)`, eudev's `udevd`.
    let is_its = |command: &str| command.contains("udev") || of_rules.contains(&command);
    matches!(holder, Holder::Open { command, .. } if is_its(command))
}

/// Whether it is a map that is being removed.
pub(super) fn is_going(roots: &Roots, holder: &Holder) -> bool {
    matches!(holder, Holder::Stacked { device } if Map::is_going(roots, device))
}

/// Whether it is a program that opens every disk that comes and lets go of it.
pub(super) fn looks_at_disks(holder: &Holder) -> bool {
    let passing = ["multipathd", "multipath", "blkid", "kpartx"];
    let is_passing = |command: &str| passing.contains(&command);
    is_udevs(holder) || matches!(holder, Holder::Open { command, .. } if is_passing(command))
}

/// Whether only this process, or the command, has the disk open: a flush that
/// hangs has it until the kernel lets go. Where nobody is to be seen it is
/// somebody else.
pub(super) fn is_a_flush_of_ours(openers: &[Holder]) -> bool {
    let ours = |holder: &Holder| match holder {
        Holder::Open { pid, command } => *pid == std::process::id() || command == "lunbd",
        _ => false,
    };
    !openers.is_empty() && openers.iter().all(ours)
}

/// The refusal that names them.
pub(super) fn refuse(disk: &BlockDevice, holders: &[Holder]) -> Error {
    let by = if holders.is_empty() {
        "claimed exclusively by somebody whom /proc does not show to this process".to_owned()
    } else {
        let names: Vec<String> = holders.iter().map(ToString::to_string).collect();
        names.join(", ")
    };
    let message = format!("{} is in use: {by}", disk.name());
    Error::new(ErrorKind::InUse, message).at(Stage::Claim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(pid: u32, command: &str) -> Holder {
        let command = command.to_owned();
        Holder::Open { pid, command }
    }

    #[test]
    fn a_disk_that_somebody_unseen_has_claimed_is_not_taken_for_our_own_flush() {
        assert!(!is_a_flush_of_ours(&[]));
        let ours = open(std::process::id(), "agent");
        assert!(is_a_flush_of_ours(&[ours.clone(), open(1, "lunbd")]));
        assert!(!is_a_flush_of_ours(&[ours, open(1, "qemu")]));
    }

    #[test]
    fn what_udevs_rules_run_is_udevs() {
        for command in ["(udev-worker)", "systemd-udevd", "scsi_id"] {
            assert!(is_udevs(&open(1, command)), "{command}");
        }
        assert!(!is_udevs(&open(1, "qemu")));
    }
}
