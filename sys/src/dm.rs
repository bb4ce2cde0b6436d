//! Device-mapper's ioctls on `/dev/mapper/control`
//! (`include/uapi/linux/dm-ioctl.h`, interface 4.0). All need `CAP_SYS_ADMIN`.
//!
//! Only its uuid identifies a device here, because names are used again.

mod message;

use std::mem::{offset_of, size_of};
use std::os::fd::AsFd;

use nix::errno::Errno;

use message::{DATA, DmIoctl, DmTargetSpec, Message, SPEC, TYPE_LENGTH, text_at, u32_at, u64_at};
pub use message::{Flags, Target, read_targets};

mod raw {
    use super::DATA;
    use nix::{ioctl_readwrite_bad, request_code_readwrite};

    // The argument is a buffer of bytes, because the data after the header has any
    // length.
    ioctl_readwrite_bad!(version, request_code_readwrite!(0xfd, 0, DATA), u8);
    ioctl_readwrite_bad!(dev_remove, request_code_readwrite!(0xfd, 4, DATA), u8);
    ioctl_readwrite_bad!(dev_suspend, request_code_readwrite!(0xfd, 6, DATA), u8);
    ioctl_readwrite_bad!(dev_status, request_code_readwrite!(0xfd, 7, DATA), u8);
    ioctl_readwrite_bad!(table_load, request_code_readwrite!(0xfd, 9, DATA), u8);
    ioctl_readwrite_bad!(table_status, request_code_readwrite!(0xfd, 12, DATA), u8);
    ioctl_readwrite_bad!(target_msg, request_code_readwrite!(0xfd, 14, DATA), u8);
}

/// The status of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The flags. Unknown bits are kept.
    pub flags: Flags,
    /// How many times the device is open, mounts included.
    pub open_count: i32,
    /// The device's number, as in `st_rdev`.
    pub dev: u64,
    /// The device's name below `/dev/mapper`.
    pub name: String,
}

/// `DM_VERSION`: the kernel's version of the interface.
///
/// # Errors
/// The errno of the ioctl.
#[doc(alias = "DM_VERSION")]
pub fn version(control: impl AsFd) -> nix::Result<[u32; 3]> {
    let mut message = Message::empty(0);
    message.exchange(control, raw::version)?;
    Ok([0, 4, 8].map(|at| u32_at(&message.0, at)))
}

/// `DM_DEV_STATUS`.
///
/// # Errors
/// The errno of the ioctl: `ENXIO` if there is no such device.
#[doc(alias = "DM_DEV_STATUS")]
pub fn status(control: impl AsFd, uuid: &str) -> nix::Result<Status> {
    let mut message = Message::of(uuid, Flags::empty(), 0)?;
    message.exchange(control, raw::dev_status)?;
    Ok(Status {
        flags: message.flags(),
        open_count: u32_at(&message.0, offset_of!(DmIoctl, open_count)).cast_signed(),
        dev: u64_at(&message.0, offset_of!(DmIoctl, dev)),
        name: text_at(&message.0, offset_of!(DmIoctl, name)),
    })
}

/// `DM_TABLE_STATUS`: the targets with their status or, with [`Flags::TABLE`],
/// their parameters. The buffer grows with the answer, up to 16 MiB.
///
/// # Errors
/// The errno of the ioctl: `ENXIO` if there is no such device; `ENOBUFS` for a
/// longer answer.
#[doc(alias = "DM_TABLE_STATUS")]
pub fn table_status(control: impl AsFd, uuid: &str, flags: Flags) -> nix::Result<Vec<Target>> {
    const LONGEST: usize = 16 << 20;
    let mut room = 16 << 10;
    loop {
        let mut message = Message::of(uuid, flags, room)?;
        message.exchange(&control, raw::table_status)?;
        if !message.flags().contains(Flags::BUFFER_FULL) {
            return read_targets(&message.0);
        }
        room *= 4;
        if room > LONGEST {
            return Err(Errno::ENOBUFS);
        }
    }
}

/// `DM_TARGET_MSG`: sends a message to the target that holds `sector`. It does not
/// read the target's text answer.
///
/// # Errors
/// The errno of the ioctl: `ENXIO` if there is no such device; otherwise the
/// target's own.
#[doc(alias = "DM_TARGET_MSG")]
pub fn send_message(control: impl AsFd, uuid: &str, sector: u64, text: &str) -> nix::Result<()> {
    // struct dm_target_msg: the sector, then the text and its NUL.
    let start = DATA + size_of::<u64>();
    let mut message = Message::of(uuid, Flags::empty(), size_of::<u64>() + text.len() + 1)?;
    message.put(DATA, &sector.to_ne_bytes())?;
    message.put_text(start, text, text.len() + 1)?;
    message.exchange(control, raw::target_msg)
}

/// `DM_DEV_SUSPEND` with `DM_SUSPEND_FLAG`: holds I/O back until [`resume`].
/// **Blocks** while I/O is in flight.
///
/// # Errors
/// The errno of the ioctl: `ENXIO` if there is no such device.
#[doc(alias = "DM_DEV_SUSPEND")]
pub fn suspend(control: impl AsFd, uuid: &str, flags: Flags) -> nix::Result<()> {
    Message::of(uuid, flags | Flags::SUSPENDED, 0)?.exchange(control, raw::dev_suspend)
}

/// `DM_DEV_SUSPEND` without `DM_SUSPEND_FLAG`: activates a loaded table and lets
/// I/O continue. If the device is not suspended, the kernel suspends it for that
/// with `flags`.
///
/// # Errors
/// The errno of the ioctl: `ENXIO` if there is no such device.
#[doc(alias = "DM_DEV_SUSPEND")]
pub fn resume(control: impl AsFd, uuid: &str, flags: Flags) -> nix::Result<()> {
    Message::of(uuid, flags - Flags::SUSPENDED, 0)?.exchange(control, raw::dev_suspend)
}

/// `DM_DEV_REMOVE`. **Blocks** until the kernel has removed the device.
///
/// # Errors
/// The errno of the ioctl: `ENXIO` if there is no such device; `EBUSY` if it is
/// open.
#[doc(alias = "DM_DEV_REMOVE")]
pub fn remove(control: impl AsFd, uuid: &str) -> nix::Result<()> {
    Message::of(uuid, Flags::empty(), 0)?.exchange(control, raw::dev_remove)
}

/// `DM_TABLE_LOAD`: loads a table into the inactive slot, for [`resume`] to
/// activate. It uses only [`Flags::READ_ONLY`] of `flags`.
///
/// # Errors
/// The errno of the ioctl: `ENXIO` if there is no such device; `EINVAL` if a target
/// does not take its parameters.
#[doc(alias = "DM_TABLE_LOAD")]
pub fn load(control: impl AsFd, uuid: &str, flags: Flags, table: &[Target]) -> nix::Result<()> {
    let lengths: Vec<usize> = table
        .iter()
        .map(|target| (SPEC + target.parameters.len() + 1).next_multiple_of(8))
        .collect();
    let mut message = Message::of(uuid, flags, lengths.iter().sum())?;
    let count = u32::try_from(table.len()).map_err(|_| Errno::EINVAL)?;
    message.put(offset_of!(DmIoctl, target_count), &count.to_ne_bytes())?;
    let mut at = DATA;
    for (target, length) in table.iter().zip(lengths) {
        let next = u32::try_from(length).map_err(|_| Errno::EINVAL)?;
        message.put(at, &target.start.to_ne_bytes())?;
        message.put(
            at + offset_of!(DmTargetSpec, length),
            &target.length.to_ne_bytes(),
        )?;
        message.put(at + offset_of!(DmTargetSpec, next), &next.to_ne_bytes())?;
        let kind = at + offset_of!(DmTargetSpec, target_type);
        message.put_text(kind, &target.kind, TYPE_LENGTH)?;
        let room = target.parameters.len() + 1;
        message.put_text(at + SPEC, &target.parameters, room)?;
        at += length;
    }
    message.exchange(control, raw::table_load)
}

#[cfg(test)]
mod tests {
    use super::message::UUID_LENGTH;
    use super::*;

    #[test]
    fn a_device_without_a_uuid_or_with_one_too_long_is_refused_before_the_kernel_is_asked() {
        let null = std::fs::File::open("/dev/null").unwrap();
        for uuid in ["", "a\0b", &"x".repeat(UUID_LENGTH)] {
            assert_eq!(remove(&null, uuid), Err(Errno::EINVAL), "{uuid:?}");
        }
        // The longest one is sent, to a file that knows no such ioctl.
        let uuid = "x".repeat(UUID_LENGTH - 1);
        assert_eq!(remove(&null, &uuid), Err(Errno::ENOTTY));
    }
}
