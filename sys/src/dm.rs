//! Device-mapper's ioctls on `/dev/mapper/control`
//! (`include/uapi/linux/dm-ioctl.h`, interface 4.0). All need `CAP_SYS_ADMIN`.
//!
//! Only its uuid identifies a device here, because names are used again.

use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

/// The oldest interface that has everything used here.
const INTERFACE: [u32; 3] = [4, 0, 0];
const UUID_LENGTH: usize = 129;
const TYPE_LENGTH: usize = 16;

/// `struct dm_ioctl`: the code uses only its layout.
#[repr(C)]
struct DmIoctl {
    version: [u32; 3],
    data_size: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event_nr: u32,
    padding: u32,
    dev: u64,
    name: [u8; 128],
    uuid: [u8; UUID_LENGTH],
    data: [u8; 7],
}

/// `struct dm_target_spec`: the code uses only its layout.
#[repr(C)]
struct DmTargetSpec {
    sector_start: u64,
    length: u64,
    status: i32,
    next: u32,
    target_type: [u8; TYPE_LENGTH],
}

/// The offset of the data after `struct dm_ioctl`.
const DATA: usize = size_of::<DmIoctl>();
const SPEC: usize = size_of::<DmTargetSpec>();

// The layout is the same on 32-bit and 64-bit machines: the header says so and pads
// for it.
const _: () = {
    assert!(DATA == 312);
    assert!(offset_of!(DmIoctl, data_size) == 12);
    assert!(offset_of!(DmIoctl, data_start) == 16);
    assert!(offset_of!(DmIoctl, target_count) == 20);
    assert!(offset_of!(DmIoctl, open_count) == 24);
    assert!(offset_of!(DmIoctl, flags) == 28);
    assert!(offset_of!(DmIoctl, event_nr) == 32);
    assert!(offset_of!(DmIoctl, padding) == 36);
    assert!(offset_of!(DmIoctl, dev) == 40);
    assert!(offset_of!(DmIoctl, name) == 48);
    assert!(offset_of!(DmIoctl, uuid) == 176);
    assert!(offset_of!(DmIoctl, data) == 305);
    assert!(SPEC == 40);
    assert!(offset_of!(DmTargetSpec, length) == 8);
    assert!(offset_of!(DmTargetSpec, status) == 16);
    assert!(offset_of!(DmTargetSpec, next) == 20);
    assert!(offset_of!(DmTargetSpec, target_type) == 24);
};

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

bitflags::bitflags! {
    /// The caller's options, and the kernel's report on the device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Flags: u32 {
        /// `DM_READONLY_FLAG`.
        #[doc(alias = "DM_READONLY_FLAG")]
        const READ_ONLY = 1 << 0;
        /// `DM_SUSPEND_FLAG`: the device is suspended; in a request of [`suspend`],
        /// suspend it.
        #[doc(alias = "DM_SUSPEND_FLAG")]
        const SUSPENDED = 1 << 1;
        /// `DM_STATUS_TABLE_FLAG`: return the table, not the status.
        #[doc(alias = "DM_STATUS_TABLE_FLAG")]
        const TABLE = 1 << 4;
        /// `DM_ACTIVE_PRESENT_FLAG`: the device has a table.
        #[doc(alias = "DM_ACTIVE_PRESENT_FLAG")]
        const HAS_TABLE = 1 << 5;
        /// `DM_BUFFER_FULL_FLAG`.
        #[doc(alias = "DM_BUFFER_FULL_FLAG")]
        const BUFFER_FULL = 1 << 8;
        /// `DM_SKIP_LOCKFS_FLAG`: do not freeze a filesystem.
        #[doc(alias = "DM_SKIP_LOCKFS_FLAG")]
        const SKIP_LOCKFS = 1 << 10;
        /// `DM_NOFLUSH_FLAG`: keep queued I/O and do not wait for it.
        #[doc(alias = "DM_NOFLUSH_FLAG")]
        const NO_FLUSH = 1 << 11;
    }
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

/// One target of a device, in sectors of 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The first sector.
    pub start: u64,
    /// The number of sectors.
    pub length: u64,
    /// The type, for example `multipath`.
    pub kind: String,
    /// The parameters, or the status.
    pub parameters: String,
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

/// A `struct dm_ioctl` and the data after it.
struct Message(Vec<u8>);

impl Message {
    /// A message that names no device, with `room` bytes after the header.
    fn empty(room: usize) -> Self {
        let mut message = Self(vec![0; DATA + room]);
        for (at, number) in (0..).step_by(4).zip(INTERFACE) {
            let _fits = message.put(at, &number.to_ne_bytes());
        }
        message
    }

    fn of(uuid: &str, flags: Flags, room: usize) -> nix::Result<Self> {
        // Without a uuid the kernel would look for a device by name, or by number.
        if uuid.is_empty() {
            return Err(Errno::EINVAL);
        }
        let mut message = Self::empty(room);
        message.put_text(offset_of!(DmIoctl, uuid), uuid, UUID_LENGTH)?;
        message.put(offset_of!(DmIoctl, flags), &flags.bits().to_ne_bytes())?;
        Ok(message)
    }

    fn exchange(
        &mut self,
        control: impl AsFd,
        ioctl: unsafe fn(libc::c_int, *mut u8) -> nix::Result<libc::c_int>,
    ) -> nix::Result<()> {
        let size = u32::try_from(self.0.len()).map_err(|_| Errno::EINVAL)?;
        let start = u32::try_from(DATA).map_err(|_| Errno::EINVAL)?;
        self.put(offset_of!(DmIoctl, data_size), &size.to_ne_bytes())?;
        self.put(offset_of!(DmIoctl, data_start), &start.to_ne_bytes())?;
        // SAFETY: the descriptor is open for as long as `control` is borrowed.
        // The buffer begins with a header whose layout is checked above and
        // whose `data_size` is the buffer's own length: the kernel reads and
        // writes no byte past it, keeps no pointer, and any byte is a u8.
        unsafe { ioctl(control.as_fd().as_raw_fd(), self.0.as_mut_ptr()) }.map(drop)
    }

    fn put(&mut self, at: usize, bytes: &[u8]) -> nix::Result<()> {
        let place = self.0.get_mut(at..at + bytes.len()).ok_or(Errno::EINVAL)?;
        place.copy_from_slice(bytes);
        Ok(())
    }

    /// Puts `text` and a NUL, in at most `room` bytes.
    fn put_text(&mut self, at: usize, text: &str, room: usize) -> nix::Result<()> {
        if text.len() >= room || text.contains('\0') {
            return Err(Errno::EINVAL);
        }
        self.put(at, text.as_bytes())
    }

    fn flags(&self) -> Flags {
        Flags::from_bits_retain(u32_at(&self.0, offset_of!(DmIoctl, flags)))
    }
}

/// The targets in the kernel's answer to `DM_TABLE_STATUS`: a `struct dm_ioctl` and
/// the data after it. Each target's `next` is an offset from the first target.
///
/// # Errors
/// `EINVAL` if a target lies outside the answer, or not after the one before it.
pub fn read_targets(answer: &[u8]) -> nix::Result<Vec<Target>> {
    let start = u32_at(answer, offset_of!(DmIoctl, data_start));
    let start = usize::try_from(start).map_err(|_| Errno::EINVAL)?;
    let mut targets = Vec::new();
    let mut at = start;
    for _ in 0..u32_at(answer, offset_of!(DmIoctl, target_count)) {
        if at.saturating_add(SPEC) > answer.len() {
            return Err(Errno::EINVAL);
        }
        let kind = text_at(answer, at + offset_of!(DmTargetSpec, target_type));
        targets.push(Target {
            start: u64_at(answer, at),
            length: u64_at(answer, at + offset_of!(DmTargetSpec, length)),
            kind: kind.chars().take(TYPE_LENGTH).collect(),
            parameters: text_at(answer, at + SPEC),
        });
        let next = u32_at(answer, at + offset_of!(DmTargetSpec, next));
        let next = usize::try_from(next).map_err(|_| Errno::EINVAL)?;
        let following = start.saturating_add(next);
        if following <= at {
            return Err(Errno::EINVAL);
        }
        at = following;
    }
    Ok(targets)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// The text up to the NUL.
fn text_at(bytes: &[u8], at: usize) -> String {
    let bytes = bytes.get(at..).unwrap_or_default();
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn an_answer_whose_targets_lie_outside_it_is_refused() {
        let mut message = Message::empty(64);
        message
            .put(offset_of!(DmIoctl, data_start), &312_u32.to_ne_bytes())
            .unwrap();
        message
            .put(offset_of!(DmIoctl, target_count), &2_u32.to_ne_bytes())
            .unwrap();
        message.put(DATA + SPEC, b"8:0 A").unwrap();
        message.put(DATA + 20, &64_u32.to_ne_bytes()).unwrap();
        assert_eq!(read_targets(&message.0), Err(Errno::EINVAL));
        message
            .put(offset_of!(DmIoctl, target_count), &1_u32.to_ne_bytes())
            .unwrap();
        assert_eq!(read_targets(&message.0).unwrap()[0].parameters, "8:0 A");
    }
}
