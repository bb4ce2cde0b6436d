//! The address of a logical unit of an iSCSI target.

use std::fmt;
use std::str::FromStr;

use super::text::{ParseIdError, without_repeats};
use super::{Iqn, Lun, Portal};

/// One logical unit of an iSCSI target, and the portals that lead to it:
/// `iscsi://PORTAL[,PORTAL...]/IQN/LUN`.
///
/// Several portals are several paths of one unit. A portal that is named twice counts once.
/// The order of the portals is kept and is part of the name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IscsiUri {
    portals: Vec<Portal>,
    target: Iqn,
    lun: Lun,
}

impl IscsiUri {
    /// The unit `lun` of `target` through these portals; `None` if there is no portal.
    #[must_use]
    pub fn new(portals: Vec<Portal>, target: Iqn, lun: Lun) -> Option<Self> {
        let portals = without_repeats(portals);
        (!portals.is_empty()).then_some(Self {
            portals,
            target,
            lun,
        })
    }

    /// The portals: at least one, and none twice.
    #[must_use]
    pub fn portals(&self) -> &[Portal] {
        &self.portals
    }

    /// The target's name.
    #[must_use]
    pub fn target(&self) -> &Iqn {
        &self.target
    }

    /// The logical unit.
    #[must_use]
    pub fn lun(&self) -> Lun {
        self.lun
    }

    /// Whether a portal leads to one unit in both.
    pub(super) fn shares_a_path(&self, other: &Self) -> bool {
        let is_shared = |portal| other.portals.contains(portal);
        (self.lun, &self.target) == (other.lun, &other.target) && self.portals.iter().any(is_shared)
    }

    /// The unit through each portal alone.
    #[cfg(feature = "journal")]
    pub(super) fn paths(&self) -> impl Iterator<Item = Self> {
        let through = |portal: &Portal| Self {
            portals: vec![portal.clone()],
            target: self.target.clone(),
            lun: self.lun,
        };
        self.portals.iter().map(through)
    }
}

impl fmt::Display for IscsiUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let portals: Vec<_> = self.portals.iter().map(Portal::to_string).collect();
        write!(
            f,
            "iscsi://{}/{}/{}",
            portals.join(","),
            self.target,
            self.lun
        )
    }
}

impl FromStr for IscsiUri {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let wrong = |expected| ParseIdError::new("an iSCSI URI", expected, text);
        let forms = || wrong("iscsi://PORTAL[,PORTAL...]/IQN/LUN");
        let (scheme, rest) = text.split_once("://").ok_or_else(forms)?;
        if !scheme.eq_ignore_ascii_case("iscsi") {
            return Err(forms());
        }
        let mut parts = rest.split('/');
        let (Some(portals), Some(target), Some(lun), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(forms());
        };
        // The error of a part names that part.
        let portals = portals
            .split(',')
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        Self::new(portals, target.parse()?, lun.parse()?).ok_or_else(forms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_portal_that_is_named_twice_in_two_spellings_counts_once_and_the_order_stays() {
        let text =
            "ISCSI://10.0.0.2,[FE80::1]:9,10.0.0.2:3260,10.0.0.1/IQN.2003-01.org.x:A/flat-300";
        let uri: IscsiUri = text.parse().unwrap();
        assert_eq!(
            uri.to_string(),
            "iscsi://10.0.0.2:3260,[fe80::1]:9,10.0.0.1:3260/IQN.2003-01.org.x:A/16684"
        );
        assert_eq!(text.to_lowercase().parse(), Ok(uri.clone()));
        assert_eq!(uri.portals().len(), 3);
        assert_eq!(uri.lun(), Lun::flat(300).unwrap());
        assert_eq!(IscsiUri::new(vec![], uri.target().clone(), uri.lun()), None);
    }

    #[test]
    fn the_error_names_the_part_that_is_wrong() {
        for (text, what) in [
            (
                "iscsi://10.0.0.1,/iqn.2003-01.org.x:a/1",
                "\"\" is not an iSCSI portal",
            ),
            (
                "iscsi://me@h/iqn.2003-01.org.x:a/1",
                "\"me@h\" is not an iSCSI portal",
            ),
            ("iscsi://h/sda/1", "\"sda\" is not an iSCSI name"),
            ("iscsi://h/iqn.2003-01.org.x:a/010", "\"010\" is not a LUN"),
            ("iscsi://h/iqn.2003-01.org.x:a", "is not an iSCSI URI"),
            ("iscsi://h/iqn.2003-01.org.x:a/1/", "is not an iSCSI URI"),
            ("iscsi:h/iqn.2003-01.org.x:a/1", "is not an iSCSI URI"),
            ("nbd://h/iqn.2003-01.org.x:a/1", "is not an iSCSI URI"),
        ] {
            let error = text.parse::<IscsiUri>().unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
