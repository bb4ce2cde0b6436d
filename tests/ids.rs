//! Every id parses what it prints, and prints the same again.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

use lunbd::Source;
use lunbd::id::{
    DevNo, DiskSeq, FcUri, Hctl, HostNo, Iqn, IscsiUri, Lun, Portal, SessionId, Wwid, Wwpn,
};
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
        (any::<[u8; 16]>()).prop_map(|uuid| {
            let designator = [&[0x10, 0], &uuid[..]].concat();
            Wwid::uuid(&designator).unwrap()
        }),
        "[ -~]{1,40}".prop_filter_map("hex", |text| Wwid::vendor("V       p", text.as_bytes())),
        "[ -~]{1,40}".prop_filter_map("hex", |text| Wwid::serial("abcdef01", text.as_bytes())),
        "iqn\\.[a-z0-9.:-]{1,40}".prop_map(|text| Wwid::scsi_name(text.as_bytes()).unwrap()),
    ]
}

fn iqns() -> impl Strategy<Value = Iqn> {
    prop_oneof![
        "iqn\\.[0-9]{4}-(0[1-9]|1[0-2])\\.[A-Za-z0-9.-]{1,20}(:[A-Za-z0-9.:-]{0,150})?",
        "(eui|naa)\\.[0-9A-Fa-f]{16}",
        "naa\\.[0-9a-f]{32}",
    ]
    .prop_map(|text| text.parse().unwrap())
}

fn portals() -> impl Strategy<Value = Portal> {
    let host = prop_oneof![
        "[a-zA-Z][a-z0-9_-]{0,9}(\\.[a-z][a-z0-9]{0,5})?\\.?",
        any::<std::net::IpAddr>().prop_map(|address| address.to_string()),
    ];
    (host, any::<Option<u16>>()).prop_filter_map("port 0", |(host, port)| Portal::new(&host, port))
}

fn sources_by_transport() -> impl Strategy<Value = Source> {
    let iscsi = (prop::collection::vec(portals(), 1..5), iqns(), luns())
        .prop_map(|(portals, iqn, lun)| IscsiUri::new(portals, iqn, lun).unwrap().into());
    let fc = (
        prop::collection::vec(any::<u64>().prop_map(Wwpn), 1..5),
        luns(),
    )
        .prop_map(|(ports, lun)| FcUri::new(ports, lun).unwrap().into());
    prop_oneof![iscsi, fc]
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
    fn names_of_transports_come_back_from_their_text(
        iqn in iqns(), portal in portals(), port: u64, session: u32
    ) {
        prop_assert!(comes_back(&iqn), "{}", iqn);
        prop_assert!(comes_back(&portal), "{}", portal);
        prop_assert!(comes_back(&Wwpn(port)));
        prop_assert!(comes_back(&SessionId(session)));
        let name = port.to_be_bytes().map(|byte| format!("{byte:02X}"));
        for spelling in [name.concat(), name.join(":")] {
            prop_assert_eq!(spelling.parse(), Ok(Wwpn(port)));
        }
    }

    #[test]
    fn a_source_by_transport_comes_back_from_its_text(source in sources_by_transport()) {
        prop_assert!(comes_back(&source), "{}", source);
        let (scheme, rest) = source.to_string().split_once(':').map(|(scheme, rest)| {
            (scheme.to_uppercase(), rest.to_owned())
        }).unwrap();
        prop_assert_eq!(format!("{scheme}:{rest}").parse(), Ok(source));
    }
}
