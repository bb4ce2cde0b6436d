//! The source of an attach: one type and one parser for every kind.

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
