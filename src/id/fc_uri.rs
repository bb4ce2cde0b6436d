//! The address of a logical unit of a Fibre Channel target.

use std::fmt;
use std::str::FromStr;

use super::text::{ParseIdError, without_repeats};
use super::{Lun, Wwpn};

/// One logical unit, and the target ports that lead to it:
/// `fc://WWPN[,WWPN...]/LUN`.
///
/// Several ports are several paths of one unit. A port that is named twice counts once. The
/// order of the ports is kept and is part of the name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FcUri {
    ports: Vec<Wwpn>,
    lun: Lun,
}

impl FcUri {
    /// The unit `lun` behind these target ports; `None` if there is no port.
    #[must_use]
    pub fn new(ports: Vec<Wwpn>, lun: Lun) -> Option<Self> {
        let ports = without_repeats(ports);
        (!ports.is_empty()).then_some(Self { ports, lun })
    }

    /// The target's ports: at least one, and none twice.
    #[must_use]
    pub fn ports(&self) -> &[Wwpn] {
        &self.ports
    }

    /// The logical unit.
    #[must_use]
    pub fn lun(&self) -> Lun {
        self.lun
    }

    /// Whether a port leads to one unit in both.
    pub(super) fn shares_a_path(&self, other: &Self) -> bool {
        let is_shared = |port| other.ports.contains(port);
        self.lun == other.lun && self.ports.iter().any(is_shared)
    }

    /// The unit behind each port alone.
    #[cfg(feature = "journal")]
    pub(super) fn paths(&self) -> impl Iterator<Item = Self> {
        let behind = |port: &Wwpn| Self {
            ports: vec![*port],
            lun: self.lun,
        };
        self.ports.iter().map(behind)
    }
}

impl fmt::Display for FcUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ports: Vec<_> = self.ports.iter().map(Wwpn::to_string).collect();
        write!(f, "fc://{}/{}", ports.join(","), self.lun)
    }
}

impl FromStr for FcUri {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let forms = || ParseIdError::new("an FC URI", "fc://WWPN[,WWPN...]/LUN", text);
        let (scheme, rest) = text.split_once("://").ok_or_else(forms)?;
        let (ports, lun) = rest.split_once('/').ok_or_else(forms)?;
        if !scheme.eq_ignore_ascii_case("fc") {
            return Err(forms());
        }
        // The error of a part names that part.
        let ports = ports.split(',').map(str::parse).collect::<Result<_, _>>()?;
        Self::new(ports, lun.parse()?).ok_or_else(forms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_named_twice_in_two_spellings_counts_once_and_the_order_stays() {
        let text = "fc://20:00:00:10:9b:12:34:ff,0x1000000000000001,200000109B1234FF/flat-1";
        let uri: FcUri = text.parse().unwrap();
        assert_eq!(
            uri.to_string(),
            "fc://0x200000109b1234ff,0x1000000000000001/16385"
        );
        assert_eq!(uri.ports().len(), 2);
        assert_eq!(FcUri::new(vec![], uri.lun()), None);
    }

    #[test]
    fn the_error_names_the_part_that_is_wrong() {
        for (text, what) in [
            ("fc:///1", "\"\" is not a Fibre Channel port's name"),
            ("fc://5001/1", "\"5001\" is not a Fibre Channel port's name"),
            ("fc://0x1000000000000001/01", "\"01\" is not a LUN"),
            ("fc://0x1000000000000001/1/", "\"1/\" is not a LUN"),
            ("fc://0x1000000000000001", "is not an FC URI"),
            ("fc:0x1000000000000001/1", "is not an FC URI"),
            ("fcp://0x1000000000000001/1", "is not an FC URI"),
        ] {
            let error = text.parse::<FcUri>().unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
