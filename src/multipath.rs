//! One multipath map: its state in the kernel, single attempts to change it, and commands
//! to multipathd where it runs.
//!
//! A map is one device-mapper device that leads to one unit over several disks. Its uuid
//! and its inode in sysfs identify it, never its name or `dm-N`, which the kernel reuses.

mod daemon;
mod grow;
mod map;
mod queueing;
mod remove;
mod status;

pub use daemon::{Answer, Daemon};
pub use grow::grow;
pub use map::Map;
pub use queueing::fail_if_no_path;
pub use remove::remove;
pub use status::{MapStatus, PathStatus};
