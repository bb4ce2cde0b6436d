//! READ CAPACITY (SBC-4, 5.20 and 5.21).

use std::time::Duration;

use super::{Opened, command, page};
use crate::error::{Error, ErrorKind, Result};

const READ_CAPACITY_10: u8 = 0x25;
const SERVICE_ACTION_IN_16: u8 = 0x9e;
/// READ CAPACITY(16) is a service action.
const READ_CAPACITY_16: u8 = 0x10;

/// The size in bytes, from READ CAPACITY(16), or from (10) if the device does
/// not know that. **Blocks** for up to `timeout` per command and the
/// kernel's error recovery: call it on a worker.
///
/// # Errors
/// `Io` if the command failed or the answer is malformed; `NotReady` if the
/// path to the device is down.
pub(crate) fn read_capacity(device: Opened<'_>, timeout: Duration) -> Result<u64> {
    const LENGTH: usize = 32;
    let mut memory = page()?;
    let (buffer, _) = memory.split_at_mut(LENGTH);
    let mut cdb = [0; 16];
    cdb[0] = SERVICE_ACTION_IN_16;
    cdb[1] = READ_CAPACITY_16;
    // The length is big-endian in bytes 10 to 13.
    cdb[13] = 32;
    if let Some(answer) = command(device, "READ CAPACITY(16)", &cdb, buffer, timeout)? {
        return long_form(answer).ok_or_else(malformed);
    }
    let (buffer, _) = memory.split_at_mut(8);
    let mut cdb = [0; 10];
    cdb[0] = READ_CAPACITY_10;
    command(device, "READ CAPACITY(10)", &cdb, buffer, timeout)?
        .and_then(short_form)
        .ok_or_else(malformed)
}

pub(super) fn long_form(answer: &[u8]) -> Option<u64> {
    let (last, rest) = answer.split_first_chunk()?;
    let (length, _) = rest.split_first_chunk()?;
    bytes(u64::from_be_bytes(*last), u32::from_be_bytes(*length))
}

pub(super) fn short_form(answer: &[u8]) -> Option<u64> {
    let (last, rest) = answer.split_first_chunk()?;
    let (length, _) = rest.split_first_chunk()?;
    let last = u32::from_be_bytes(*last);
    // This value means "too large for this command", but the device has no
    // other command.
    if last == u32::MAX {
        return None;
    }
    bytes(u64::from(last), u32::from_be_bytes(*length))
}

fn bytes(last_block: u64, block_length: u32) -> Option<u64> {
    let size = last_block
        .checked_add(1)?
        .checked_mul(u64::from(block_length))?;
    (size > 0).then_some(size)
}

fn malformed() -> Error {
    let message = "the device's answer to READ CAPACITY is malformed";
    Error::new(ErrorKind::Io, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_the_number_of_blocks_times_the_block_length() {
        let mut answer = [0; 32];
        answer[4..8].copy_from_slice(&16_383_u32.to_be_bytes());
        answer[8..12].copy_from_slice(&512_u32.to_be_bytes());
        assert_eq!(long_form(&answer), Some(8 << 20));
        assert_eq!(short_form(&answer[4..12]), Some(8 << 20));
    }

    #[test]
    fn an_answer_that_is_short_or_absurd_is_no_size() {
        assert_eq!(long_form(&[0; 11]), None);
        assert_eq!(long_form(&[0xff; 32]), None);
        assert_eq!(long_form(&[0; 32]), None);
        assert_eq!(short_form(&[0; 7]), None);
        assert_eq!(short_form(&[0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]), None);
    }
}
