//! A process that has a device open.

use crate::kernel::devices::NumberedDevice;

/// A process that has a device open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Opener {
    /// The device that is open.
    pub device: NumberedDevice,
    /// The process.
    pub pid: u32,
    /// Its command name.
    pub command: String,
    /// Whether it can write.
    pub writes: bool,
    /// What keeps the device open.
    pub means: Means,
}

/// What a process has that keeps a device open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Means {
    /// A descriptor.
    Descriptor,
    /// A shared mapping that can be written to.
    Mapping,
    /// A fixed file of an `io_uring`. The kernel does not show whether it is open for
    /// writing, so it counts as one that is.
    FixedFile,
}
