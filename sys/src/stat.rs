//! Finds the device that a path leads to, without a request to a file server.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::errno::Errno;

/// The kind of a device. Each kind has numbers of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A block device.
    Block,
    /// A character device.
    Character,
}

/// The kind, the major and the minor number of the device that `path` leads to,
/// through links; `None` if it is no device.
///
/// With `AT_STATX_DONT_SYNC` and `AT_NO_AUTOMOUNT`, a network or FUSE file system answers
/// from the kernel's cache, and the call mounts nothing. The walk of the path up to its
/// last component can still wait for a server.
///
/// # Errors
/// The errno of `statx` (Linux 4.11); `InvalidInput` for a path with a zero byte.
#[doc(alias = "statx")]
pub fn device_at(path: &Path) -> io::Result<Option<(DeviceKind, u32, u32)>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path ends with a zero byte and lives through the call, and the
    // kernel writes no more than one `struct statx` to the buffer of that type.
    let result = unsafe {
        libc::statx(
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT,
            libc::STATX_TYPE,
            found.as_mut_ptr(),
        )
    };
    Errno::result(result)?;
    // SAFETY: zeroes are a valid `struct statx`, which has only integers.
    let found = unsafe { found.assume_init() };
    let kind = match libc::mode_t::from(found.stx_mode) & libc::S_IFMT {
        libc::S_IFBLK => DeviceKind::Block,
        libc::S_IFCHR => DeviceKind::Character,
        _ => return Ok(None),
    };
    Ok(Some((kind, found.stx_rdev_major, found.stx_rdev_minor)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_no_device_and_what_is_missing_is_an_error() {
        for path in ["/proc/self/exe", "/"] {
            assert_eq!(device_at(Path::new(path)).unwrap(), None, "{path}");
        }
        // `Documentation/admin-guide/devices.txt`.
        let null = device_at(Path::new("/dev/null")).unwrap();
        assert_eq!(null, Some((DeviceKind::Character, 1, 3)));
        let missing = device_at(Path::new("/none/there")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
