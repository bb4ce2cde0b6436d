//! Where an iSCSI target listens, and the number of a session with it.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use super::host::{canonical_host, host_and_port};
use super::{ParseIdError, decimal};

/// The port that IANA gave iSCSI.
const DEFAULT_PORT: u16 = 3260;

/// A portal of an iSCSI target: an address or a host's name, and a TCP port,
/// which is 3260 where none is given.
///
/// It prints as `10.0.0.1:3260`, `[fe80::1]:3260` or `array.example:3260`,
/// always with the port. Addresses are equal however they were spelt; an IPv4
/// address in IPv6 (`::ffff:10.0.0.1`) is the IPv4 address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Portal {
    host: PortalHost,
    port: u16,
}

/// The host of a portal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PortalHost {
    /// An address.
    Ip(IpAddr),
    /// A name in lower case.
    Name(String),
}

impl Portal {
    /// The portal at `host`, a name or an address, one of IPv6 without
    /// brackets; the default port where `port` is `None`. `None` where one of
    /// them is not what it should be.
    #[must_use]
    pub fn new(host: &str, port: Option<u16>) -> Option<Self> {
        let port = port.unwrap_or(DEFAULT_PORT);
        (port != 0).then_some(Self {
            host: PortalHost::of(canonical_host(host)?),
            port,
        })
    }

    /// The host.
    #[must_use]
    pub fn host(&self) -> &PortalHost {
        &self.host
    }

    /// The TCP port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl PortalHost {
    fn of(canonical: String) -> Self {
        match canonical.parse::<IpAddr>() {
            Ok(address) => Self::Ip(address.to_canonical()),
            Err(_) => Self::Name(canonical),
        }
    }
}

impl fmt::Display for Portal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.port;
        match &self.host {
            PortalHost::Ip(IpAddr::V6(address)) => write!(f, "[{address}]:{port}"),
            PortalHost::Ip(IpAddr::V4(address)) => write!(f, "{address}:{port}"),
            PortalHost::Name(name) => write!(f, "{name}:{port}"),
        }
    }
}

impl FromStr for Portal {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let Some((host, port)) = host_and_port(text) else {
            return Err(ParseIdError::new(
                "an iSCSI portal",
                "HOST or HOST:PORT, HOST being a name, an IPv4 address or an IPv6 address in brackets",
                text,
            ));
        };
        Ok(Self {
            host: PortalHost::of(host),
            port: port.unwrap_or(DEFAULT_PORT),
        })
    }
}

/// The number of an iSCSI session, the `N` of
/// `/sys/class/iscsi_session/sessionN`. Two sessions may lead to one target
/// through one portal, so this names a session and a portal does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u32);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for SessionId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        decimal(text)
            .map(Self)
            .ok_or_else(|| ParseIdError::new("an iSCSI session's number", "a decimal number", text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn portal(text: &str) -> Portal {
        text.parse().unwrap()
    }

    #[test]
    fn it_prints_in_one_canonical_spelling() {
        for (text, spelt) in [
            ("10.0.0.1", "10.0.0.1:3260"),
            ("10.0.0.1:3261", "10.0.0.1:3261"),
            ("[FE80:0:0::1]", "[fe80::1]:3260"),
            ("[0000:0000::0001]:9", "[::1]:9"),
            ("[::ffff:10.0.0.1]", "10.0.0.1:3260"),
            ("Array.Example.", "array.example.:3260"),
        ] {
            assert_eq!(portal(text).to_string(), spelt);
            assert_eq!(portal(spelt), portal(text));
        }
        assert_eq!(Portal::new("::1", None), Some(portal("[::1]:3260")));
        assert_eq!(Portal::new("h", Some(0)), None);
    }

    #[test]
    fn what_is_no_portal_is_refused() {
        for text in "h: h:0 h:65536 h:01 ::1 [::1 [10.0.0.1] 010.0.0.1 10.1 0x7f000001 a..b \
                     [fe80::1%eth0] 10.0.0.1,10.0.0.2 10.0.0.1:3260,1"
            .split(' ')
            .chain(["", " h", "h "])
        {
            assert!(text.parse::<Portal>().is_err(), "{text:?}");
        }
    }
}
