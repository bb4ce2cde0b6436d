//! The certificate that a server showed.

use rustls::ClientConnection;
use x509_cert::Certificate;
use x509_cert::der::Decode as _;

use crate::error::{Error, ErrorKind, Result};
use crate::nbd::tls_info::ServerCertificate;

/// Reads the server's certificate after the handshake in which rustls verified it.
///
/// # Errors
/// `Protocol` where it cannot be read.
pub(super) fn of_server(session: &ClientConnection) -> Result<ServerCertificate> {
    let unreadable = |reason: &str| {
        let message = format!("the NBD server's certificate cannot be read: {reason}");
        Error::new(ErrorKind::Protocol, message)
    };
    let shown = session.peer_certificates().and_then(<[_]>::first);
    let shown = shown.ok_or_else(|| unreadable("the server showed none"))?;
    let certificate =
        Certificate::from_der(shown).map_err(|error| unreadable(&error.to_string()))?;
    let certificate = certificate.tbs_certificate();
    Ok(ServerCertificate {
        subject: certificate.subject().to_string(),
        valid_until: certificate.validity().not_after.to_system_time(),
    })
}
