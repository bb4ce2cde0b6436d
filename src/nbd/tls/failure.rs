//! What a failed TLS handshake means, and what to do.

use std::io;

use rustls::{AlertDescription, CertificateError, Error as TlsError, PeerIncompatible};

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Stage};

/// The error of rustls in this error, if there is one.
pub(super) fn tls_error(error: &io::Error) -> Option<&TlsError> {
    error.get_ref()?.downcast_ref()
}

/// The error for a failed handshake with the server `name`.
pub(super) fn of(error: &io::Error, name: &str, deadline: Deadline) -> Error {
    if let Some(error) = tls_error(error) {
        return of_tls(error, name);
    }
    if deadline.has_passed() {
        return Error::timed_out(Stage::Tls, deadline, "the TLS handshake");
    }
    let message = format!(
        "the connection broke in the TLS handshake: {error}; a server without ChaCha20-Poly1305, \
         which alone is offered, may end it without an alert"
    );
    Error::new(ErrorKind::Unreachable, message).at(Stage::Tls)
}

const NO_VERSION: &str = "it has neither TLS 1.3 nor TLS 1.2";

pub(super) fn of_tls(error: &TlsError, name: &str) -> Error {
    let (kind, why) = match error {
        TlsError::InvalidCertificate(error) => (
            ErrorKind::IdentityMismatch,
            explain_certificate_error(error),
        ),
        TlsError::AlertReceived(alert) => explain_alert(*alert),
        TlsError::PeerIncompatible(
            PeerIncompatible::ServerDoesNotSupportTls12Or13
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig,
        ) => (ErrorKind::NotSupported, NO_VERSION),
        TlsError::PeerIncompatible(_) => {
            (ErrorKind::NotSupported, "it has no cipher that is offered")
        }
        TlsError::InvalidCertRevocationList(_) => (
            ErrorKind::InvalidInput,
            "ca-crl.pem of tls-certificates=DIRECTORY cannot be used",
        ),
        TlsError::NoCertificatesPresented => {
            (ErrorKind::IdentityMismatch, "it shows no certificate")
        }
        _ => (ErrorKind::Protocol, "it breaks the protocol"),
    };
    let message = format!("no TLS with the NBD server {name}: {why} ({error})");
    Error::new(kind, message).at(Stage::Tls)
}

/// The error if the server ended the connection, without an alert, after it had asked for a
/// certificate of the client.
pub(super) fn of_certificate(name: &str, was_shown: bool) -> Error {
    let (kind, why) = if was_shown {
        // A server that was killed has accepted it.
        let why = "it ended the connection when it had client-cert.pem of \
                   tls-certificates=DIRECTORY: it has stopped, or does not accept the certificate";
        (ErrorKind::Unreachable, why)
    } else {
        explain_alert(AlertDescription::CertificateRequired)
    };
    let message = format!("no TLS with the NBD server {name}: {why}");
    Error::new(kind, message).at(Stage::Tls)
}

fn explain_certificate_error(error: &CertificateError) -> &'static str {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired: the server needs a new one"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet: compare the clocks"
        }
        CertificateError::NotValidForNameContext { presented, .. } if presented.is_empty() => {
            "its certificate has no subjectAltName: a name in its subject (CN) does not count"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "its certificate is for another name: say tls-hostname=NAME if that is right"
        }
        // Two authorities may have one name, so a bad signature means an unknown authority too.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "its certificate is of no authority that is trusted: put the authority's into \
             ca-cert.pem of tls-certificates=DIRECTORY"
        }
        CertificateError::Revoked => "its certificate was revoked",
        // rustls names this error in its text alone.
        CertificateError::Other(other) if format!("{other:?}").contains("CaUsedAsEndEntity") => {
            "its certificate is an authority's (CA:TRUE): the server needs one of its own"
        }
        _ => "its certificate proves nothing",
    }
}

fn explain_alert(alert: AlertDescription) -> (ErrorKind, &'static str) {
    use AlertDescription as Alert;
    match alert {
        Alert::CertificateRequired | Alert::NoCertificate => (
            ErrorKind::NotPermitted,
            "it wants a certificate of the client: put client-cert.pem and client-key.pem into \
             tls-certificates=DIRECTORY",
        ),
        Alert::BadCertificate
        | Alert::UnsupportedCertificate
        | Alert::CertificateRevoked
        | Alert::CertificateExpired
        | Alert::CertificateUnknown
        | Alert::UnknownCA
        | Alert::AccessDenied => (
            ErrorKind::NotPermitted,
            "it does not accept client-cert.pem of tls-certificates=DIRECTORY: compare its authority and \
             its end",
        ),
        Alert::ProtocolVersion => (ErrorKind::NotSupported, NO_VERSION),
        Alert::HandshakeFailure | Alert::InsufficientSecurity => (
            ErrorKind::NotSupported,
            "it takes no ChaCha20-Poly1305, which alone is offered",
        ),
        Alert::InternalError | Alert::UserCanceled => {
            (ErrorKind::Unreachable, "it ended the handshake")
        }
        _ => (ErrorKind::Refused, "it ended the handshake"),
    }
}

#[cfg(test)]
mod tests {
    use rustls::CertRevocationListError;

    use super::*;

    #[test]
    fn each_failure_says_what_to_do() {
        let of = |error| of_tls(&error, "h");
        let bad = |error| of(TlsError::InvalidCertificate(error));
        for (error, kind, hint) in [
            (
                bad(CertificateError::Expired),
                ErrorKind::IdentityMismatch,
                "new one",
            ),
            (
                bad(CertificateError::NotValidForName),
                ErrorKind::IdentityMismatch,
                "tls-hostname=",
            ),
            (
                bad(CertificateError::UnknownIssuer),
                ErrorKind::IdentityMismatch,
                "ca-cert.pem",
            ),
            (
                of(TlsError::AlertReceived(
                    AlertDescription::CertificateRequired,
                )),
                ErrorKind::NotPermitted,
                "client-key.pem",
            ),
            (
                of(TlsError::AlertReceived(AlertDescription::HandshakeFailure)),
                ErrorKind::NotSupported,
                "ChaCha20",
            ),
            (
                of(TlsError::AlertReceived(AlertDescription::ProtocolVersion)),
                ErrorKind::NotSupported,
                "neither TLS 1.3 nor TLS 1.2",
            ),
            (
                of(PeerIncompatible::ServerDoesNotSupportTls12Or13.into()),
                ErrorKind::NotSupported,
                "neither TLS 1.3 nor TLS 1.2",
            ),
            (
                of(CertRevocationListError::IssuerInvalidForCrl.into()),
                ErrorKind::InvalidInput,
                "ca-crl.pem",
            ),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(error.stage(), Some(Stage::Tls));
            assert!(error.to_string().contains(hint), "{error}");
        }
    }
}
