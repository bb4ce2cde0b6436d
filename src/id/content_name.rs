//! The names that the first blocks of a volume give its content.

use std::fmt;
use std::str::FromStr;

use super::Wwid;
use super::text::ParseIdError;

/// A name that the content of a volume carries in its first blocks, printed and parsed as
/// `gpt.GUID`, `mbr.SIGNATURE`, `luks.UUID`, `lvm.UUID`, `fs.UUID` or `btrfs.UUID`. The last is
/// the UUID of one device of a btrfs; the UUID of the file system is the same on all of them.
///
/// It belongs to the content and not to the volume: a copy of an image has the names of the
/// image, and formatting the volume gives it another name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentName(Name);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Name {
    Gpt([u8; 16]),
    Mbr(u32),
    Luks([u8; 16]),
    Lvm(String),
    FileSystem([u8; 16]),
    BtrfsDevice([u8; 16]),
}

/// The length of each group of letters in the UUID of LVM.
const LVM_GROUPS: [usize; 7] = [6, 4, 4, 4, 4, 4, 6];

impl ContentName {
    /// The disk GUID of a GPT, in the byte order in which it prints; `None` if it is all
    /// zero.
    pub(crate) fn gpt(guid: [u8; 16]) -> Option<Self> {
        is_given(guid).map(|guid| Self(Name::Gpt(guid)))
    }

    /// The disk signature of an MBR; `None` for zero, which means no signature.
    pub(crate) fn mbr(signature: u32) -> Option<Self> {
        (signature != 0).then_some(Self(Name::Mbr(signature)))
    }

    /// The UUID of a LUKS header, as text; `None` if the text is no UUID.
    pub(crate) fn luks(text: &str) -> Option<Self> {
        uuid(text).map(|uuid| Self(Name::Luks(uuid)))
    }

    /// The UUID of an LVM physical volume, with or without hyphens; `None` if the text is
    /// no such UUID.
    pub(crate) fn lvm(text: &str) -> Option<Self> {
        let letters: String = text.chars().filter(|letter| *letter != '-').collect();
        let is_whole = letters.len() == 32 && letters.chars().all(|c| c.is_ascii_alphanumeric());
        is_whole.then_some(Self(Name::Lvm(letters)))
    }

    /// Whether the name is in a header that the devices stacked on the volume do not
    /// expose.
    pub(crate) fn is_hidden_by_stacked_device(&self) -> bool {
        matches!(self.0, Name::Luks(_) | Name::Lvm(_))
    }

    /// The UUID of a file system; `None` if it is all zero.
    pub(crate) fn file_system(uuid: [u8; 16]) -> Option<Self> {
        is_given(uuid).map(|uuid| Self(Name::FileSystem(uuid)))
    }

    /// The UUID of one device of a btrfs; `None` if it is all zero.
    pub(crate) fn btrfs_device(uuid: [u8; 16]) -> Option<Self> {
        is_given(uuid).map(|uuid| Self(Name::BtrfsDevice(uuid)))
    }

    pub(crate) fn is_btrfs_device(&self) -> bool {
        matches!(self.0, Name::BtrfsDevice(_))
    }
}

fn is_given(uuid: [u8; 16]) -> Option<[u8; 16]> {
    (uuid != [0; 16]).then_some(uuid)
}

/// `None` if the text is no UUID or is all zero.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let groups: Vec<&str> = text.split('-').collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    if lengths != [8, 4, 4, 4, 12] || !text.is_ascii() {
        return None;
    }
    let mut uuid = [0; 16];
    let digits = groups.concat();
    for (byte, pair) in uuid.iter_mut().zip(digits.as_bytes().chunks(2)) {
        // `from_str_radix` also accepts a sign.
        let pair = std::str::from_utf8(pair).ok();
        let pair = pair.filter(|pair| pair.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    is_given(uuid)
}

impl fmt::Display for ContentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Name::Gpt(guid) => write!(f, "gpt.{}", Hyphened(*guid)),
            Name::Mbr(signature) => write!(f, "mbr.{signature:08x}"),
            Name::Luks(uuid) => write!(f, "luks.{}", Hyphened(*uuid)),
            Name::Lvm(letters) => {
                f.write_str("lvm")?;
                let mut rest = letters.as_str();
                for (place, length) in LVM_GROUPS.into_iter().enumerate() {
                    let (group, more) = rest.split_at_checked(length).unwrap_or((rest, ""));
                    let before = if place == 0 { '.' } else { '-' };
                    write!(f, "{before}{group}")?;
                    rest = more;
                }
                Ok(())
            }
            Name::FileSystem(uuid) => write!(f, "fs.{}", Hyphened(*uuid)),
            Name::BtrfsDevice(uuid) => write!(f, "btrfs.{}", Hyphened(*uuid)),
        }
    }
}

struct Hyphened([u8; 16]);

impl fmt::Display for Hyphened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, byte) in self.0.iter().enumerate() {
            let hyphen = if matches!(place, 4 | 6 | 8 | 10) {
                "-"
            } else {
                ""
            };
            write!(f, "{hyphen}{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for ContentName {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let parse = || {
            let (kind, name) = text.split_once('.')?;
            match kind {
                "gpt" => Self::gpt(uuid(name)?),
                "mbr" if name.len() == 8 && name.bytes().all(|c| c.is_ascii_hexdigit()) => {
                    Self::mbr(u32::from_str_radix(name, 16).ok()?)
                }
                "luks" => Self::luks(name),
                "lvm" => Self::lvm(name),
                "fs" => Self::file_system(uuid(name)?),
                "btrfs" => Self::btrfs_device(uuid(name)?),
                _ => None,
            }
        };
        parse().ok_or_else(|| {
            ParseIdError::new(
                "a name of a volume's content",
                "gpt.GUID, mbr.SIGNATURE (8 hexadecimal digits), luks.UUID, lvm.UUID, fs.UUID or \
                 btrfs.UUID",
                text,
            )
        })
    }
}

/// The name that a caller expects at an attach: the name of a SCSI unit, or of the content
/// of an NBD volume.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// For `AttachRequest::expect`.
    Unit(Wwid),
    /// For `NbdOptions::expect`.
    Content(ContentName),
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unit(name) => name.fmt(f),
            Self::Content(name) => name.fmt(f),
        }
    }
}

impl FromStr for Expected {
    type Err = ParseIdError;

    /// The prefix of the name decides which of the two it is.
    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        match text.split_once('.') {
            Some(("gpt" | "mbr" | "luks" | "lvm" | "fs" | "btrfs", _)) => {
                text.parse().map(Self::Content)
            }
            _ => text.parse().map(Self::Unit),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9";

    #[test]
    fn a_content_name_prints_as_it_parses_and_hexadecimal_digits_have_no_case() {
        for text in [
            &format!("gpt.{UUID}"),
            "mbr.0a1b2c3d",
            &format!("luks.{UUID}"),
            "lvm.AbcDef-0123-4567-89Ab-cdEF-ghIJ-klMNop",
            &format!("fs.{UUID}"),
            &format!("btrfs.{UUID}"),
        ] {
            let name: ContentName = text.parse().unwrap();
            assert_eq!(name.to_string(), *text);
        }
        let parsed = |text: &str| text.parse::<ContentName>().unwrap();
        let upper = format!("fs.{}", UUID.to_uppercase());
        assert_eq!(parsed(&upper), parsed(&format!("fs.{UUID}")));
        assert_ne!(
            parsed("lvm.AbcDef-0123-4567-89Ab-cdEF-ghIJ-klMNop"),
            parsed("lvm.abcdef-0123-4567-89ab-cdef-ghij-klmnop")
        );
    }

    #[test]
    fn what_names_nothing_is_no_content_name() {
        for text in [
            "",
            "fs",
            "fs.",
            UUID,
            "fs.00000000-0000-0000-0000-000000000000",
            "fs.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f",
            "fs.+a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9",
            "mbr.00000000",
            "mbr.+a1b2c3d",
            "mbr.1a2b3c",
            "lvm.AbcDef",
            "ext4.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9",
        ] {
            assert!(text.parse::<ContentName>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn what_is_expected_is_a_unit_or_a_content_by_what_its_name_begins_with() {
        for kind in ["gpt", "btrfs"] {
            let content = format!("{kind}.{UUID}");
            let expected: Expected = content.parse().unwrap();
            assert_eq!(expected, Expected::Content(content.parse().unwrap()));
        }
        let unit = "naa.60014051234567890abcdef012345678";
        assert_eq!(
            unit.parse(),
            Ok(Expected::Unit(unit.parse().unwrap())),
            "{unit}"
        );
        let wrong = "fs.1".parse::<Expected>().unwrap_err().to_string();
        assert!(wrong.contains("fs.UUID"), "{wrong}");
    }
}
