//! Asks a target whether a logical unit exists.

use std::time::Duration;

use lunbd_sys::sg::Completion;

use super::inquiry::{STANDARD, STANDARD_CDB};
use super::{
    CHECK_CONDITION, CommandOutcome, ILLEGAL_REQUEST, Opened, failed, outcome, page, send,
};
use crate::error::{Error, ErrorKind, Result};

const INQUIRY: &str = "INQUIRY";
const TEST_UNIT_READY: &str = "TEST UNIT READY";
/// LOGICAL UNIT NOT SUPPORTED (SPC-5, table F.1).
const NOT_SUPPORTED: (u8, u8) = (0x25, 0x00);

/// A target's answer about one of its LUNs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Some unit is there.
    Present,
    /// The target refused this command with LOGICAL UNIT NOT SUPPORTED.
    NotSupported(&'static str),
    /// The first byte of the standard INQUIRY data says that no unit is there.
    NoUnit(u8),
}

/// Sends INQUIRY, which a target also answers for LUNs that it does not have,
/// and then TEST UNIT READY. **Blocks** for up to `timeout` per try and
/// the kernel's error recovery: call it on a worker.
///
/// # Errors
/// `Io` or `NotReady` if the target did not answer. That says nothing about the
/// unit.
pub(crate) fn ask_presence(device: Opened<'_>, timeout: Duration) -> Result<Presence> {
    let mut memory = page()?;
    let (buffer, _) = memory.split_at_mut(usize::from(STANDARD));
    let done = send(device, INQUIRY, &STANDARD_CDB, buffer, timeout)?;
    if is_refused(&done) {
        return Ok(Presence::NotSupported(INQUIRY));
    }
    if !matches!(outcome(&done), CommandOutcome::Good) {
        return Err(failed(INQUIRY, &done));
    }
    let answer = buffer.get(..done.transferred).unwrap_or_default();
    let Some(&first) = answer.first() else {
        let message = "the device's standard INQUIRY data is empty";
        return Err(Error::new(ErrorKind::Io, message));
    };
    if reports_no_unit(first) {
        return Ok(Presence::NoUnit(first));
    }
    let done = send(device, TEST_UNIT_READY, &[0; 6], &mut [], timeout)?;
    if is_refused(&done) {
        return Ok(Presence::NotSupported(TEST_UNIT_READY));
    }
    // A unit that is not ready exists.
    if done.status == 0 && !matches!(outcome(&done), CommandOutcome::Good) {
        return Err(failed(TEST_UNIT_READY, &done));
    }
    Ok(Presence::Present)
}

/// Decodes the peripheral qualifier and device type (SPC-5, 6.7.2). 011b means
/// "no unit can be here". 001b means "none is connected here". A path in the
/// ALUA state offline also answers 001b for a unit that exists, but then names
/// the unit's type. With type 1Fh, no type (LIO at LUN 0), there is no unit.
pub(super) fn reports_no_unit(first: u8) -> bool {
    const NO_TYPE: u8 = 0x1f;
    let (qualifier, kind) = (first >> 5, first & 0x1f);
    qualifier == 0b011 || (qualifier == 0b001 && kind == NO_TYPE)
}

pub(super) fn is_refused(done: &Completion) -> bool {
    done.status == CHECK_CONDITION && is_not_supported(&done.sense)
}

/// Accepts only sense data of the command itself (70h, 72h), not of an earlier
/// one.
fn is_not_supported(sense: &[u8]) -> bool {
    let at = |index: usize| sense.get(index).copied();
    let (key, code) = match at(0).map(|byte| byte & 0x7f) {
        Some(0x70) => (at(2), at(12).zip(at(13))),
        Some(0x72) => (at(1), at(2).zip(at(3))),
        _ => return false,
    };
    key.map(|key| key & 0x0f) == Some(ILLEGAL_REQUEST) && code == Some(NOT_SUPPORTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_logical_unit_not_supported_of_the_command_itself_is_a_refusal_of_the_unit() {
        let mut fixed = [0; 18];
        fixed[0] = 0x70;
        fixed[2] = ILLEGAL_REQUEST;
        fixed[12] = 0x25;
        assert!(is_not_supported(&fixed));
        assert!(!is_not_supported(&fixed[..13]));
        let deferred = [&[0x71], &fixed[1..]].concat();
        assert!(!is_not_supported(&deferred));
        let invalid_field = [&fixed[..12], &[0x24, 0]].concat();
        assert!(!is_not_supported(&invalid_field));
        let mut not_ready = fixed;
        not_ready[2] = 0x02;
        assert!(!is_not_supported(&not_ready));
        assert!(is_not_supported(&[0x72, 0x05, 0x25, 0, 0, 0, 0, 0]));
        assert!(!is_not_supported(&[0x72, 0x05, 0x25, 1]));
        assert!(!is_not_supported(&[]));
    }

    #[test]
    fn an_unconnected_path_does_not_prove_that_the_unit_is_absent() {
        assert!(reports_no_unit(0x7f));
        assert!(reports_no_unit(0x60));
        assert!(reports_no_unit(0x3f));
        assert!(!reports_no_unit(0x20));
        assert!(!reports_no_unit(0x00));
    }
}
