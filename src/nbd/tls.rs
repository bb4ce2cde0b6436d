//! NBD over TLS: this module does the handshake, and the kernel the records (kTLS).
//!
//! STARTTLS, the TLS handshake and `OPT_GO` go through rustls. The session tickets of TLS
//! 1.3 come before the reply to `OPT_GO`, so that rustls takes them. Then the kernel gets
//! the keys and the record numbers, and its NBD driver uses the socket like a TCP socket.
//!
//! The kernel ends a connection with `EIO` at a record that holds no data, such as a
//! `KeyUpdate` (`net/tls/tls_sw.c`). `GnuTLS`, which nbdkit, nbd-server and qemu-nbd use,
//! sends one after 2^24 records of AES-GCM in TLS 1.3, and none with ChaCha20-Poly1305. In
//! TLS 1.2 the kernel counts the nonces of AES-GCM on from the first that rustls used, so
//! that the two would use a nonce twice. So only ChaCha20-Poly1305 is offered.

mod certificate;
mod certificates;
mod failure;
mod hand_over;
mod record;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::{ResolvesClientCert, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ClientConnection, SignatureScheme, SupportedCipherSuite, version};

use self::certificate::Trust;
use self::certificates::Certificates;
pub(crate) use self::hand_over::ciphers_of_kernel;
use self::record::RecordReader;
use super::export::Export;
use super::handshake::{self, DiscoveredExport, Greeting, ListedExport};
use super::tls_info::{ServerCertificate, TlsInfo};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::NbdServer;
use crate::kernel::stream::DeadlineStream;

/// Negotiates TLS and the export with the server, and gives the kernel the keys of the
/// connection.
///
/// # Errors
/// As [`dial`](super::dial()) says.
pub(super) fn negotiate(
    stream: &OwnedFd,
    server: &NbdServer,
    name: &str,
    deadline: Deadline,
) -> Result<(Export, TlsInfo)> {
    let (export, session) = negotiate_in_user_space(stream, server, name, deadline)?;
    let info = session
        .and_then(|(session, certificate)| {
            let (version, cipher) = hand_over::to_kernel(session, stream)?;
            Ok(TlsInfo {
                version,
                cipher,
                certificate,
            })
        })
        .map_err(|error| error.at(Stage::Tls))?;
    tracing::debug!(%server, tls = %info, "the kernel has the keys");
    Ok((export, info))
}

/// Negotiates with rustls, before the kernel has the keys. The inner error is about what the server
/// sent: more than was read, or a certificate that cannot be read.
fn negotiate_in_user_space(
    stream: &OwnedFd,
    server: &NbdServer,
    name: &str,
    deadline: Deadline,
) -> Result<(Export, Result<(ClientConnection, ServerCertificate)>)> {
    with_tls(stream, server, deadline, |greeting, secured| {
        handshake::negotiate_in_tls(greeting, secured, name, deadline)
    })
}

/// Asks the server for its exports over TLS.
///
/// # Errors
/// As [`discover`](super::discover) says.
pub(super) fn discover(
    stream: &OwnedFd,
    server: &NbdServer,
    deadline: Deadline,
) -> Result<Vec<DiscoveredExport>> {
    with_tls(stream, server, deadline, |_, secured| {
        handshake::discover_in_tls(secured, deadline)
    })
    .map(|(exports, _)| exports)
}

/// As [`discover`], for the names alone.
pub(super) fn list(
    stream: &OwnedFd,
    server: &NbdServer,
    deadline: Deadline,
) -> Result<Vec<ListedExport>> {
    with_tls(stream, server, deadline, |_, secured| {
        handshake::list_in_tls(secured, deadline)
    })
    .map(|(exports, _)| exports)
}

fn with_tls<'a, T>(
    stream: &'a OwnedFd,
    server: &NbdServer,
    deadline: Deadline,
    ask: impl FnOnce(Greeting, &mut Secured<'a>) -> Result<T>,
) -> Result<(T, Result<(ClientConnection, ServerCertificate)>)> {
    let NbdServer::Tls {
        host,
        certificates,
        hostname,
        ..
    } = server
    else {
        let message = "TLS was wanted of a server without it";
        return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Tls));
    };
    let name = hostname.as_ref().unwrap_or(host);
    let certificates = Certificates::read(certificates.as_deref(), deadline);
    let certificates = certificates.map_err(|error| error.at(Stage::Tls))?;
    let begun = begin(name, certificates);
    let (session, request, trust) = begun.map_err(|error| error.at(Stage::Tls))?;

    let socket = stream.as_fd();
    let greeting = handshake::start_tls(&mut DeadlineStream::new(socket, deadline), deadline)?;
    let records = RecordReader::new(DeadlineStream::new(socket, deadline));
    let mut secured = Secured::new(session, records);
    let negotiated = secured
        .shake_hands()
        .map_err(|error| failure::of(&error, name, deadline))
        .and_then(|()| ask(greeting, &mut secured));
    let answer = negotiated.map_err(|error| match secured.failure.take() {
        // In TLS 1.3 the server looks at the client's certificate when the client takes
        // the handshake for done.
        Some(failure) => failure::of_tls(&failure, name),
        // `GnuTLS` closes without an alert.
        None if error.kind() == ErrorKind::Unreachable
            && !secured.was_answered
            && request.was_requested.load(Ordering::Relaxed) =>
        {
            failure::of_certificate(name, request.own.is_some()).caused_by(error)
        }
        None => error,
    })?;
    let session = secured.into_session().and_then(|session| {
        let certificate = certificate::of_server(&session, &trust)?;
        Ok((session, certificate))
    });
    Ok((answer, session))
}

fn begin(
    name: &str,
    certificates: Certificates,
) -> Result<(ClientConnection, Arc<CertificateRequest>, Trust)> {
    use ring::cipher_suite as suite;
    const SUITES: [SupportedCipherSuite; 3] = [
        suite::TLS13_CHACHA20_POLY1305_SHA256,
        suite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
        suite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    ];
    let unusable = |error: rustls::Error| {
        let message = format!("cannot begin TLS: {error}");
        Error::new(ErrorKind::InvalidInput, message)
    };
    let peer = ServerName::try_from(name.to_owned()).map_err(|_| {
        let message = format!("{name:?} is no name that a certificate can hold: say tls-hostname=");
        Error::new(ErrorKind::InvalidInput, message)
    })?;
    let mut request = CertificateRequest::default();
    let provider = CryptoProvider {
        cipher_suites: SUITES.to_vec(),
        ..ring::default_provider()
    };
    if let Some((chain, key)) = certificates.own {
        let own = CertifiedKey::from_der(chain, key, &provider).map_err(unusable)?;
        request.own = Some(Arc::new(own));
    }
    let request = Arc::new(request);
    let provider = Arc::new(provider);
    let authorities = Arc::new(certificates.authorities);
    // A list counts although it is outdated. A certificate that no list covers is not known
    // to be revoked.
    let verifier = WebPkiServerVerifier::builder_with_provider(authorities, Arc::clone(&provider))
        .with_crls(certificates.revoked)
        .allow_unknown_revocation_status()
        .build()
        .map_err(|error| {
            let message = format!("ca-cert.pem or ca-crl.pem cannot be used: {error}");
            Error::new(ErrorKind::InvalidInput, message)
        })?;
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13, &version::TLS12])
        .map_err(unusable)?
        .with_webpki_verifier(Arc::clone(&verifier))
        .with_client_cert_resolver(Arc::<CertificateRequest>::clone(&request));
    config.enable_secret_extraction = true;
    config.resumption = rustls::client::Resumption::disabled();
    let session = ClientConnection::new(Arc::new(config), peer.clone()).map_err(unusable)?;
    Ok((session, request, Trust { peer, verifier }))
}

/// The client's certificate, which a server may ask for, and whether the server did.
#[derive(Debug, Default)]
struct CertificateRequest {
    own: Option<Arc<CertifiedKey>>,
    was_requested: AtomicBool,
}

impl ResolvesClientCert for CertificateRequest {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.was_requested.store(true, Ordering::Relaxed);
        self.own.clone()
    }

    fn has_certs(&self) -> bool {
        self.own.is_some()
    }
}

/// A connection whose records rustls makes and reads.
struct Secured<'a> {
    session: ClientConnection,
    records: RecordReader<DeadlineStream<'a>>,
    /// Why rustls ended it.
    failure: Option<rustls::Error>,
    /// Whether the server has sent data over TLS.
    was_answered: bool,
}

impl<'a> Secured<'a> {
    fn new(session: ClientConnection, records: RecordReader<DeadlineStream<'a>>) -> Self {
        Self {
            session,
            records,
            failure: None,
            was_answered: false,
        }
    }

    fn shake_hands(&mut self) -> io::Result<()> {
        while self.session.is_handshaking() || self.session.wants_write() {
            if self.session.complete_io(&mut self.records)? == (0, 0) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    fn into_session(mut self) -> Result<ClientConnection> {
        let state = self.session.process_new_packets();
        let is_empty = state.is_ok_and(|state| {
            state.plaintext_bytes_to_read() == 0 && state.tls_bytes_to_write() == 0
        });
        if !is_empty || !self.records.is_between_two() {
            let message = "the NBD server sent more than its answer: the kernel would not see it";
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        Ok(self.session)
    }

    fn note_failure<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &result
            && let Some(error) = failure::tls_error(error)
        {
            self.failure.get_or_insert_with(|| error.clone());
        }
        result
    }
}

impl Read for Secured<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = rustls::Stream::new(&mut self.session, &mut self.records).read(buffer);
        self.was_answered |= read.as_ref().is_ok_and(|read| *read > 0);
        self.note_failure(read)
    }
}

impl Write for Secured<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = rustls::Stream::new(&mut self.session, &mut self.records).write(bytes);
        self.note_failure(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = rustls::Stream::new(&mut self.session, &mut self.records).flush();
        self.note_failure(flushed)
    }
}

#[cfg(test)]
mod tests;
