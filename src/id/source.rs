//! The source of an attach: one type and one parser for every kind.

#[cfg(feature = "journal")]
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use super::text::ParseIdError;
use super::{FcUri, Hctl, IscsiUri, NbdUri};

/// The source of an attach, as a URI.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Source {
    /// `scsi:HOST:CHANNEL:TARGET:LUN`: one logical unit behind a SCSI host of
    /// this machine.
    Scsi(Hctl),
    /// `nbd://HOST[:PORT]/EXPORT`, `nbds://HOST[:PORT]/EXPORT` or
    /// `nbd+unix:///EXPORT?socket=PATH`: one export of an NBD server.
    Nbd(NbdUri),
    /// `iscsi://PORTAL[,PORTAL...]/IQN/LUN`: one logical unit of an iSCSI target, through
    /// this machine's sessions with it.
    Iscsi(IscsiUri),
    /// `fc://WWPN[,WWPN...]/LUN`: one logical unit behind Fibre Channel target
    /// ports.
    Fc(FcUri),
}

impl Source {
    /// Whether a portal or port of this source leads to the same LUN as in the other one. The
    /// order of the portals or ports does not count.
    #[must_use]
    pub fn shares_a_path(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Iscsi(one), Self::Iscsi(other)) => one.shares_a_path(other),
            (Self::Fc(one), Self::Fc(other)) => one.shares_a_path(other),
            _ => self == other,
        }
    }

    /// The source with each of its portals or ports alone. Two sources share a path if one of
    /// these is in both.
    #[cfg(feature = "journal")]
    pub(crate) fn paths(&self) -> Vec<Cow<'_, Self>> {
        match self {
            Self::Iscsi(uri) => uri.paths().map(|uri| Cow::Owned(uri.into())).collect(),
            Self::Fc(uri) => uri.paths().map(|uri| Cow::Owned(uri.into())).collect(),
            Self::Scsi(_) | Self::Nbd(_) => vec![Cow::Borrowed(self)],
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scsi(hctl) => write!(f, "scsi:{hctl}"),
            Self::Nbd(uri) => uri.fmt(f),
            Self::Iscsi(uri) => uri.fmt(f),
            Self::Fc(uri) => uri.fmt(f),
        }
    }
}

impl FromStr for Source {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        match text.split_once(':') {
            Some(("scsi", address)) => address.parse().map(Self::Scsi),
            Some((scheme, _)) if NbdUri::has_scheme(scheme) => text.parse().map(Self::Nbd),
            Some((scheme, _)) if scheme.eq_ignore_ascii_case("iscsi") => {
                text.parse().map(Self::Iscsi)
            }
            Some((scheme, _)) if scheme.eq_ignore_ascii_case("fc") => text.parse().map(Self::Fc),
            _ => Err(ParseIdError::new(
                "a source",
                "scsi:HOST:CHANNEL:TARGET:LUN, iscsi://PORTAL[,PORTAL...]/IQN/LUN, \
                 fc://WWPN[,WWPN...]/LUN, nbd://HOST[:PORT]/EXPORT, nbds://HOST[:PORT]/EXPORT \
                 or nbd+unix:///EXPORT?socket=PATH",
                text,
            )),
        }
    }
}

impl From<Hctl> for Source {
    fn from(hctl: Hctl) -> Self {
        Self::Scsi(hctl)
    }
}

impl From<NbdUri> for Source {
    fn from(uri: NbdUri) -> Self {
        Self::Nbd(uri)
    }
}

impl From<IscsiUri> for Source {
    fn from(uri: IscsiUri) -> Self {
        Self::Iscsi(uri)
    }
}

impl From<FcUri> for Source {
    fn from(uri: FcUri) -> Self {
        Self::Fc(uri)
    }
}

#[cfg(all(test, feature = "journal"))]
mod tests {
    use super::*;

    #[test]
    fn two_sources_share_a_path_if_one_portal_or_port_leads_both_to_one_lun() {
        let sources = [
            "scsi:2:0:0:1",
            "nbd://h/x",
            "iscsi://10.0.0.1/iqn.2003-01.org.x:a/1",
            "iscsi://10.0.0.2,10.0.0.1:3260/IQN.2003-01.org.x:A/1",
            "iscsi://10.0.0.2/iqn.2003-01.org.x:a/1",
            "iscsi://10.0.0.2/iqn.2003-01.org.x:a/2",
            "iscsi://10.0.0.2/iqn.2003-01.org.x:b/1",
            "fc://0x1000000000000001/1",
            "fc://0x1000000000000002,0x1000000000000001/1",
            "fc://0x1000000000000001/2",
        ];
        let sources: Vec<Source> = sources.iter().map(|text| text.parse().unwrap()).collect();
        let mut pairs = Vec::new();
        for (at, one) in sources.iter().enumerate() {
            for (place, other) in sources.iter().enumerate() {
                let is_shared = one.shares_a_path(other);
                let in_both = one.paths().iter().any(|path| other.paths().contains(path));
                assert_eq!(is_shared, in_both, "{one} and {other}");
                if is_shared && at < place {
                    pairs.push((at, place));
                }
            }
        }
        assert_eq!(pairs, [(2, 3), (3, 4), (7, 8)]);
    }
}
