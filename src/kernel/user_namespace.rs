//! The user namespace of a process.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use super::Roots;
use super::process::descriptors::has_gone;

/// The inode of the initial user namespace, which is the same on every machine
/// (`include/linux/proc_ns.h`, `PROC_USER_INIT_INO`).
const INITIAL: u64 = 0xEFFF_FFFD;

/// Whether the capabilities of this process count for the machine's processes: in another
/// user namespace they count for the processes there alone. A kernel without such namespaces
/// has only the initial one.
pub(crate) fn is_initial(roots: &Roots) -> bool {
    is_initial_of(roots, "self")
}

pub(super) fn is_initial_of(roots: &Roots, process: &str) -> bool {
    match fs::metadata(roots.proc.join(process).join("ns/user")) {
        Ok(namespace) => namespace.ino() == INITIAL,
        Err(error) => has_gone(&error),
    }
}
