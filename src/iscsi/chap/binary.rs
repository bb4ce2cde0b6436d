//! Bytes in text (RFC 7143, 6.1): `0x` and hex digits, or `0b` and Base64.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::error::Result;
use crate::iscsi::text::Pair;

/// Decodes the bytes of a value.
///
/// # Errors
/// `Protocol` if the value is neither hex nor Base64, or does not have 1 to `longest`
/// bytes.
pub fn decode_binary(pair: &Pair<'_>, longest: usize) -> Result<Vec<u8>> {
    let text = pair.value.as_bytes();
    // A text longer than the hex of `longest` bytes is not decoded.
    let bytes = match text.split_at_checked(2) {
        _ if text.len() > 2 + 2 * longest => None,
        Some((b"0x" | b"0X", digits)) => hex(digits),
        Some((b"0b" | b"0B", encoded)) => STANDARD.decode(encoded).ok(),
        _ => None,
    };
    bytes
        .filter(|bytes| (1..=longest).contains(&bytes.len()))
        .ok_or_else(|| {
            let expected = format!("0x and hex, or 0b and Base64, of 1 to {longest} bytes");
            pair.violation(&expected)
        })
}

fn hex(digits: &[u8]) -> Option<Vec<u8>> {
    let (pairs, rest) = digits.as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let bytes = pairs.iter().map(|[high, low]| {
        let byte = digit(*high)? << 4 | digit(*low)?;
        u8::try_from(byte).ok()
    });
    rest.is_empty().then(|| bytes.collect()).flatten()
}

/// Encodes the bytes as hex, which every target reads.
#[must_use]
pub fn encode_binary(bytes: &[u8]) -> String {
    bytes.iter().fold("0x".to_owned(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn decode(value: &str) -> Result<Vec<u8>> {
        let key = "CHAP_C";
        decode_binary(&Pair { key, value }, 4)
    }

    #[test]
    fn hex_and_base64_are_both_read() {
        assert_eq!(decode("0x00fF10").unwrap(), [0, 255, 16]);
        assert_eq!(decode("0X01").unwrap(), [1]);
        assert_eq!(decode("0bAP8Q").unwrap(), [0, 255, 16]);
        assert_eq!(decode("0BAQ==").unwrap(), [1]);
    }

    #[test]
    fn other_spellings_and_lengths_are_refused() {
        for value in [
            "",
            "0",
            "0x",
            "0b",
            "00",
            "abcd",
            "0x0",
            "0x0g",
            "0x+1",
            "0xé",
            "0b!",
            "0bAQ",
            "0bA===",
            "0x0102030405",
            "0bAQIDBAU=",
        ] {
            let error = decode(value).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{value}");
            assert!(error.to_string().contains("CHAP_C"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(bytes in proptest::collection::vec(any::<u8>(), 1..=4)) {
            prop_assert_eq!(decode(&encode_binary(&bytes)).unwrap(), bytes.clone());
            let base64 = format!("0b{}", STANDARD.encode(&bytes));
            prop_assert_eq!(decode(&base64).unwrap(), bytes);
        }
    }
}
