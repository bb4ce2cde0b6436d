//! The capabilities of this process, and facts of this machine.

use std::path::Path;

use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::sys::utsname::uname;

use super::{Roots, sysfs, user_namespace};
use crate::error::{Error, ErrorKind, Result};

/// The capabilities that the engine uses, of the process's effective set
/// (`include/uapi/linux/capability.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities(u64);

impl Capabilities {
    /// The capabilities of this process.
    pub fn effective(roots: &Roots) -> Result<Self> {
        Self::effective_of(roots, "self")
    }

    /// The capabilities of a process, by its number. Those of a process in another user
    /// namespace count only there.
    pub(super) fn effective_of(roots: &Roots, process: &str) -> Result<Self> {
        let path = roots.proc.join(process).join("status");
        let status = sysfs::read(&path)?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
            .map(Self)
            .ok_or_else(|| Error::new(ErrorKind::Io, "no CapEff line").with_path(path))
    }

    /// The capabilities that this process has over the machine. A process in another user
    /// namespace has none: its capabilities hold in that namespace alone
    /// (`user_namespaces(7)`).
    pub fn over_the_machine(roots: &Roots) -> Result<Self> {
        if user_namespace::is_initial(roots) {
            Self::effective(roots)
        } else {
            Ok(Self(0))
        }
    }

    /// For ioctls of block devices, and for SCSI commands.
    #[must_use]
    pub fn sys_admin(self) -> bool {
        self.has(21)
    }

    /// For receive buffers past the machine's limit, and for NBD's netlink commands.
    #[must_use]
    pub fn net_admin(self) -> bool {
        self.has(12)
    }

    /// To see the open files of processes of other users.
    #[must_use]
    pub fn sys_ptrace(self) -> bool {
        self.has(19)
    }

    fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }
}

/// The major and the minor number of the kernel's release. A `/proc` that shows processes
/// alone (`subset=pid`) does not have it, and then `uname` gives it.
pub fn kernel_version(roots: &Roots) -> Result<(u32, u32)> {
    let path = roots.proc.join("sys/kernel/osrelease");
    let release = if let Some(release) = sysfs::read_if_there(&path)? {
        release
    } else {
        let own = uname().map_err(|errno| Error::of_errno("uname", errno))?;
        own.release().to_string_lossy().into_owned()
    };
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next().and_then(|text| text.parse().ok());
    number().zip(number()).ok_or_else(|| {
        Error::new(ErrorKind::Io, format!("{release:?} is no release")).with_path(path)
    })
}

/// The id of this boot of the machine, which no other boot has; `None` if the kernel does not
/// show it.
#[must_use]
pub fn boot_id(roots: &Roots) -> Option<String> {
    sysfs::read(&roots.proc.join("sys/kernel/random/boot_id")).ok()
}

/// Whether the file system at `path` is mounted read-only.
pub fn is_read_only(path: &Path) -> Result<bool> {
    statvfs(path)
        .map(|fs| fs.flags().contains(FsFlags::ST_RDONLY))
        .map_err(|errno| Error::io("cannot examine", path, &errno.into()))
}

/// Whether the files at this path are kept in memory, so that a boot clears them.
pub fn is_cleared_at_boot(path: &Path) -> Result<bool> {
    /// `include/uapi/linux/magic.h`, `RAMFS_MAGIC`: an initramfs.
    const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
    statfs(path)
        .map(|fs| matches!(fs.filesystem_type(), TMPFS_MAGIC | RAMFS_MAGIC))
        .map_err(|errno| Error::io("cannot examine", path, &errno.into()))
}

/// The largest receive buffer without `CAP_NET_ADMIN`, in bytes.
pub fn largest_receive_buffer(roots: &Roots) -> Result<usize> {
    sysfs::parse(&roots.proc.join("sys/net/core/rmem_max"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_in_memory_are_cleared_at_boot_and_others_are_not() {
        assert!(is_cleared_at_boot(Path::new("/dev/shm")).unwrap());
        assert!(!is_cleared_at_boot(Path::new("/proc")).unwrap());
        assert!(is_cleared_at_boot(Path::new("/none/there")).is_err());
    }
}
