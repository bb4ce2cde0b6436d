//! The address where an iSCSI target listens, and the number of a session.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use super::host::{canonical_host, host_and_port, split_port, without_brackets};
use super::text::{ParseIdError, decimal};

/// The port that IANA assigned to iSCSI.
const DEFAULT_PORT: u16 = 3260;

/// A portal of an iSCSI target: an address or a host name, and a TCP port, which defaults
/// to 3260.
///
/// It prints as `10.0.0.1:3260`, `[fd00::1]:3260`, `[fe80::1%eth0]:3260` or
/// `array.example:3260`, always with the port. Two spellings of one address are equal. An
/// IPv4-mapped IPv6 address (`::ffff:10.0.0.1`) is the IPv4 address.
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
    /// An IPv6 link-local address (`fe80::/10`) on a link of this machine.
    LinkLocal {
        /// The address.
        address: Ipv6Addr,
        /// The interface, by name or number.
        zone: String,
    },
    /// A host name in lower case.
    Name(String),
}

impl Portal {
    /// The portal at `host`: a name or an address, IPv6 without brackets and with its zone
    /// if it has one (`fe80::1%eth0`). The port defaults to 3260. `None` if the host or the
    /// port is invalid.
    #[must_use]
    pub fn new(host: &str, port: Option<u16>) -> Option<Self> {
        let port = port.unwrap_or(DEFAULT_PORT);
        let host = match PortalHost::link_local(host) {
            Some(host) => host,
            None => PortalHost::of(canonical_host(host)?),
        };
        (port != 0).then_some(Self { host, port })
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

    /// Parses `ADDRESS%ZONE`.
    fn link_local(text: &str) -> Option<Self> {
        /// The longest interface name in bytes (`IFNAMSIZ` without the zero byte).
        const LONGEST: usize = 15;
        let (address, zone) = text.split_once('%')?;
        let address: Ipv6Addr = address.parse().ok()?;
        let kept = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_zone = (1..=LONGEST).contains(&zone.len()) && zone.bytes().all(kept);
        (address.is_unicast_link_local() && is_zone).then(|| Self::LinkLocal {
            address,
            zone: zone.to_owned(),
        })
    }
}

impl fmt::Display for PortalHost {
    /// Prints what the resolver accepts: an IPv6 address has no brackets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::LinkLocal { address, zone } => write!(f, "{address}%{zone}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl fmt::Display for Portal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (host, port) = (&self.host, self.port);
        match host {
            PortalHost::Ip(IpAddr::V6(_)) | PortalHost::LinkLocal { .. } => {
                write!(f, "[{host}]:{port}")
            }
            PortalHost::Ip(IpAddr::V4(_)) | PortalHost::Name(_) => write!(f, "{host}:{port}"),
        }
    }
}

impl FromStr for Portal {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let link_local = || {
            let (host, port) = split_port(text)?;
            Some((PortalHost::link_local(without_brackets(host)?)?, port))
        };
        let plain = || host_and_port(text).map(|(host, port)| (PortalHost::of(host), port));
        let Some((host, port)) = link_local().or_else(plain) else {
            return Err(ParseIdError::new(
                "an iSCSI portal",
                "HOST or HOST:PORT, HOST being a name, an IPv4 address or an IPv6 address in \
                 brackets, a link-local one with its interface ([fe80::1%eth0])",
                text,
            ));
        };
        let port = port.unwrap_or(DEFAULT_PORT);
        Ok(Self { host, port })
    }
}

/// The number of an iSCSI session, the `N` of `/sys/class/iscsi_session/sessionN`. It
/// identifies a session, as a portal does not: two sessions may lead to one target through
/// one portal.
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
        for (text, expected) in [
            ("10.0.0.1", "10.0.0.1:3260"),
            ("10.0.0.1:3261", "10.0.0.1:3261"),
            ("[FE80:0:0::1]", "[fe80::1]:3260"),
            ("[0000:0000::0001]:9", "[::1]:9"),
            ("[::ffff:10.0.0.1]", "10.0.0.1:3260"),
            ("Array.Example.", "array.example.:3260"),
            ("[FE80::0:1%eth0]", "[fe80::1%eth0]:3260"),
            ("[fe80::1%2]:9", "[fe80::1%2]:9"),
        ] {
            assert_eq!(portal(text).to_string(), expected);
            assert_eq!(portal(expected), portal(text));
        }
        assert_eq!(Portal::new("::1", None), Some(portal("[::1]:3260")));
        let link_local = Portal::new("fe80::1%br-a_b.100", None);
        assert_eq!(link_local, Some(portal("[fe80::1%br-a_b.100]")));
        assert_ne!(portal("[fe80::1%eth0]"), portal("[fe80::1%eth1]"));
        assert_eq!(Portal::new("h", Some(0)), None);
    }

    #[test]
    fn what_is_no_portal_is_refused() {
        for text in "h: h:0 h:65536 h:01 ::1 [::1 [10.0.0.1] 010.0.0.1 10.1 0x7f000001 a..b \
                     [fe80::1%] [fe80::1%a/b] [fe80::1%a%b] [fe80::1%0123456789abcdef] \
                     [fd00::1%eth0] [10.0.0.1%eth0] 10.0.0.1%eth0 fe80::1%eth0 10.0.0.1,10.0.0.2 10.0.0.1:3260,1"
            .split(' ')
            .chain(["", " h", "h "])
        {
            assert!(text.parse::<Portal>().is_err(), "{text:?}");
        }
    }
}
