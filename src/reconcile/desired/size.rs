//! Parses sizes: bytes, or a number with a binary unit.

use std::fmt;

use serde::de::{Deserializer, Error, Unexpected, Visitor};

const UNITS: [(&str, u32); 5] = [
    ("KiB", 10),
    ("MiB", 20),
    ("GiB", 30),
    ("TiB", 40),
    ("PiB", 50),
];

/// Parses a size such as `17179869184`, `"16GiB"` or `"16 GiB"`.
pub(super) fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    deserializer.deserialize_any(Size).map(Some)
}

struct Size;

impl Visitor<'_> for Size {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes, or a whole number of KiB, MiB, GiB, TiB or PiB such as \"16GiB\"")
    }

    fn visit_u64<E: Error>(self, bytes: u64) -> Result<u64, E> {
        Ok(bytes)
    }

    fn visit_i64<E: Error>(self, bytes: i64) -> Result<u64, E> {
        u64::try_from(bytes).map_err(|_| E::invalid_value(Unexpected::Signed(bytes), &self))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
        parse(text).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

fn parse(text: &str) -> Option<u64> {
    let with_unit = UNITS.iter().find_map(|(unit, bits)| {
        let number = text.strip_suffix(unit)?.trim_end();
        Some((number, *bits))
    });
    let (number, bits) = with_unit.unwrap_or((text, 0));
    // The parser of `u64` would accept a sign too.
    let is_plain = number.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = is_plain.then(|| number.parse().ok())??;
    number.checked_mul(1 << bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_a_binary_unit_or_none() {
        assert_eq!(parse("17179869184"), Some(16 << 30));
        for text in ["16GiB", "16 GiB", "16384MiB"] {
            assert_eq!(parse(text), Some(16 << 30), "{text}");
        }
        assert_eq!(parse("2PiB"), Some(2 << 50));
        for text in [
            "", "GiB", "16GB", "16G", "+16GiB", "-1", "1.5GiB", "16384PiB",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
