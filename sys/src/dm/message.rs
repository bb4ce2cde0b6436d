//! The messages of device-mapper's ioctls: their layout, and the exchange with the kernel.

use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

/// The oldest interface that has everything used here.
const INTERFACE: [u32; 3] = [4, 0, 0];
pub(super) const UUID_LENGTH: usize = 129;
pub(super) const TYPE_LENGTH: usize = 16;

/// `struct dm_ioctl`: the code uses only its layout.
#[repr(C)]
pub(super) struct DmIoctl {
    pub(super) version: [u32; 3],
    pub(super) data_size: u32,
    pub(super) data_start: u32,
    pub(super) target_count: u32,
    pub(super) open_count: i32,
    pub(super) flags: u32,
    pub(super) event_nr: u32,
    pub(super) padding: u32,
    pub(super) dev: u64,
    pub(super) name: [u8; 128],
    pub(super) uuid: [u8; UUID_LENGTH],
    pub(super) data: [u8; 7],
}

/// `struct dm_target_spec`: the code uses only its layout.
#[repr(C)]
pub(super) struct DmTargetSpec {
    pub(super) sector_start: u64,
    pub(super) length: u64,
    pub(super) status: i32,
    pub(super) next: u32,
    pub(super) target_type: [u8; TYPE_LENGTH],
}

/// The offset of the data after `struct dm_ioctl`.
pub(super) const DATA: usize = size_of::<DmIoctl>();
pub(super) const SPEC: usize = size_of::<DmTargetSpec>();

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

bitflags::bitflags! {
    /// The caller's options, and the kernel's report on the device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Flags: u32 {
        /// `DM_READONLY_FLAG`.
        #[doc(alias = "DM_READONLY_FLAG")]
        const READ_ONLY = 1 << 0;
        /// `DM_SUSPEND_FLAG`: the device is suspended; in a request
        /// of [`suspend`](super::suspend), suspend it.
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

/// A `struct dm_ioctl` and the data after it.
pub(super) struct Message(pub(super) Vec<u8>);

impl Message {
    /// A message that names no device, with `room` bytes after the header.
    pub(super) fn empty(room: usize) -> Self {
        let mut message = Self(vec![0; DATA + room]);
        for (at, number) in (0..).step_by(4).zip(INTERFACE) {
            let _fits = message.put(at, &number.to_ne_bytes());
        }
        message
    }

    pub(super) fn of(uuid: &str, flags: Flags, room: usize) -> nix::Result<Self> {
        // Without a uuid the kernel would look for a device by name, or by number.
        if uuid.is_empty() {
            return Err(Errno::EINVAL);
        }
        let mut message = Self::empty(room);
        message.put_text(offset_of!(DmIoctl, uuid), uuid, UUID_LENGTH)?;
        message.put(offset_of!(DmIoctl, flags), &flags.bits().to_ne_bytes())?;
        Ok(message)
    }

    pub(super) fn exchange(
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

    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) -> nix::Result<()> {
        let place = self.0.get_mut(at..at + bytes.len()).ok_or(Errno::EINVAL)?;
        place.copy_from_slice(bytes);
        Ok(())
    }

    /// Puts `text` and a NUL, in at most `room` bytes.
    pub(super) fn put_text(&mut self, at: usize, text: &str, room: usize) -> nix::Result<()> {
        if text.len() >= room || text.contains('\0') {
            return Err(Errno::EINVAL);
        }
        self.put(at, text.as_bytes())
    }

    pub(super) fn flags(&self) -> Flags {
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

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// The text up to the NUL.
pub(super) fn text_at(bytes: &[u8], at: usize) -> String {
    let bytes = bytes.get(at..).unwrap_or_default();
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

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
