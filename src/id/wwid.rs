//! The world-wide name of a logical unit.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use super::ParseIdError;

/// A world-wide unique identifier of a logical unit: one designator of VPD
/// page 83h (SPC-5, 7.7.6).
///
/// It prints as the kernel's `wwid` attribute does (`naa.6001405...`), and
/// parses that as well as the spellings of others: `wwn-0x6001405...` (udev's
/// by-id), `36001405...` (udev's `ID_SERIAL`, multipath) and `mpath-36001405...`
/// (the map's uuid). Two are equal when they are the same name, however
/// they were spelt.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Wwid(Name);

/// In the order of strength.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Name {
    Naa(Vec<u8>),
    Eui(Vec<u8>),
    Iqn(String),
    T10(String),
}

impl Wwid {
    /// An NAA name of 8 bytes (NAA 2, 3 and 5) or 16 bytes (NAA 6).
    #[must_use]
    pub fn naa(bytes: &[u8]) -> Option<Self> {
        let length = match bytes.first()? >> 4 {
            2 | 3 | 5 => 8,
            6 => 16,
            _ => return None,
        };
        (bytes.len() == length).then(|| Self(Name::Naa(bytes.to_vec())))
    }

    /// An EUI-64 based name of 8, 12 or 16 bytes.
    #[must_use]
    pub fn eui(bytes: &[u8]) -> Option<Self> {
        matches!(bytes.len(), 8 | 12 | 16).then(|| Self(Name::Eui(bytes.to_vec())))
    }

    /// A T10 vendor identification: the vendor's eight characters and what the
    /// vendor appended. Runs of blanks count as one `_`, as udev spells them.
    #[must_use]
    pub fn t10(bytes: &[u8]) -> Option<Self> {
        let text = printable(bytes)?;
        let joined = text
            .split([' ', '_'])
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("_");
        (!joined.is_empty()).then_some(Self(Name::T10(joined)))
    }

    /// A SCSI name string: `iqn.`, `naa.` or `eui.` and what follows.
    #[must_use]
    pub fn scsi_name(bytes: &[u8]) -> Option<Self> {
        let text = printable(bytes)?;
        let lower = text.to_ascii_lowercase();
        match lower.split_once('.')? {
            ("iqn", rest) if !rest.is_empty() => Some(Self(Name::Iqn(lower))),
            ("naa", hex) => Self::naa(&hex_bytes(hex)?),
            ("eui", hex) => Self::eui(&hex_bytes(hex)?),
            _ => None,
        }
    }
}

/// The text up to the padding; `None` if it holds anything but printable ASCII.
fn printable(bytes: &[u8]) -> Option<&str> {
    let end = bytes
        .iter()
        .rposition(|&b| b != 0 && b != b' ')
        .map_or(0, |last| last + 1);
    let text = std::str::from_utf8(bytes.get(..end)?).ok()?;
    text.bytes()
        .all(|b| b.is_ascii_graphic() || b == b' ')
        .then_some(text)
}

fn hex_bytes(hex: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u32>> = hex.chars().map(|c| c.to_digit(16)).collect();
    let digits = digits?;
    let (pairs, []) = digits.as_chunks::<2>() else {
        return None;
    };
    pairs
        .iter()
        .map(|[high, low]| u8::try_from(high << 4 | low).ok())
        .collect()
}

impl fmt::Display for Wwid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (prefix, bytes) = match &self.0 {
            Name::Naa(bytes) => ("naa.", bytes),
            Name::Eui(bytes) => ("eui.", bytes),
            Name::T10(text) => return write!(f, "t10.{text}"),
            Name::Iqn(text) => return f.write_str(text),
        };
        let hex = bytes.iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        });
        write!(f, "{prefix}{hex}")
    }
}

impl FromStr for Wwid {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let parse = || {
            let bare = text.strip_prefix("mpath-").unwrap_or(text);
            if let Some(hex) = bare.strip_prefix("wwn-0x") {
                return Self::naa(&hex_bytes(hex)?);
            }
            if let Some(vendor) = bare.strip_prefix("t10.") {
                return Self::t10(vendor.as_bytes());
            }
            if let Some(name) = Self::scsi_name(bare.as_bytes()) {
                return Some(name);
            }
            // udev's scsi_id puts the designator's type in front.
            match bare.as_bytes().split_first()? {
                (b'3', hex) => Self::naa(&hex_bytes(std::str::from_utf8(hex).ok()?)?),
                (b'2', hex) => Self::eui(&hex_bytes(std::str::from_utf8(hex).ok()?)?),
                _ => None,
            }
        };
        parse().ok_or_else(|| {
            ParseIdError::new(
                "a world-wide name",
                "naa.HEX, eui.HEX, t10.TEXT, iqn.TEXT, wwn-0xHEX, or udev's 3HEX",
                text,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wwid(text: &str) -> Wwid {
        text.parse().unwrap()
    }

    #[test]
    fn every_spelling_of_an_naa_name_is_the_same_name() {
        let name = wwid("naa.60014051234567890abcdef012345678");
        for spelling in [
            "NAA.60014051234567890ABCDEF012345678",
            "wwn-0x60014051234567890abcdef012345678",
            "360014051234567890abcdef012345678",
            "mpath-360014051234567890abcdef012345678",
        ] {
            assert_eq!(wwid(spelling), name, "{spelling}");
        }
        assert_eq!(name.to_string(), "naa.60014051234567890abcdef012345678");
    }

    #[test]
    fn a_bare_hex_string_is_not_guessed_to_be_a_name() {
        for text in [
            "60014051234567890abcdef012345678",
            "sda",
            "",
            "naa.",
            "naa.6001",
            "naa.f0014051234567890abcdef012345678",
            "eui.12",
            "t10.",
        ] {
            assert!(text.parse::<Wwid>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_t10_name_compares_in_udevs_spelling_too() {
        let name = Wwid::t10(b"Linux   scsi_debug      20  \0").unwrap();
        assert_eq!(name.to_string(), "t10.Linux_scsi_debug_20");
        assert_eq!(wwid("t10.Linux   scsi_debug      20"), name);
        assert_eq!(Wwid::t10(b"bad\xff"), None);
    }

    #[test]
    fn a_scsi_name_string_that_holds_an_naa_name_is_that_name() {
        let bytes = b"naa.5000c500a1b2c3d4\0\0\0\0";
        assert_eq!(Wwid::scsi_name(bytes), Some(wwid("naa.5000c500a1b2c3d4")));
    }
}
