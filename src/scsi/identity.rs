//! The identity that a logical unit reports.

mod compare;

use std::fmt;

use super::designators;
use crate::error::Result;
use crate::id::Wwid;
pub use compare::{Comparison, Contradiction, Strength};

/// The code of the unit serial number page.
const SERIAL: u8 = 0x80;

/// The names of a logical unit. Its JSON has also `weakly_identified`: see
/// [`is_weak`](Self::is_weak).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// Every name of the unit itself in VPD page 83h, the strongest first.
    /// [Unique](Wwid::is_unique) names come before the others. Within each group the order
    /// is NAA, EUI-64, UUID, SCSI name string, T10 vendor identification, vendor-specific.
    /// A unit without a name there has the name that udev makes of vendor, product and
    /// serial number.
    pub names: Vec<Wwid>,
    /// The unit serial number of VPD page 80h. It is unique for one vendor's product at
    /// best, so it is compared if there is no unique name.
    pub serial: Option<String>,
}

/// The source of the pages: the device itself, or the kernel's copies.
pub(super) trait Pages {
    /// A page of vital product data; `None` if there is none.
    fn vpd(&self, code: u8) -> Result<Option<Vec<u8>>>;

    /// Vendor and product of the standard INQUIRY data, padded with blanks.
    fn product(&self) -> Result<String>;
}

impl Identity {
    /// Reads page 83h, page 80h, and the standard data if a name needs it.
    pub(super) fn read(pages: &impl Pages) -> Result<Self> {
        let mut names = Self::of_page_83(pages)?;
        let page_80 = pages.vpd(SERIAL)?.unwrap_or_default();
        let number = page_80.get(4..).unwrap_or_default();
        let serial = String::from_utf8_lossy(number)
            .trim_matches([' ', '\0'])
            .to_owned();
        if names.is_empty() && !serial.is_empty() {
            names.extend(Wwid::serial(&pages.product()?, number));
        }
        let serial = Some(serial).filter(|serial| !serial.is_empty());
        Ok(Self { names, serial })
    }

    /// The names in page 83h, the strongest first.
    pub(super) fn of_page_83(pages: &impl Pages) -> Result<Vec<Wwid>> {
        let page = pages.vpd(designators::PAGE)?.unwrap_or_default();
        designators::names(&page, || pages.product())
    }

    /// An identity of which only these names are known.
    pub(crate) fn of(names: impl IntoIterator<Item = Wwid>) -> Self {
        let mut names: Vec<Wwid> = names.into_iter().collect();
        names.sort();
        let serial = None;
        Self { names, serial }
    }

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
}

#[cfg(feature = "serde")]
impl serde::Serialize for Identity {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct as _;

        let mut identity = serializer.serialize_struct("Identity", 3)?;
        identity.serialize_field("names", &self.names)?;
        identity.serialize_field("serial", &self.serial)?;
        identity.serialize_field("weakly_identified", &self.is_weak())?;
        identity.end()
    }
}

/// Prints all names, for a message.
impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.names.iter().map(ToString::to_string).collect();
        if names.is_empty() {
            return f.write_str("no name of its own");
        }
        f.write_str(&names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};

    /// A device with these pages 83h and 80h, and a standard answer.
    struct Device(Option<&'static [u8]>, Option<&'static [u8]>);

    impl Pages for Device {
        fn vpd(&self, code: u8) -> Result<Option<Vec<u8>>> {
            let page = match code {
                designators::PAGE => self.0,
                SERIAL => self.1,
                _ => return Err(Error::new(ErrorKind::Io, "another page was asked for")),
            };
            Ok(page.map(<[u8]>::to_vec))
        }

        fn product(&self) -> Result<String> {
            Ok("LIO-ORG disk-a          ".to_owned())
        }
    }

    const NAA: &[u8] = b"\0\x83\0\x0c\x01\x03\0\x08\x50\0\xc5\0\xa1\xb2\xc3\xd4";

    #[test]
    fn a_serial_number_is_a_name_only_where_there_is_no_other() {
        let read = |page_83| {
            let device = Device(page_83, Some(b"\0\x80\0\x04 s1 "));
            Identity::read(&device).unwrap()
        };
        assert_eq!(read(Some(NAA)).to_string(), "naa.5000c500a1b2c3d4");
        assert_eq!(read(Some(NAA)).serial.as_deref(), Some("s1"));
        assert_eq!(read(None).to_string(), "SLIO-ORG_disk-a_s1");
        assert!(read(None).is(&"SLIO-ORG_disk-a_s1".parse().unwrap()));
    }

    #[test]
    fn a_device_without_pages_has_no_identity() {
        let none = Identity::read(&Device(None, None)).unwrap();
        assert_eq!(none, Identity::default());
        assert_eq!(none.to_string(), "no name of its own");
        let blank = Identity::read(&Device(None, Some(b"\0\x80\0\x02  "))).unwrap();
        assert_eq!(blank, Identity::default());
    }
}
