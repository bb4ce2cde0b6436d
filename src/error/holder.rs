//! One user of a disk.

use std::fmt;
use std::path::PathBuf;

use crate::id::DevNo;

/// One user of a disk, of a partition of it, or of its map.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
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
    /// Another part of the kernel has it open: Xen's block backend, the server of the RDMA
    /// network block device, or the heartbeat of OCFS2.
    Kernel {
        /// That part and its name for this use: `o2hb CLUSTER/REGION`.
        user: String,
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
            Self::Kernel { user } => write!(f, "open in the kernel ({user})"),
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
