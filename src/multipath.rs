//! One multipath map: what the kernel says of it, one attempt at a time to
//! change it, read back; and what multipathd is told, where it runs.
//!
//! A map is one device of device-mapper that leads to one unit over several
//! disks. It is known by its uuid and its life, never by its name or `dm-N`:
//! both are used again.

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
pub(crate) use remove::open_count;
pub use remove::remove;
pub use status::{MapStatus, PathStatus};
