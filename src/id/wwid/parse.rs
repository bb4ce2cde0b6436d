//! Parses the spellings of a world-wide name. The prefix says what a text means; bare
//! digits are no name.

use std::str::FromStr;

use super::{Name, Wwid, hex_bytes, is_not_bare_hex, printable, udev_spelling};
use crate::id::ParseIdError;

/// The prefixes before a name in udev's spelling: in the uuid of a multipath map, and in
/// the links to a map and to a disk.
const UDEV_PREFIXES: [&str; 3] = ["dm-uuid-mpath-", "mpath-", "scsi-"];

impl FromStr for Wwid {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        parse(text).ok_or_else(|| {
            ParseIdError::new(
                "a world-wide name",
                "naa.HEX, eui.HEX, uuid.UUID, t10.TEXT, iqn.TEXT, wwn-0xHEX, or udev's 3HEX, 2HEX, 1TEXT, 0TEXT, 8NAME, STEXT",
                text,
            )
        })
    }
}

fn parse(text: &str) -> Option<Wwid> {
    if let Some(hex) = text.strip_prefix("wwn-0x") {
        return Wwid::naa(&hex_bytes(hex)?);
    }
    let prefixed = UDEV_PREFIXES
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix));
    if let Some(name) = prefixed {
        // udev's `ID_WWN_WITH_EXTENSION` may name a map.
        let wwn = name.strip_prefix("0x").and_then(hex_bytes);
        return wwn
            .and_then(|bytes| Wwid::naa(&bytes))
            .or_else(|| by_udev(name));
    }
    if let Some(vendor) = text.strip_prefix("t10.") {
        return Wwid::t10(vendor.as_bytes());
    }
    if let Some(uuid) = text.strip_prefix("uuid.") {
        return uuid_of(uuid);
    }
    Wwid::scsi_name(text.as_bytes()).or_else(|| by_udev(text))
}

/// udev's `scsi_id`, the rules of sg3-utils and multipath put the designator's type before
/// the name.
fn by_udev(text: &str) -> Option<Wwid> {
    let (kind, name) = text.split_at_checked(1)?;
    let words = || {
        let text = udev_spelling(printable(name.as_bytes())?)?;
        is_not_bare_hex(&text).then_some(text)
    };
    match kind {
        "3" => Wwid::naa(&hex_bytes(name)?),
        "2" => Wwid::eui(&hex_bytes(name)?),
        "1" => words().map(|text| Wwid(Name::T10(text))),
        "0" => words().map(|text| Wwid(Name::Vendor(text))),
        "S" => words().map(|text| Wwid(Name::Serial(text))),
        "8" => Wwid::scsi_name(name.as_bytes()),
        _ => None,
    }
}

fn uuid_of(text: &str) -> Option<Wwid> {
    let groups: Vec<&str> = text.split('-').collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    if lengths != [8, 4, 4, 4, 12] {
        return None;
    }
    let bytes = hex_bytes(&groups.concat())?;
    bytes.try_into().ok().map(|uuid| Wwid(Name::Uuid(uuid)))
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
            "8naa.60014051234567890ABCDEF012345678",
            "wwn-0x60014051234567890abcdef012345678",
            "360014051234567890abcdef012345678",
            "mpath-360014051234567890abcdef012345678",
            "mpath-0x60014051234567890abcdef012345678",
            "scsi-360014051234567890abcdef012345678",
            "dm-uuid-mpath-360014051234567890abcdef012345678",
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
            "t10.  ",
            "0025385b61b0a1b2",
            "1025385b61b0a1b2",
            "S0025385",
            "8naa",
            "mpath-",
            "mpath-naa.5000c500a1b2c3d4",
            "uuid.0123",
            "uuid.01234567-89ab-cdef-0123-456789abcdefg",
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

    #[test]
    fn an_eui_name_of_sixteen_bytes_is_no_naa_name() {
        let name = wwid("eui.60014051234567890abcdef012345678");
        assert_eq!(wwid("260014051234567890abcdef012345678"), name);
        assert_eq!(wwid("8eui.60014051234567890abcdef012345678"), name);
        assert_ne!(wwid("naa.60014051234567890abcdef012345678"), name);
        assert_eq!(wwid("20025385b61b0a1b2"), wwid("eui.0025385b61b0a1b2"));
    }

    #[test]
    fn udev_and_multipath_spell_a_text_with_its_type_in_front() {
        let t10 = Wwid::t10(b"ATA     SAMSUNG MZ7LN/256 S2YK").unwrap();
        for spelling in [
            "1ATA_SAMSUNG_MZ7LN_256_S2YK",
            "mpath-1ATA_SAMSUNG_MZ7LN_256_S2YK",
            "scsi-1ATA_SAMSUNG_MZ7LN_256_S2YK",
            "1ATA     SAMSUNG MZ7LN/256 S2YK",
        ] {
            assert_eq!(wwid(spelling), t10, "{spelling}");
        }
        assert_eq!(
            wwid("8iqn.2003-01.org.x:a"),
            Wwid::scsi_name(b"iqn.2003-01.org.x:a\0").unwrap()
        );
        let product = "LIO-ORG disk-a          ";
        assert_eq!(
            wwid("0LIO-ORG_disk-a_lun 7"),
            Wwid::vendor(product, b"lun 7").unwrap()
        );
        let serial = Wwid::serial(product, b"7f\0").unwrap();
        assert_eq!(wwid("SLIO-ORG_disk-a_7f"), serial);
        assert_eq!(serial.to_string(), "SLIO-ORG_disk-a_7f");
        assert_ne!(wwid("0LIO-ORG_disk-a_7f"), serial);
        assert_eq!(Wwid::vendor(product, b"\0\0"), None);
        assert_eq!(Wwid::serial(product, b"   "), None);
    }

    #[test]
    fn a_uuid_comes_back_from_its_text() {
        let mut designator = vec![0x10, 0];
        designator.extend(0x30..0x40);
        let name = Wwid::uuid(&designator).unwrap();
        assert_eq!(
            name.to_string(),
            "uuid.30313233-3435-3637-3839-3a3b3c3d3e3f"
        );
        assert_eq!(wwid(&name.to_string()), name);
        assert_eq!(Wwid::uuid(&designator[1..]), None);
    }

    #[test]
    fn names_that_an_authority_hands_out_are_unique_and_come_first() {
        let unique = [
            "naa.2123000c50000001",
            "naa.5000c500a1b2c3d4",
            "naa.60014051234567890abcdef012345678",
            "eui.0025385b61b0a1b2",
            "eui.00000000000000000025385b61b0a1b2",
            "uuid.30313233-3435-3637-3839-3a3b3c3d3e3f",
            "iqn.2003-01.org.x:a",
        ];
        let local = [
            "naa.2fff000000abcdef",
            "naa.3000000100000001",
            "naa.5000000a1b2c3d4e",
            "naa.60000000000000000e00000000010001",
            "naa.6ffffff0000000000e00000000010001",
            "eui.0000005b61b0a1b2",
            "uuid.00000000-0000-0000-0000-000000000000",
            "t10.ATA x",
            "0ATA_x",
            "SATA_x",
        ];
        let local = local.map(wwid);
        for name in unique.map(wwid) {
            assert!(name.is_unique(), "{name}");
            assert!(local.iter().all(|other| name < *other), "{name}");
        }
        for name in local {
            assert!(!name.is_unique(), "{name}");
        }
    }
}
