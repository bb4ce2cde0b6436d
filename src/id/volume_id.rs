//! The caller's name for a volume.

use std::fmt;
use std::str::FromStr;

use super::text::ParseIdError;

/// The longest id in bytes; CSI allows 128 and Kubernetes 253.
const LONGEST: usize = 253;

/// The caller's own name for a volume: 1 to 253 bytes of printable text. No part of it has
/// a meaning, not even `..`, `/dev/sda` or the form of another kind of id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(String);

impl VolumeId {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether `c` is a control character, a line separator or a change of direction, with
/// which a line displays as something else than it is.
fn is_deceptive_char(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{feff}')
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for VolumeId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        if (1..=LONGEST).contains(&text.len()) && !text.contains(is_deceptive_char) {
            return Ok(Self(text.to_owned()));
        }
        let expected = "1 to 253 bytes of printable text";
        Err(ParseIdError::new("a volume's id", expected, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_printable_text_is_an_id_and_what_misleads_a_reader_is_none() {
        for text in ["a", "..", "/dev/sda", "naa.5000c500a1b2c3d4", "b\u{e4}nd 1"] {
            assert_eq!(text.parse::<VolumeId>().unwrap().as_str(), text);
        }
        assert!("x".repeat(253).parse::<VolumeId>().is_ok());
        let long = "\u{e4}".repeat(127);
        for text in ["", "a\nb", "a\0", "\u{1b}[2J", "a\u{202e}b", &long] {
            assert!(text.parse::<VolumeId>().is_err(), "{text:?}");
        }
    }
}
