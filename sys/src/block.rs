//! Ioctls of block devices (`include/uapi/linux/fs.h`).

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::libc;

mod raw {
    nix::ioctl_none!(blkflsbuf, 0x12, 97);
    nix::ioctl_read!(blkgetdiskseq, 0x12, 128, u64);
}

/// `BLKFLSBUF`: writes the device's dirty pages back and drops its page cache. It sends
/// no cache flush to the device. Needs `CAP_SYS_ADMIN`.
///
/// # Errors
/// The errno of the ioctl.
#[doc(alias = "BLKFLSBUF")]
pub fn flush_buffers(device: impl AsFd) -> nix::Result<()> {
    // SAFETY: the descriptor is open for as long as `device` is borrowed, and
    // the ioctl takes no argument.
    unsafe { raw::blkflsbuf(device.as_fd().as_raw_fd()) }.map(drop)
}

/// `sync_file_range` over the whole device: writes its dirty pages back and waits until
/// each is written. It sends no cache flush to the device.
///
/// # Errors
/// The errno of the call. A failed write is reported once for each open file.
#[doc(alias = "sync_file_range")]
pub fn write_pages(device: impl AsFd) -> nix::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the descriptor is open for as long as `device` is borrowed, and the call
    // takes no pointer.
    let done = unsafe { libc::sync_file_range(device.as_fd().as_raw_fd(), 0, 0, flags) };
    Errno::result(done).map(drop)
}

/// `BLKGETDISKSEQ`: the disk sequence number. Linux 5.15.
///
/// # Errors
/// The errno of the ioctl; `ENOTTY` before 5.15.
#[doc(alias = "BLKGETDISKSEQ")]
pub fn disk_sequence(device: impl AsFd) -> nix::Result<u64> {
    let mut sequence = 0;
    // SAFETY: the descriptor is open for as long as `device` is borrowed, and
    // the kernel writes one u64 through a pointer to a live u64.
    unsafe { raw::blkgetdiskseq(device.as_fd().as_raw_fd(), &raw mut sequence) }?;
    Ok(sequence)
}
