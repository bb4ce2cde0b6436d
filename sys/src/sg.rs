//! `SG_IO`, version 3 of the SCSI generic interface (`include/scsi/sg.h`).

use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use libc::{c_int, c_uchar, c_uint, c_ushort, c_void};

const SG_IO: u16 = 0x2285;
const SG_DXFER_FROM_DEV: c_int = -3;

/// `sg_io_hdr_t`.
#[repr(C)]
struct SgIoHdr {
    interface_id: c_int,
    dxfer_direction: c_int,
    cmd_len: c_uchar,
    mx_sb_len: c_uchar,
    iovec_count: c_ushort,
    dxfer_len: c_uint,
    dxferp: *mut c_void,
    cmdp: *const c_uchar,
    sbp: *mut c_uchar,
    timeout: c_uint,
    flags: c_uint,
    pack_id: c_int,
    usr_ptr: *mut c_void,
    status: c_uchar,
    masked_status: c_uchar,
    msg_status: c_uchar,
    sb_len_wr: c_uchar,
    host_status: c_ushort,
    driver_status: c_ushort,
    resid: c_int,
    duration: c_uint,
    info: c_uint,
}

// The header's own layout on a machine with 64-bit pointers.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<SgIoHdr>() == 88);
    assert!(offset_of!(SgIoHdr, dxferp) == 16);
    assert!(offset_of!(SgIoHdr, timeout) == 40);
    assert!(offset_of!(SgIoHdr, usr_ptr) == 56);
    assert!(offset_of!(SgIoHdr, status) == 64);
    assert!(offset_of!(SgIoHdr, host_status) == 68);
    assert!(offset_of!(SgIoHdr, resid) == 72);
    assert!(offset_of!(SgIoHdr, info) == 80);
};

mod raw {
    nix::ioctl_readwrite_bad!(sg_io, super::SG_IO, super::SgIoHdr);
}

bitflags::bitflags! {
    /// `sg_io_hdr_t.info`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Info: u32 {
        /// `SG_INFO_CHECK`: one of the three statuses is not good.
        const CHECK = 0x1;
        /// `SG_INFO_DIRECT_IO`: the data was transferred without a copy.
        const DIRECT_IO = 0x2;
    }
}

/// How a command ended, as the kernel reported it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// How many bytes the device sent.
    pub transferred: usize,
    /// The SCSI status byte (SAM-5, 5.3).
    pub status: u8,
    /// The `DID_` code of the host adapter.
    pub host_status: u16,
    /// The `DRIVER_` code.
    pub driver_status: u16,
    /// The kernel's summary. Unknown bits are kept.
    pub info: Info,
    /// Sense data.
    pub sense: Vec<u8>,
}

/// Sends `cdb` and reads the answer into `buffer`. The timeout limits one try
/// of the command, without the kernel's error recovery. Zero would mean the
/// kernel's 60 s, so the least is 1 ms.
///
/// # Errors
/// The errno of the ioctl; `EINVAL` for a buffer or CDB too long for the
/// interface. A command that reached the device and failed returns no errno:
/// see [`Completion`].
#[doc(alias = "SG_IO")]
pub fn read_command(
    device: impl AsFd,
    cdb: &[u8],
    buffer: &mut [u8],
    timeout: Duration,
) -> nix::Result<Completion> {
    let mut sense = [0; 64];
    let too_long = |_| nix::errno::Errno::EINVAL;
    let requested = c_uint::try_from(buffer.len()).map_err(too_long)?;
    let mut header = SgIoHdr {
        interface_id: c_int::from(b'S'),
        dxfer_direction: SG_DXFER_FROM_DEV,
        cmd_len: c_uchar::try_from(cdb.len()).map_err(too_long)?,
        mx_sb_len: 64,
        iovec_count: 0,
        dxfer_len: requested,
        dxferp: buffer.as_mut_ptr().cast(),
        cmdp: cdb.as_ptr(),
        sbp: sense.as_mut_ptr(),
        timeout: c_uint::try_from(timeout.as_millis().max(1)).unwrap_or(c_uint::MAX),
        flags: 0,
        pack_id: 0,
        usr_ptr: std::ptr::null_mut(),
        status: 0,
        masked_status: 0,
        msg_status: 0,
        sb_len_wr: 0,
        host_status: 0,
        driver_status: 0,
        resid: 0,
        duration: 0,
        info: 0,
    };
    // SAFETY: the header's layout is checked above. Its pointers are those of
    // `buffer`, `cdb` and `sense`, which live until the ioctl has returned,
    // with their true lengths beside them: the kernel writes at most
    // `dxfer_len` bytes to the first and `mx_sb_len` to the last, and only
    // reads the CDB. With version 3 and no SG_FLAG_MMAP_IO it keeps none of
    // them after the return.
    unsafe { raw::sg_io(device.as_fd().as_raw_fd(), &raw mut header) }?;
    let left = usize::try_from(header.resid).unwrap_or(0);
    let sensed = usize::from(header.sb_len_wr).min(sense.len());
    Ok(Completion {
        transferred: buffer.len().saturating_sub(left),
        status: header.status,
        host_status: header.host_status,
        driver_status: header.driver_status,
        info: Info::from_bits_retain(header.info),
        sense: sense.get(..sensed).unwrap_or_default().to_vec(),
    })
}
