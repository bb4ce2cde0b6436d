//! The UUID of a LUKS header, version 1 or 2.
//!
//! LUKS1 On-Disk Format Specification 1.2.3, 2.3, and LUKS2 On-Disk Format Specification
//! 1.1.3, 2.1: both begin with `LUKS` 0xBA 0xBE and the version, of two bytes and
//! big-endian, and have the UUID at byte 168, as text of at most 40 bytes.

use super::bytes::Bytes;
use crate::id::ContentName;

pub(super) fn name(first: Bytes<'_>) -> Option<ContentName> {
    let version = u16::from_be_bytes(first.array(6)?);
    let is_luks = first.has(0, b"LUKS\xba\xbe") && matches!(version, 1 | 2);
    is_luks.then(|| ContentName::luks(first.text(168, 40)?))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_luks_have_their_uuid_and_what_is_no_uuid_is_no_name() {
        let uuid = b"0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9";
        for (version, text, is_named) in [
            (1, &uuid[..], true),
            (2, &uuid[..], true),
            (3, &uuid[..], false),
            (2, b"mine", false),
            (2, b"\xff", false),
        ] {
            let mut bytes = vec![0; 4096];
            bytes[..8].copy_from_slice(b"LUKS\xba\xbe\0\0");
            bytes[7] = version;
            bytes[168..168 + text.len()].copy_from_slice(text);
            let name = name(Bytes(&bytes)).map(|name| name.to_string());
            let expected = "luks.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9";
            assert_eq!(name.as_deref(), is_named.then_some(expected), "{version}");
        }
    }
}
