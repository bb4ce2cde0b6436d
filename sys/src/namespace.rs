//! Ioctls of namespaces (`include/uapi/linux/nsfs.h`).

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

mod raw {
    nix::ioctl_none_bad!(ns_get_userns, nix::request_code_none!(0xb7, 0x1));
}

/// `NS_GET_USERNS`: opens the user namespace that owns this namespace. Linux 4.9.
///
/// # Errors
/// The errno of the ioctl; `EPERM` if that user namespace is not one of the caller's.
#[doc(alias = "NS_GET_USERNS")]
pub fn owner(namespace: impl AsFd) -> nix::Result<OwnedFd> {
    // SAFETY: the descriptor is open for as long as `namespace` is borrowed, and the
    // ioctl takes no argument.
    let owner = unsafe { raw::ns_get_userns(namespace.as_fd().as_raw_fd()) }?;
    // SAFETY: the ioctl has just opened the descriptor, and nothing else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(owner) })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_network_namespace_has_an_owner() {
        let network = File::open("/proc/self/ns/net").unwrap();
        match owner(&network) {
            Ok(owner) => assert_ne!(File::from(owner).metadata().unwrap().ino(), 0),
            // A container may be in the host's network namespace.
            Err(error) => assert_eq!(error, nix::errno::Errno::EPERM),
        }
    }
}
