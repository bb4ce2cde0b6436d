//! INQUIRY, sent to the device itself: sysfs only shows what the kernel cached
//! at the last scan.

use std::fs::File;
use std::time::Duration;

use lunbd_sys::sg::{self, Completion};
use memmap2::MmapMut;

use crate::error::{Error, ErrorKind, Result};

const INQUIRY: u8 = 0x12;
/// The first try asks for what every device since SCSI-2 can answer.
const SHORT: u16 = 255;
/// A VPD page's header: type, page code, length.
const HEADER: usize = 4;
/// One page of memory; no identity page is longer.
const LONGEST: u16 = 4096;

const CHECK_CONDITION: u8 = 0x02;
const ILLEGAL_REQUEST: u8 = 0x05;
const UNIT_ATTENTION: u8 = 0x06;

/// Reads a page of vital product data (SPC-5, 6.7), header and all; `None`
/// where the device does not have it. **Blocks** for up to `timeout` and the
/// kernel's error recovery: call it on a worker.
///
/// # Errors
/// `Io` where the command failed, with the statuses in words; `NotReady` where
/// the path to the device is down.
pub(crate) fn read_vpd(device: &File, page: u8, timeout: Duration) -> Result<Option<Vec<u8>>> {
    // Page-aligned, so that the transfer goes to it directly where it can.
    let mut buffer = MmapMut::map_anon(usize::from(LONGEST))
        .map_err(|error| Error::new(ErrorKind::Io, format!("no memory for a page: {error}")))?;
    let mut allocation = SHORT;
    loop {
        let Some(answer) = inquiry(device, page, allocation, &mut buffer, timeout)? else {
            return Ok(None);
        };
        let [_, code, high, low, ..] = *answer else {
            return Err(malformed(page, "it is shorter than its header"));
        };
        if code != page {
            return Err(malformed(
                page,
                &format!("it says that it is page {code:#04x}"),
            ));
        }
        let whole = usize::from(u16::from_be_bytes([high, low])) + HEADER;
        if whole <= answer.len() {
            return Ok(answer.get(..whole).map(<[u8]>::to_vec));
        }
        let needed = u16::try_from(whole).unwrap_or(LONGEST).min(LONGEST);
        if needed <= allocation {
            return Err(malformed(page, "it is cut short"));
        }
        allocation = needed;
    }
}

fn inquiry<'a>(
    device: &File,
    page: u8,
    allocation: u16,
    buffer: &'a mut [u8],
    timeout: Duration,
) -> Result<Option<&'a [u8]>> {
    const EVPD: u8 = 1;
    let [high, low] = allocation.to_be_bytes();
    let cdb = [INQUIRY, EVPD, page, high, low, 0];
    let length = usize::from(allocation).min(buffer.len());
    let (buffer, _) = buffer.split_at_mut(length);
    // A unit attention is reported once and then gone.
    for last_try in [false, false, true] {
        let done = sg::read_command(device, &cdb, buffer, timeout).map_err(|errno| {
            let action = format!("cannot send INQUIRY for page {page:#04x}");
            Error::new(ErrorKind::Io, format!("{action}: {}", errno.desc()))
        })?;
        match verdict(&done) {
            Verdict::Good => return Ok(buffer.get(..done.transferred)),
            Verdict::Unsupported => return Ok(None),
            Verdict::Attention if !last_try => {}
            Verdict::Attention | Verdict::Failed => return Err(failed(page, &done)),
        }
    }
    Ok(None)
}

enum Verdict {
    Good,
    Unsupported,
    Attention,
    Failed,
}

fn verdict(done: &Completion) -> Verdict {
    if !done.info.contains(sg::Info::CHECK) {
        return Verdict::Good;
    }
    if done.status != CHECK_CONDITION || done.host_status != 0 {
        return Verdict::Failed;
    }
    match sense_key(&done.sense) {
        Some(ILLEGAL_REQUEST) => Verdict::Unsupported,
        Some(UNIT_ATTENTION) => Verdict::Attention,
        _ => Verdict::Failed,
    }
}

/// Fixed and descriptor format (SPC-5, 4.4).
fn sense_key(sense: &[u8]) -> Option<u8> {
    let byte = match sense.first()? & 0x7f {
        0x70 | 0x71 => sense.get(2)?,
        0x72 | 0x73 => sense.get(1)?,
        _ => return None,
    };
    Some(byte & 0x0f)
}

fn failed(page: u8, done: &Completion) -> Error {
    // include/scsi/scsi_status.h
    let (kind, host) = match done.host_status {
        0x00 => (ErrorKind::Io, "reached"),
        0x01 => (ErrorKind::NotReady, "no connection"),
        0x03 => (ErrorKind::NotReady, "timed out"),
        0x0e | 0x0f => (ErrorKind::NotReady, "path down"),
        _ => (ErrorKind::Io, "failed"),
    };
    let Completion {
        status,
        host_status,
        driver_status,
        ..
    } = done;
    Error::new(
        kind,
        format!(
            "INQUIRY for page {page:#04x} failed: device {host} \
             (status {status:#04x}, host {host_status:#04x}, driver {driver_status:#04x}, sense key {:?})",
            sense_key(&done.sense)
        ),
    )
}

fn malformed(page: u8, how: &str) -> Error {
    let message = format!("the device's page {page:#04x} is malformed: {how}");
    Error::new(ErrorKind::Io, message)
}
