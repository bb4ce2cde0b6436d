//! What the story hands to the host besides its words: the figures that the
//! picture is drawn from.

use serde::{Deserialize, Serialize};

/// Both ways to one disk, in one boot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figures {
    /// `uname -r`.
    pub kernel: String,
    /// LUNs behind the host.
    pub luns: u32,
    /// In the order in which they are shown.
    pub runs: Vec<Run>,
}

/// One way to the disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    /// What was done, in a few words.
    pub what: String,
    /// Disks that it brought.
    pub disks: usize,
    /// When each kernel uevent came, in milliseconds from the start, ascending.
    pub uevents_at: Vec<u64>,
    /// When nothing more happened, in the kernel and in udevd.
    pub quiet_at: u64,
}
