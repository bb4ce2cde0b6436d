//! The iSCSI transport's netlink (`NETLINK_ISCSI`, `include/scsi/iscsi_if.h`): a
//! program's requests about sessions, and the kernel's own events. Numbers are in
//! the machine's byte order. It needs root and the initial network namespace.
//!
//! A message is a `struct nlmsghdr`, a `struct iscsi_uevent` and its data. The
//! kernel does the work inside `sendmsg(2)`, under one mutex of the whole
//! machine. It answers with the same message, with `r` filled in.

mod params;
mod reply;
mod request;

use std::mem::{offset_of, size_of};

pub use params::{HostParam, Param};
pub use reply::{Answer, KernelEvent, answer, event, messages};
pub use request::{Request, Stop};

/// The only multicast group. The kernel sends its own events to it.
#[doc(alias = "ISCSI_NL_GRP_ISCSID")]
pub const GROUP: u32 = 1;

/// `struct nlmsghdr`: the code uses only its layout.
#[repr(C)]
struct Header {
    len: u32,
    kind: u16,
    flags: u16,
    seq: u32,
    pid: u32,
}

/// `struct iscsi_uevent`: the code uses only its layout.
#[repr(C)]
struct Uevent {
    kind: u32,
    iferror: i32,
    transport_handle: u64,
    /// The request. The answer repeats it.
    u: [u64; 3],
    /// The answer or the event.
    r: [u64; 2],
}

const HEADER: usize = size_of::<Header>();
const UEVENT: usize = size_of::<Uevent>();
/// The offset of a message's data.
const DATA: usize = HEADER + UEVENT;
const U: usize = offset_of!(Uevent, u);
const R: usize = offset_of!(Uevent, r);

// Checked against the header of Linux 6.1 and 7.2. The layout is the same where a
// u64 is aligned to 4 bytes, because each is at a multiple of 8.
const _: () = {
    assert!(HEADER == 16);
    assert!(offset_of!(Header, kind) == 4);
    assert!(offset_of!(Header, flags) == 6);
    assert!(offset_of!(Header, seq) == 8);
    assert!(offset_of!(Header, pid) == 12);
    assert!(UEVENT == 56);
    assert!(offset_of!(Uevent, iferror) == 4);
    assert!(offset_of!(Uevent, transport_handle) == 8);
    assert!(U == 16);
    assert!(R == 40);
    assert!(DATA.is_multiple_of(8));
};

/// The word at `at`; 0 if there is none.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let chunk = bytes.get(at..).and_then(<[u8]>::first_chunk);
    chunk.copied().map_or(0, u32::from_ne_bytes)
}
