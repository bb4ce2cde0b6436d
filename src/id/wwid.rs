//! The world-wide name of a logical unit.

mod parse;

use std::cmp::Ordering;
use std::fmt::{self, Write as _};

use super::backend::fnv1a;

/// An identifier of a logical unit: one designator of VPD page 83h (SPC-5, 7.7.6).
///
/// It prints as the kernel's `wwid` attribute does if the kernel has a spelling for it
/// (`naa.6001405...`). It also parses other spellings: `wwn-0x6001405...` and
/// `scsi-36001405...` (udev's by-id), `36001405...` (udev's `ID_SERIAL`, multipath) and
/// `mpath-36001405...` (the map's uuid). Two spellings of one name are equal.
/// [Unique](Self::is_unique) names sort first.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Wwid(Name);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Name {
    Naa(Vec<u8>),
    Eui(Vec<u8>),
    Uuid([u8; 16]),
    Iqn(String),
    T10(String),
    Vendor(String),
    Serial(String),
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

    /// A UUID as page 83h carries it: a byte that marks a UUID, a reserved byte and the
    /// sixteen bytes of the UUID.
    #[must_use]
    pub fn uuid(bytes: &[u8]) -> Option<Self> {
        let [0x10, _, uuid @ ..] = bytes else {
            return None;
        };
        uuid.try_into().ok().map(|uuid| Self(Name::Uuid(uuid)))
    }

    /// A T10 vendor identification: the vendor's eight characters and the vendor's suffix,
    /// in udev's spelling (see [`Wwid::vendor`]).
    #[must_use]
    pub fn t10(bytes: &[u8]) -> Option<Self> {
        Some(Self(Name::T10(udev_spelling(printable(bytes)?)?)))
    }

    /// A vendor-specific designator. It is a name only together with the vendor and the
    /// product of the standard INQUIRY (eight and sixteen characters with their blanks). No
    /// standard promises that it is world-wide unique.
    ///
    /// It is spelt as udev's `scsi_id` spells it: a run of blanks, or of characters that
    /// udev allows in no link, becomes one `_`.
    #[must_use]
    pub fn vendor(vendor_and_product: &str, designator: &[u8]) -> Option<Self> {
        let text = printable(designator).filter(|text| !text.is_empty())?;
        let joined = udev_spelling(&format!("{vendor_and_product}{text}"))?;
        is_not_bare_hex(&joined).then_some(Self(Name::Vendor(joined)))
    }

    /// The unit serial number of page 80h after vendor and product. udev uses it as the
    /// name of a unit without page 83h. It is spelt as [`Wwid::vendor`] is.
    #[must_use]
    pub fn serial(vendor_and_product: &str, serial: &[u8]) -> Option<Self> {
        let text = printable(serial).filter(|text| !text.trim().is_empty())?;
        let joined = udev_spelling(&format!("{vendor_and_product}{text}"))?;
        is_not_bare_hex(&joined).then_some(Self(Name::Serial(joined)))
    }

    /// A SCSI name string, which begins with `iqn.`, `naa.` or `eui.`.
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

    /// A number that stands for the name in a file's name, where the text may be too long.
    pub(crate) fn digest(&self) -> u64 {
        fnv1a(&self.to_string())
    }

    /// Whether a standard promises that no other unit in the world has this name. The table
    /// at `scsi::Comparison` lists these names.
    #[must_use]
    pub fn is_unique(&self) -> bool {
        match &self.0 {
            Name::Naa(bytes) => match self.kind() {
                NameKind::Naa(2) => {
                    let company = bytes.get(2..5);
                    is_assigned(company) && company != Some(&COMPANY_OF_SPDK[..])
                }
                NameKind::Naa(5 | 6) => is_assigned_after_a_digit(bytes),
                _ => false,
            },
            Name::Eui(bytes) => {
                // An EUI-64 of 16 bytes has an extension before the company id.
                let company = if bytes.len() == 16 { 8..11 } else { 0..3 };
                is_assigned(bytes.get(company))
            }
            Name::Uuid(uuid) => *uuid != [0; 16] && *uuid != [0xff; 16],
            Name::Iqn(_) => true,
            Name::T10(_) | Name::Vendor(_) | Name::Serial(_) => false,
        }
    }

    /// Whether the vendor made the name up, or udev built it from the serial number. Such a
    /// name may differ between the paths to one unit.
    pub(crate) fn is_vendor_defined(&self) -> bool {
        matches!(self.kind(), NameKind::Vendor | NameKind::Serial)
    }

    /// The kind of the designator.
    pub(crate) fn kind(&self) -> NameKind {
        match &self.0 {
            Name::Naa(bytes) => NameKind::Naa(bytes.first().map_or(0, |first| first >> 4)),
            Name::Eui(_) => NameKind::Eui,
            Name::Uuid(_) => NameKind::Uuid,
            Name::Iqn(_) => NameKind::Iqn,
            Name::T10(_) => NameKind::T10,
            Name::Vendor(_) => NameKind::Vendor,
            Name::Serial(_) => NameKind::Serial,
        }
    }
}

/// The kinds of names, as [`Wwid::kind`] tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NameKind {
    /// The NAA format, which is the name's first four bits.
    Naa(u8),
    Eui,
    Uuid,
    Iqn,
    T10,
    Vendor,
    Serial,
}

impl Ord for Wwid {
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |name: &Self| !name.is_unique();
        key(self)
            .cmp(&key(other))
            .then_with(|| self.0.cmp(&other.0))
    }
}

impl PartialOrd for Wwid {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Intel's company id. SPDK puts it into the NAA 2 name that it makes from parts of a
/// bdev's name, so two bdevs of one target may get the same name (`lib/scsi/scsi_bdev.c`,
/// `bdev_scsi_set_naa_ieee_extended`).
const COMPANY_OF_SPDK: [u8; 3] = [0x00, 0x03, 0x47];

/// Whether the IEEE can have assigned this company id: it assigns neither all zeros nor
/// all ones.
fn is_assigned(company: Option<&[u8]>) -> bool {
    company.is_some_and(|id| id != [0; 3] && id != [0xff; 3])
}

/// The same for NAA 5 and 6, where the company id begins after the first four bits.
fn is_assigned_after_a_digit(bytes: &[u8]) -> bool {
    let &[first, second, third, fourth, ..] = bytes else {
        return false;
    };
    let id = u32::from_be_bytes([first, second, third, fourth]) >> 4 & 0x00ff_ffff;
    let [_, id @ ..] = id.to_be_bytes();
    is_assigned(Some(&id))
}

/// The text before the padding; `None` if it holds anything but printable ASCII.
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

/// Spells the text as udev does in a link, but with each run of `_` as one; `None` if
/// nothing is left.
fn udev_spelling(text: &str) -> Option<String> {
    // systemd, src/shared/udev-util.c, allow_listed_char_for_devnode.
    let allowed = |c: char| c.is_ascii_alphanumeric() || "#+-.:=@".contains(c);
    let joined = text
        .split(|c| !allowed(c))
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("_");
    (!joined.is_empty()).then_some(joined)
}

/// Whether the text differs from bare hexadecimal digits, which could be any kind of name.
fn is_not_bare_hex(text: &str) -> bool {
    !text.chars().all(|c| c.is_ascii_hexdigit())
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
        let hex = |bytes: &[u8]| {
            bytes.iter().fold(String::new(), |mut hex, byte| {
                let _ = write!(hex, "{byte:02x}");
                hex
            })
        };
        match &self.0 {
            Name::Naa(bytes) => write!(f, "naa.{}", hex(bytes)),
            Name::Eui(bytes) => write!(f, "eui.{}", hex(bytes)),
            Name::Uuid(bytes) => {
                let ends = [0, 4, 6, 8, 10, 16];
                let groups = ends.iter().zip(&ends[1..]);
                let parts: Vec<String> = groups
                    .filter_map(|(from, to)| bytes.get(*from..*to).map(hex))
                    .collect();
                let parts = parts.join("-");
                write!(f, "uuid.{parts}")
            }
            Name::Iqn(text) => f.write_str(text),
            Name::T10(text) => write!(f, "t10.{text}"),
            Name::Vendor(text) => write!(f, "0{text}"),
            Name::Serial(text) => write!(f, "S{text}"),
        }
    }
}
