//! A process that has a device open.

use std::collections::BTreeSet;
use std::path::Path;

use crate::kernel::devices::NumberedDevice;
use crate::kernel::{Roots, sysfs};

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

/// The processes that have a device open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Openers {
    /// Each process with a device, once for each means.
    pub found: Vec<Opener>,
    /// The processes that may have more open: the kernel did not show all that they have.
    pub unreadable: BTreeSet<u32>,
}

impl Openers {
    /// Adds what a process can write to without a descriptor.
    pub(super) fn add_writer(
        &mut self,
        roots: &Roots,
        pid: u32,
        opened: &[(NumberedDevice, Means)],
    ) {
        for &(device, means) in opened {
            let mut known = self.found.iter();
            if !known.any(|known| known.pid == pid && known.device == device && known.writes) {
                self.found.push(Opener {
                    device,
                    pid,
                    command: command(&roots.proc.join(pid.to_string())),
                    writes: true,
                    means,
                });
            }
        }
    }
}

/// The name of a process's command.
pub(super) fn command(process: &Path) -> String {
    sysfs::read(&process.join("comm")).unwrap_or_default()
}
