//! Asks a target whether a logical unit exists.

use std::time::Duration;

use super::inquiry::{STANDARD, STANDARD_CDB};
use super::sense::is_refused;
use super::{CommandOutcome, Opened, failed, outcome, page, send};
use crate::error::{Error, ErrorKind, Result};

const INQUIRY: &str = "INQUIRY";
const TEST_UNIT_READY: &str = "TEST UNIT READY";
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unconnected_path_does_not_prove_that_the_unit_is_absent() {
        assert!(reports_no_unit(0x7f));
        assert!(reports_no_unit(0x60));
        assert!(reports_no_unit(0x3f));
        assert!(!reports_no_unit(0x20));
        assert!(!reports_no_unit(0x00));
    }
}
