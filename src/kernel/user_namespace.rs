//! The user namespace of a process.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

use nix::errno::Errno;

use super::Roots;
use super::namespace;
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
    match namespace::inode(&roots.proc.join(process), "user") {
        Ok(inode) => inode == INITIAL,
        Err(error) => has_gone(&error),
    }
}

/// Whether the initial user namespace owns the network namespace of this thread, whose process is
/// in the initial user namespace itself. A kernel without network namespaces, or without user
/// namespaces, has only the initial ones.
pub(crate) fn owns_network_namespace_of_this_thread(roots: &Roots) -> bool {
    let thread = roots.proc.join("thread-self");
    let network = match File::open(thread.join("ns/net")) {
        Ok(network) => network,
        Err(error) => return has_gone(&error) && thread.exists(),
    };
    match lunbd_sys::namespace::owner(network).map(File::from) {
        Ok(owner) => owner.metadata().is_ok_and(|owner| owner.ino() == INITIAL),
        // The kernel has no user namespaces (`include/linux/user_namespace.h`, `ns_get_owner`).
        Err(errno) => errno == Errno::EPERM,
    }
}
