//! The status and the sense data of a command (SPC-5, 4.4).

use lunbd_sys::sg::Completion;

pub(super) const CHECK_CONDITION: u8 = 0x02;
pub(super) const ILLEGAL_REQUEST: u8 = 0x05;
pub(super) const UNIT_ATTENTION: u8 = 0x06;

/// LOGICAL UNIT NOT SUPPORTED (SPC-5, table F.1).
const NOT_SUPPORTED: (u8, u8) = (0x25, 0x00);

/// The sense key in fixed and descriptor format (SPC-5, 4.4).
pub(super) fn sense_key(sense: &[u8]) -> Option<u8> {
    let byte = match sense.first()? & 0x7f {
        0x70 | 0x71 => sense.get(2)?,
        0x72 | 0x73 => sense.get(1)?,
        _ => return None,
    };
    Some(byte & 0x0f)
}

/// The sense key and the additional sense code with its qualifier, as SPC-5 writes them.
pub(super) fn describe_sense(sense: &[u8]) -> String {
    let at = |index: usize| sense.get(index).copied().unwrap_or_default();
    let (code, qualifier) = match at(0) & 0x7f {
        0x70 | 0x71 => (at(12), at(13)),
        _ => (at(2), at(3)),
    };
    match sense_key(sense) {
        Some(key) => format!("sense key {key:X}h, code {code:02X}h/{qualifier:02X}h"),
        None => "no sense data".to_owned(),
    }
}

/// Whether the target refused the command with LOGICAL UNIT NOT SUPPORTED: it has no unit at that
/// LUN.
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
}
