//! The figures that the story hands to the host, from which the picture is drawn.

use serde::{Deserialize, Serialize};

/// Both ways to one disk, in one boot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figures {
    /// `uname -r`.
    pub kernel: String,
    /// LUNs behind the host.
    pub luns: u32,
    /// The runs in the order in which they are shown.
    pub runs: Vec<Run>,
}

/// One way to the disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    /// The run's name, in a few words.
    pub what: String,
    /// The number of disks that it brought.
    pub disks: usize,
    /// When each kernel uevent came, in milliseconds from the start, ascending.
    pub uevents_at: Vec<u64>,
    /// When the kernel and udevd had nothing more to do, in milliseconds from the start.
    pub quiet_at: u64,
}
