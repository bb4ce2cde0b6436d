//! INQUIRY (SPC-5, 6.7).

use std::time::Duration;

use super::{LONGEST, Opened, command, page};
use crate::error::{Error, ErrorKind, Result};

const INQUIRY: u8 = 0x12;
/// The allocation length of the first try. Every device since SCSI-2 can answer
/// it.
const SHORT: u16 = 255;
/// The length of the standard data, up to and including the product's revision.
/// Every device answers as much.
pub(super) const STANDARD: u8 = 36;
pub(super) const STANDARD_CDB: [u8; 6] = [INQUIRY, 0, 0, 0, STANDARD, 0];
/// A VPD page's header: type, page code, length.
const HEADER: usize = 4;

/// Reads a page of vital product data, with its header; `None` if the device
/// does not have the page. **Blocks** for up to `timeout` and the kernel's
/// error recovery: call it on a worker.
///
/// # Errors
/// `Io` if the command failed or the answer is malformed; `NotReady` if the path
/// to the device is down; `NotFound` if the target refuses it with LOGICAL UNIT NOT SUPPORTED.
pub(crate) fn read_vpd(device: Opened<'_>, code: u8, timeout: Duration) -> Result<Option<Vec<u8>>> {
    const EVPD: u8 = 1;
    let name = format!("INQUIRY for page {code:#04x}");
    let mut memory = page()?;
    let mut allocation = SHORT;
    loop {
        let [high, low] = allocation.to_be_bytes();
        let cdb = [INQUIRY, EVPD, code, high, low, 0];
        let length = usize::from(allocation).min(memory.len());
        let (buffer, _) = memory.split_at_mut(length);
        let Some(answer) = command(device, &name, &cdb, buffer, timeout)? else {
            return Ok(None);
        };
        match page_in(answer, code, allocation)? {
            Page::Complete(page) => return Ok(Some(page.to_vec())),
            Page::Truncated(longer) => allocation = longer,
        }
    }
}

/// How much of a page an answer holds.
#[derive(Debug)]
pub(super) enum Page<'a> {
    Complete(&'a [u8]),
    /// The whole page needs an answer of this many bytes.
    Truncated(u16),
}

/// # Errors
/// `Io` if the answer to a command with this allocation length is malformed.
pub(super) fn page_in(answer: &[u8], code: u8, allocation: u16) -> Result<Page<'_>> {
    let [_, found, high, low, ..] = *answer else {
        return Err(malformed(code, "it is shorter than its header"));
    };
    if found != code {
        let how = format!("it says that it is page {found:#04x}");
        return Err(malformed(code, &how));
    }
    let whole = usize::from(u16::from_be_bytes([high, low])) + HEADER;
    if let Some(page) = answer.get(..whole) {
        return Ok(Page::Complete(page));
    }
    let needed = u16::try_from(whole).unwrap_or(LONGEST).min(LONGEST);
    if needed <= allocation {
        return Err(malformed(code, "it is cut short"));
    }
    Ok(Page::Truncated(needed))
}

/// Reads vendor and product from the standard data: eight and sixteen
/// characters, padded with blanks. **Blocks** like [`read_vpd`].
///
/// # Errors
/// As [`read_vpd`].
pub(crate) fn read_product(device: Opened<'_>, timeout: Duration) -> Result<String> {
    let mut memory = page()?;
    let (buffer, _) = memory.split_at_mut(usize::from(STANDARD));
    let answer = command(device, "INQUIRY", &STANDARD_CDB, buffer, timeout)?;
    let product = answer.and_then(|answer| answer.get(8..32)).ok_or_else(|| {
        let message = "the device's standard INQUIRY data names no product";
        Error::new(ErrorKind::Io, message)
    })?;
    Ok(String::from_utf8_lossy(product).into_owned())
}

fn malformed(code: u8, how: &str) -> Error {
    let message = format!("the device's page {code:#04x} is malformed: {how}");
    Error::new(ErrorKind::Io, message)
}
