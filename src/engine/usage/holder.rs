//! One user of a disk.

use std::fmt;
use std::path::PathBuf;

use crate::id::DevNo;

/// One user of a disk, of a partition of it, or of its map.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Holder {
    /// It is mounted.
    Mount {
        /// The mount point.
        path: PathBuf,
        /// A process that sees the mount, if it is not in our own mount namespace.
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
    /// A loop device has it as its backing file.
    Loop {
        /// That device's name: `loop0`.
        device: String,
    },
    /// A target of the kernel exports it.
    Export {
        /// The volume's name in the target's configuration: `iblock_0/volume`.
        volume: String,
    },
    /// A process has it open.
    Open {
        /// The process.
        pid: u32,
        /// Its command name.
        command: String,
        /// Whether it can write.
        writes: bool,
    },
    /// A process has it mapped, so that what it writes there is written to the disk. It needs
    /// no descriptor for that.
    Mapped {
        /// The process.
        pid: u32,
        /// Its command name.
        command: String,
    },
    /// A process has registered it with an `io_uring`. It needs no descriptor for its
    /// requests, and the kernel does not show whether these may write.
    Registered {
        /// The process.
        pid: u32,
        /// Its command name.
        command: String,
    },
    /// A process has a generic node of the disk open for writing: what it sends bypasses
    /// the block device.
    Generic {
        /// The process.
        pid: u32,
        /// Its command name.
        command: String,
        /// The node's name below `/dev`: `sg0`, `bsg/0:0:0:1`.
        node: String,
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
            Self::Loop { device } => write!(f, "the backing file of {device}"),
            Self::Export { volume } => write!(f, "exported by the kernel's target as {volume}"),
            Self::Open {
                pid,
                command,
                writes,
            } => {
                let how = if *writes { "open for writing" } else { "open" };
                write!(f, "{how} in process {pid} ({command})")
            }
            Self::Mapped { pid, command } => {
                write!(f, "mapped for writing in process {pid} ({command})")
            }
            Self::Registered { pid, command } => {
                write!(f, "registered with io_uring in process {pid} ({command})")
            }
            Self::Generic { pid, command, node } => {
                write!(f, "open for writing in process {pid} ({command}) as {node}")
            }
        }
    }
}

impl Holder {
    /// Whether it is a worker of udevd, or a program that its rules run for every
    /// disk: both open it for a moment, to read.
    pub(in crate::engine) fn is_udevs(&self) -> bool {
        // `60-persistent-storage.rules`; `55-scsi-sg3_id.rules` of sg3-utils.
        let of_rules = ["scsi_id", "ata_id", "sg_inq"];
        // `systemd-udevd`, `(udev-worker)`, eudev's `udevd`.
        let is_its = |command: &str| command.contains("udev") || of_rules.contains(&command);
        matches!(self, Self::Open { command, writes: false, .. } if is_its(command))
    }

    /// Whether it is a program that opens every new disk to read it, and closes it again.
    pub(super) fn is_transient_prober(&self) -> bool {
        let passing = ["multipathd", "multipath", "blkid", "kpartx"];
        let is_passing = |command: &str| passing.contains(&command);
        let is_its =
            matches!(self, Self::Open { command, writes: false, .. } if is_passing(command));
        self.is_udevs() || is_its
    }

    /// Whether it is this process, or a `lunbd` command, and does not write: a flush that
    /// hangs has the disk open until the kernel returns.
    pub(super) fn is_a_flush_of_ours(&self) -> bool {
        match self {
            Self::Open {
                pid,
                command,
                writes,
            } => !writes && (*pid == std::process::id() || command == "lunbd"),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(command: &str, writes: bool) -> Holder {
        Holder::Open {
            pid: 1,
            command: command.to_owned(),
            writes,
        }
    }

    #[test]
    fn what_udevs_rules_run_is_udevs() {
        for command in ["(udev-worker)", "systemd-udevd", "scsi_id"] {
            assert!(open(command, false).is_udevs(), "{command}");
        }
        assert!(!open("qemu", false).is_udevs());
    }

    #[test]
    fn who_writes_is_not_passing_whatever_its_name() {
        for command in ["(udev-worker)", "multipathd", "blkid", "kpartx"] {
            assert!(open(command, false).is_transient_prober(), "{command}");
            let writer = open(command, true);
            assert!(
                !writer.is_transient_prober() && !writer.is_udevs(),
                "{command}"
            );
        }
    }
}
