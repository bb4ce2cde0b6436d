//! The certificate that a server showed.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::ClientConnection;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use x509_cert::certificate::{CertificateInner, Raw, TbsCertificateInner};
use x509_cert::der::Decode as _;

use crate::error::{Error, ErrorKind, Result};
use crate::nbd::tls_info::ServerCertificate;

/// A certificate with a serial number of any length: RFC 5280 allows 20 bytes, and rustls
/// accepts longer ones.
type Certificate = CertificateInner<Raw>;

/// What a server must prove, and how that is verified.
#[derive(Debug, Clone)]
pub(super) struct Trust {
    pub(super) peer: ServerName<'static>,
    pub(super) verifier: Arc<WebPkiServerVerifier>,
}

/// Reads the server's certificate after the handshake in which rustls verified it.
///
/// # Errors
/// `Protocol` where it cannot be read.
pub(super) fn of_server(session: &ClientConnection, trust: &Trust) -> Result<ServerCertificate> {
    let unreadable = |reason: &str| {
        let message = format!("the NBD server's certificate cannot be read: {reason}");
        Error::new(ErrorKind::Protocol, message)
    };
    let shown = session.peer_certificates().and_then(<[_]>::split_first);
    let (shown, others) = shown.ok_or_else(|| unreadable("the server showed none"))?;
    let certificate =
        Certificate::from_der(shown).map_err(|error| unreadable(&error.to_string()))?;
    let certificate = certificate.tbs_certificate();
    Ok(ServerCertificate {
        subject: printable(&certificate.subject().to_string()),
        valid_until: trust.end(shown, others, end_of(certificate)),
    })
}

impl Trust {
    /// When `shown` is no longer accepted: when it ends, or before that, when a certificate
    /// ends that leads from it to an authority.
    fn end(
        &self,
        shown: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        own: SystemTime,
    ) -> SystemTime {
        let read = others.iter().filter_map(|other| {
            let other = Certificate::from_der(other).ok()?;
            Some(end_of(other.tbs_certificate()))
        });
        let now = SystemTime::now();
        let mut earlier: Vec<_> = read.filter(|end| (now..own).contains(end)).collect();
        earlier.sort_unstable();
        // The server may send certificates that prove nothing of it.
        let is_needed = |end: &SystemTime| {
            let after = end.duration_since(UNIX_EPOCH).unwrap_or_default() + Duration::from_secs(1);
            let after = UnixTime::since_unix_epoch(after);
            let verified = self
                .verifier
                .verify_server_cert(shown, others, &self.peer, &[], after);
            verified.is_err()
        };
        earlier.into_iter().find(is_needed).unwrap_or(own)
    }
}

fn end_of(certificate: &TbsCertificateInner<Raw>) -> SystemTime {
    certificate.validity().not_after.to_system_time()
}

/// Terminals would obey the control characters.
fn printable(subject: &str) -> String {
    let mut shown = String::with_capacity(subject.len());
    for character in subject.chars() {
        match character {
            '\\' | '"' | '\'' => shown.push(character),
            other => shown.extend(other.escape_debug()),
        }
    }
    shown
}
