//! The designators of VPD page 83h (SPC-5, 7.7.6).

use crate::id::Wwid;

/// The code of the device identification page.
pub(super) const PAGE: u8 = 0x83;

/// One designator of the page.
struct Designator<'a> {
    association: u8,
    kind: u8,
    bytes: &'a [u8],
}

/// The names of the logical unit itself, the strongest first and each once. It skips a
/// designator that is malformed, names the port or the target, or groups ports (types 4 to
/// 7 and 9). `product` supplies vendor and product if there is a vendor-specific
/// designator.
///
/// # Errors
/// Those of `product`.
pub(super) fn names<E>(
    page: &[u8],
    product: impl FnOnce() -> Result<String, E>,
) -> Result<Vec<Wwid>, E> {
    const LOGICAL_UNIT: u8 = 0;
    const VENDOR_SPECIFIC: u8 = 0;
    let (vendors, others): (Vec<_>, Vec<_>) = designators(page)
        .filter(|designator| designator.association == LOGICAL_UNIT)
        .partition(|designator| designator.kind == VENDOR_SPECIFIC);
    let mut names: Vec<Wwid> = others
        .iter()
        .filter_map(|Designator { kind, bytes, .. }| match kind {
            1 => Wwid::t10(bytes),
            2 => Wwid::eui(bytes),
            3 => Wwid::naa(bytes),
            8 => Wwid::scsi_name(bytes),
            0xa => Wwid::uuid(bytes),
            _ => None,
        })
        .collect();
    if !vendors.is_empty() {
        let product = product()?;
        let name = |found: &Designator| Wwid::vendor(&product, found.bytes);
        names.extend(vendors.iter().filter_map(name));
    }
    names.sort();
    names.dedup();
    Ok(names)
}

/// The target port that answered, as page 83h names it.
#[derive(Debug, Default)]
pub(super) struct TargetPort {
    /// The number of its target port group.
    pub(super) group: Option<u16>,
    /// Its relative identifier.
    pub(super) port: Option<u16>,
}

pub(super) fn target_port(page: &[u8]) -> TargetPort {
    const TARGET_PORT: u8 = 1;
    let mut own = TargetPort::default();
    for found in designators(page).filter(|found| found.association == TARGET_PORT) {
        let number = match found.bytes {
            [_, _, high, low] => Some(u16::from_be_bytes([*high, *low])),
            _ => None,
        };
        match found.kind {
            4 => own.port = own.port.or(number),
            5 => own.group = own.group.or(number),
            _ => {}
        }
    }
    own
}

fn designators(page: &[u8]) -> impl Iterator<Item = Designator<'_>> {
    let mut rest = page.get(4..).unwrap_or_default();
    std::iter::from_fn(move || {
        let [_, kind, _, length, after @ ..] = rest else {
            return None;
        };
        let (bytes, next) = after.split_at_checked(usize::from(*length))?;
        rest = next;
        Some(Designator {
            association: kind >> 4 & 0x3,
            kind: kind & 0x0f,
            bytes,
        })
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// A page 83h with these designators: (association and type, bytes).
    fn page(designators: &[(u8, &[u8])]) -> Vec<u8> {
        let mut page = vec![0, PAGE, 0, 0];
        for (kind, bytes) in designators {
            page.extend([1, *kind, 0, u8::try_from(bytes.len()).unwrap()]);
            page.extend(*bytes);
        }
        page
    }

    fn names_on(page: &[u8]) -> Vec<String> {
        let product = || Ok::<_, Infallible>("LIO-ORG disk-a          ".to_owned());
        let Ok(names) = names(page, product);
        names.iter().map(ToString::to_string).collect()
    }

    const NAA: &[u8] = &[0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];

    #[test]
    fn all_names_of_the_unit_are_read_and_the_strongest_is_first() {
        let mut uuid = vec![0x10, 0];
        uuid.extend(0x30..0x40);
        let page = page(&[
            (0, b"lun 7"),
            (1, b"LIO-ORG disk-a"),
            (3, NAA),
            (0x14, &[0, 0, 0, 1]),
            (0xa, &uuid),
            (5, &[0, 0, 0, 1]),
            (2, &[0, 0x25, 0x38, 0x5b, 0x61, 0xb0, 0xa1, 0xb2]),
            (8, b"iqn.2003-01.org.x:a\0"),
            (8, b"naa.5000c500a1b2c3d4\0\0\0\0"),
        ]);
        assert_eq!(
            names_on(&page),
            [
                "naa.5000c500a1b2c3d4",
                "eui.0025385b61b0a1b2",
                "uuid.30313233-3435-3637-3839-3a3b3c3d3e3f",
                "iqn.2003-01.org.x:a",
                "t10.LIO-ORG_disk-a",
                "0LIO-ORG_disk-a_lun_7",
            ]
        );
    }

    #[test]
    fn the_name_of_a_target_port_is_no_name_of_the_unit() {
        let none: [&str; 0] = [];
        assert_eq!(
            names_on(&page(&[(0x13, NAA), (0x23, NAA), (0x10, b"p")])),
            none
        );
    }

    #[test]
    fn a_designator_that_runs_past_the_page_is_passed_over() {
        let mut cut = page(&[(3, NAA), (1, b"x vendor")]);
        cut.truncate(cut.len() - 1);
        assert_eq!(names_on(&cut), ["naa.5000c500a1b2c3d4"]);
    }

    #[test]
    fn the_product_is_asked_for_only_where_a_vendors_own_designator_needs_it() {
        let refuse = || Err(());
        assert!(names(&page(&[(3, NAA), (0x10, b"port")]), refuse).is_ok());
        assert!(names(&page(&[(3, NAA), (0, b"unit")]), refuse).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_page_panics(page: Vec<u8>) {
            let _ = names_on(&page);
        }
    }
}
