//! The TLS of an NBD connection, for people and monitoring.

use std::fmt;
use std::time::{Duration, SystemTime};

/// The TLS that a process and a server agreed on for one connection.
///
/// The process that made the connection knows it. The kernel shows it to no other process,
/// so that a journal keeps it for them. It is of the first connection that an attach makes, or
/// of the last one that a heal makes: where a host has several addresses, the server of
/// another connection may have shown another certificate. After another process has healed the
/// device it is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TlsInfo {
    /// The version of the protocol.
    pub version: TlsVersion,
    /// The cipher that the kernel uses.
    pub cipher: TlsCipher,
    /// The certificate that the server showed.
    pub certificate: ServerCertificate,
}

/// A version of TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum TlsVersion {
    /// TLS 1.2 (RFC 5246).
    #[cfg_attr(feature = "serde", serde(rename = "1.2"))]
    V1_2,
    /// TLS 1.3 (RFC 8446).
    #[cfg_attr(feature = "serde", serde(rename = "1.3"))]
    V1_3,
}

/// A cipher of the kernel's TLS that lunbd offers to servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum TlsCipher {
    /// ChaCha20-Poly1305 (RFC 7905).
    #[cfg_attr(feature = "serde", serde(rename = "chacha20-poly1305"))]
    ChaCha20Poly1305,
}

/// The certificate by which a server proved its name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ServerCertificate {
    /// Its subject as RFC 4514 writes names, such as `CN=storage.example`; empty if it has
    /// only alternative names.
    pub subject: String,
    /// The time after which lunbd no longer accepts it: its end, or the end of an
    /// intermediate certificate on which it depends. RFC 3339 when serialised.
    #[cfg_attr(feature = "serde", serde(with = "rfc3339"))]
    pub valid_until: SystemTime,
}

impl ServerCertificate {
    /// The time from `now` to the end of the certificate; zero if it has passed.
    #[must_use]
    pub fn time_left(&self, now: SystemTime) -> Duration {
        self.valid_until.duration_since(now).unwrap_or_default()
    }
}

impl fmt::Display for TlsInfo {
    /// `1.3 chacha20-poly1305`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.version, self.cipher)
    }
}

impl fmt::Display for TlsVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1_2 => "1.2",
            Self::V1_3 => "1.3",
        })
    }
}

impl fmt::Display for TlsCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ChaCha20Poly1305 => "chacha20-poly1305",
        })
    }
}

#[cfg(feature = "serde")]
mod rfc3339 {
    use std::time::SystemTime;

    use serde::{Deserialize as _, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(
        time: &SystemTime,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_rfc3339_seconds(*time))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<SystemTime, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_rfc3339(&text).map_err(de::Error::custom)
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn a_journal_reads_back_what_it_wrote() {
        let info = TlsInfo {
            version: TlsVersion::V1_3,
            cipher: TlsCipher::ChaCha20Poly1305,
            certificate: ServerCertificate {
                subject: "CN=storage.example".to_owned(),
                valid_until: SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000),
            },
        };
        let text = serde_json::to_string(&info).unwrap();
        assert_eq!(
            text,
            r#"{"version":"1.3","cipher":"chacha20-poly1305","certificate":{"subject":"CN=storage.example","valid_until":"2030-03-17T17:46:40Z"}}"#
        );
        assert_eq!(serde_json::from_str::<TlsInfo>(&text).unwrap(), info);
        assert_eq!(info.to_string(), "1.3 chacha20-poly1305");
    }
}
