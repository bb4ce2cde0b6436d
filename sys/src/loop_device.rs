//! Loop devices (`include/uapi/linux/loop.h`).

use std::os::fd::{AsFd, AsRawFd};

/// `struct loop_info64`: 232 bytes. This crate reads only the third number.
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    rest: [u64; 26],
}

mod raw {
    nix::ioctl_read_bad!(loop_get_status64, 0x4C05, super::Info);
}

/// `LOOP_GET_STATUS64`: the device number of the backing device (`lo_rdevice`), in
/// the encoding of `dev_t`; 0 if a regular file backs it. The kernel takes it from
/// the open file, so it follows no path. For a file on a file server the kernel asks
/// that server (`drivers/block/loop.c`, `loop_get_status`).
///
/// # Errors
/// The errno of the ioctl; `ENXIO` if nothing backs the device.
#[doc(alias = "LOOP_GET_STATUS64")]
pub fn backing_device(device: impl AsFd) -> nix::Result<u64> {
    let mut info = Info {
        device: 0,
        inode: 0,
        rdevice: 0,
        rest: [0; 26],
    };
    // SAFETY: the descriptor is open for as long as `device` is borrowed, and the
    // kernel writes one `struct loop_info64` through a pointer to a live one.
    unsafe { raw::loop_get_status64(device.as_fd().as_raw_fd(), &raw mut info) }?;
    Ok(info.rdevice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structure_has_the_size_of_the_kernels() {
        assert_eq!(size_of::<Info>(), 232);
    }
}
