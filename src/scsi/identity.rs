//! Who a logical unit says it is, asked of the unit itself.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Wwid;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, sg, worker};

const UNIT_SERIAL_NUMBER: u8 = 0x80;
const DEVICE_IDENTIFICATION: u8 = 0x83;

/// The names of a logical unit, read live.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Identity {
    /// Every name of the unit itself in VPD page 83h, the strongest first:
    /// NAA, EUI-64, SCSI name string, T10 vendor identification.
    pub names: Vec<Wwid>,
    /// The unit serial number of VPD page 80h: unique for one vendor's product
    /// at best, so it is shown and not compared.
    pub serial: Option<String>,
}

impl Identity {
    /// The strongest name.
    #[must_use]
    pub fn wwid(&self) -> Option<&Wwid> {
        self.names.first()
    }

    /// Whether `wwid` is one of the unit's names.
    #[must_use]
    pub fn is(&self, wwid: &Wwid) -> bool {
        self.names.contains(wwid)
    }

    fn parse(page_83: Option<&[u8]>, page_80: Option<&[u8]>) -> Self {
        let mut names: Vec<Wwid> = designators(page_83.unwrap_or_default()).collect();
        names.sort();
        names.dedup();
        let serial = page_80
            .and_then(|page| page.get(4..))
            .map(|text| {
                String::from_utf8_lossy(text)
                    .trim_matches([' ', '\0'])
                    .to_owned()
            })
            .filter(|serial| !serial.is_empty());
        Self { names, serial }
    }
}

/// The names of the logical unit among the designators of page 83h (SPC-5,
/// 7.7.6). What is malformed, or names the port or the target, is passed over.
fn designators(page: &[u8]) -> impl Iterator<Item = Wwid> {
    const LOGICAL_UNIT: u8 = 0;
    let mut rest = page.get(4..).unwrap_or_default();
    std::iter::from_fn(move || {
        let [_, kind, _, length, after @ ..] = rest else {
            return None;
        };
        let (designator, next) = after.split_at_checked(usize::from(*length))?;
        rest = next;
        Some((*kind, designator))
    })
    .filter(|(kind, _)| kind >> 4 & 0x3 == LOGICAL_UNIT)
    .filter_map(|(kind, designator)| match kind & 0x0f {
        1 => Wwid::t10(designator),
        2 => Wwid::eui(designator),
        3 => Wwid::naa(designator),
        8 => Wwid::scsi_name(designator),
        _ => None,
    })
}

/// Reads the identity of the disk with INQUIRY, through a node that is proven
/// to be this life of it.
///
/// # Errors
/// `Vanished` where the node belongs to another life; `NotReady` or `Io` where
/// the unit does not answer; `TimedOut` at stage `identify`.
pub(crate) fn read_identity(
    roots: &Roots,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Identity> {
    let (roots, disk) = (roots.clone(), disk.clone());
    let name = disk.name().to_owned();
    worker::run(
        Stage::Identify,
        &format!("{name} to answer INQUIRY"),
        deadline,
        || "no answer".to_owned(),
        move || {
            let file = disk.open(&roots, false)?;
            let expected = disk.diskseq()?;
            // ENOTTY before 5.15, where sysfs has none either.
            let found = lunbd_sys::block::disk_sequence(&file).ok();
            if found != expected.map(|sequence| sequence.0) {
                let message = "the node belongs to another life of this disk";
                return Err(Error::new(ErrorKind::Vanished, message).with_path(disk.node(&roots)));
            }
            let timeout = || {
                deadline
                    .remaining()
                    .clamp(Duration::from_millis(1), INQUIRY_LIMIT)
            };
            let page_83 = sg::read_vpd(&file, DEVICE_IDENTIFICATION, timeout())?;
            let page_80 = sg::read_vpd(&file, UNIT_SERIAL_NUMBER, timeout())?;
            Ok(Identity::parse(page_83.as_deref(), page_80.as_deref()))
        },
    )
}

/// As long as the kernel's own scan gives an INQUIRY (`scsi_scan.c`,
/// `scsi_inq_timeout`).
const INQUIRY_LIMIT: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;

    /// A page 83h of these designators: (association and type, bytes).
    fn page(designators: &[(u8, &[u8])]) -> Vec<u8> {
        let mut page = vec![0, 0x83, 0, 0];
        for (kind, bytes) in designators {
            page.extend([1, *kind, 0, u8::try_from(bytes.len()).unwrap()]);
            page.extend(*bytes);
        }
        page
    }

    const NAA: &[u8] = &[0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];

    #[test]
    fn all_names_of_the_unit_are_read_and_the_strongest_is_first() {
        let page = page(&[
            (1, b"LIO-ORG disk-a"),
            (3, NAA),
            (8, b"iqn.2003-01.org.x:a\0"),
        ]);
        let identity = Identity::parse(Some(&page), Some(b"\0\x80\0\x04 s1 "));
        let names: Vec<_> = identity.names.iter().map(ToString::to_string).collect();
        assert_eq!(
            names,
            [
                "naa.5000c500a1b2c3d4",
                "iqn.2003-01.org.x:a",
                "t10.LIO-ORG_disk-a"
            ]
        );
        assert_eq!(identity.serial.as_deref(), Some("s1"));
    }

    #[test]
    fn the_name_of_a_target_port_is_no_name_of_the_unit() {
        let identity = Identity::parse(Some(&page(&[(0x13, NAA), (0x23, NAA)])), None);
        assert_eq!(identity, Identity::default());
    }

    #[test]
    fn a_designator_that_runs_past_the_page_is_passed_over() {
        let mut cut = page(&[(3, NAA), (1, b"x vendor")]);
        cut.truncate(cut.len() - 1);
        let identity = Identity::parse(Some(&cut), None);
        assert_eq!(identity.names.len(), 1);
    }

    proptest::proptest! {
        #[test]
        fn no_page_panics(page_83: Vec<u8>, page_80: Vec<u8>) {
            let _ = Identity::parse(Some(&page_83), Some(&page_80));
        }
    }
}
