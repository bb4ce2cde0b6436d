//! The world-wide name of a logical unit.

mod parse;

use std::fmt::{self, Write as _};

/// An identifier of a logical unit: one designator of VPD page 83h (SPC-5,
/// 7.7.6).
///
/// It prints as the kernel's `wwid` attribute does where the kernel has a
/// spelling for it (`naa.6001405...`), and parses that as well as the spellings
/// of others: `wwn-0x6001405...` and `scsi-36001405...` (udev's by-id),
/// `36001405...` (udev's `ID_SERIAL`, multipath) and `mpath-36001405...` (the
/// map's uuid). Two are equal when they are the same name, however they were
/// spelt.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Wwid(Name);

/// In the order of strength.
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

    /// A UUID as page 83h carries it: a byte that says that it is one, a
    /// reserved one and the sixteen of the UUID.
    #[must_use]
    pub fn uuid(bytes: &[u8]) -> Option<Self> {
        let [0x10, _, uuid @ ..] = bytes else {
            return None;
        };
        uuid.try_into().ok().map(|uuid| Self(Name::Uuid(uuid)))
    }

    /// A T10 vendor identification: the vendor's eight characters and what the
    /// vendor appended, in udev's spelling (see [`Wwid::vendor`]).
    #[must_use]
    pub fn t10(bytes: &[u8]) -> Option<Self> {
        Some(Self(Name::T10(spelt_by_udev(printable(bytes)?)?)))
    }

    /// A vendor-specific designator, which is a name only beside the vendor and
    /// the product of the standard INQUIRY (eight and sixteen characters, blanks
    /// among them), and is not promised to be world-wide unique.
    ///
    /// It is kept as udev's `scsi_id` spells it: runs of blanks become one `_`,
    /// and so does what udev allows in no link.
    #[must_use]
    pub fn vendor(vendor_and_product: &str, designator: &[u8]) -> Option<Self> {
        let text = printable(designator).filter(|text| !text.is_empty())?;
        let joined = spelt_by_udev(&format!("{vendor_and_product}{text}"))?;
        told_from_hex(&joined).then_some(Self(Name::Vendor(joined)))
    }

    /// The unit serial number of page 80h after vendor and product: udev's name
    /// for a unit without a page 83h. Spelt as [`Wwid::vendor`] is.
    #[must_use]
    pub fn serial(vendor_and_product: &str, serial: &[u8]) -> Option<Self> {
        let text = printable(serial).filter(|text| !text.trim().is_empty())?;
        let joined = spelt_by_udev(&format!("{vendor_and_product}{text}"))?;
        told_from_hex(&joined).then_some(Self(Name::Serial(joined)))
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

    /// Whether a registry stands behind the name (NAA, EUI-64, UUID, iSCSI name):
    /// a vendor's text may be the same on every unit that it sells.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        matches!(
            self.0,
            Name::Naa(_) | Name::Eui(_) | Name::Uuid(_) | Name::Iqn(_)
        )
    }

    /// Whether the standard promises that no other unit has this name; of what
    /// a vendor made up it promises nothing.
    #[must_use]
    pub fn is_world_wide(&self) -> bool {
        !matches!(self.0, Name::Vendor(_) | Name::Serial(_))
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

/// As udev puts a text into a link, with runs of `_` counted as one; `None`
/// where nothing is left.
fn spelt_by_udev(text: &str) -> Option<String> {
    // systemd, src/shared/udev-util.c, allow_listed_char_for_devnode.
    let allowed = |c: char| c.is_ascii_alphanumeric() || "#+-.:=@".contains(c);
    let joined = text
        .split(|c| !allowed(c))
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("_");
    (!joined.is_empty()).then_some(joined)
}

/// Whether a text cannot be taken for bare hexadecimal digits, which may be
/// anything's.
fn told_from_hex(text: &str) -> bool {
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
