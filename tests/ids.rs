//! What prints parses, and says the same again.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

use lunbd::Source;
use lunbd::id::{DevNo, DiskSeq, Hctl, HostNo, Lun, Wwid};
use proptest::prelude::*;

fn comes_back<T>(value: &T) -> bool
where
    T: std::fmt::Display + std::str::FromStr + PartialEq,
{
    value
        .to_string()
        .parse()
        .is_ok_and(|back: T| back == *value)
}

fn luns() -> impl Strategy<Value = Lun> {
    any::<u64>().prop_map(Lun::from_kernel)
}

fn hctls() -> impl Strategy<Value = Hctl> {
    (any::<u32>(), any::<u32>(), any::<u32>(), luns()).prop_map(|(host, channel, target, lun)| {
        Hctl {
            host: HostNo(host),
            channel,
            target,
            lun,
        }
    })
}

fn wwids() -> impl Strategy<Value = Wwid> {
    let sixteen = any::<[u8; 16]>();
    let naa = sixteen.prop_map(|mut bytes| {
        bytes[0] = 0x60 | bytes[0] & 0x0f;
        Wwid::naa(&bytes).unwrap()
    });
    prop_oneof![
        naa,
        any::<[u8; 8]>().prop_map(|bytes| Wwid::eui(&bytes).unwrap()),
        "[!-~][ -~]{0,40}".prop_filter_map("blank", |text| Wwid::t10(text.as_bytes())),
        "iqn\\.[a-z0-9.:-]{1,40}".prop_map(|text| Wwid::scsi_name(text.as_bytes()).unwrap()),
    ]
}

proptest! {
    #[test]
    fn a_lun_comes_back_from_its_text_its_wire_bytes_and_its_levels(lun in luns()) {
        prop_assert!(comes_back(&lun));
        prop_assert_eq!(Lun::from_wire(lun.wire()), lun);
        prop_assert_eq!(Lun::from_levels(lun.levels()), lun);
        let wire = lun.wire().map(|byte| format!("{byte:02x}")).concat();
        prop_assert_eq!(format!("0x{wire}").parse::<Lun>().unwrap(), lun);
    }

    #[test]
    fn a_flat_lun_is_found_by_its_number(number in 0_u16..0x4000) {
        let lun: Lun = format!("flat-{number}").parse().unwrap();
        prop_assert_eq!(Some(lun), Lun::flat(number));
        prop_assert_eq!(lun.kernel(), 0x4000 + u64::from(number));
    }

    #[test]
    fn an_address_comes_back_from_its_text(hctl in hctls()) {
        prop_assert!(comes_back(&hctl));
        prop_assert!(comes_back(&Source::Scsi(hctl)));
        prop_assert!(comes_back(&hctl.host));
    }

    #[test]
    fn a_world_wide_name_comes_back_from_its_text(wwid in wwids()) {
        prop_assert!(comes_back(&wwid), "{}", wwid);
    }

    #[test]
    fn device_numbers_come_back_from_their_text(major: u32, minor: u32, sequence: u64) {
        let number = DevNo { major, minor };
        prop_assert!(comes_back(&number));
        prop_assert!(comes_back(&DiskSeq(sequence)));
    }

    #[test]
    fn no_text_panics_and_what_parses_prints_what_parses(text in ".{0,60}") {
        if let Ok(wwid) = text.parse::<Wwid>() {
            prop_assert!(comes_back(&wwid));
        }
        if let Ok(source) = text.parse::<Source>() {
            prop_assert!(comes_back(&source));
        }
        if let Ok(lun) = text.parse::<Lun>() {
            prop_assert!(comes_back(&lun));
        }
    }
}
