use std::fs;
use std::net::{TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use tempfile::TempDir;

use super::*;
use crate::id::NbdUri;
use crate::nbd::ServerCertificate;

mod trust;

const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const SIZE: u64 = 8 << 20;

/// A directory for `tls-certificates`, and the server's configuration that fits it.
struct Authority {
    directory: TempDir,
    server: ServerConfig,
}

impl Authority {
    fn new(name: &str) -> Self {
        let directory = TempDir::new().unwrap();
        let made = generate_simple_self_signed([name.to_owned()]).unwrap();
        fs::write(directory.path().join("ca-cert.pem"), made.cert.pem()).unwrap();
        let (chain, key) = of_server(&made);
        let provider = Arc::new(ring::default_provider());
        let server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        Self { directory, server }
    }

    /// Makes the server ask for a certificate of the client.
    fn asks_for_client(mut self, name: &str) -> Self {
        let made = generate_simple_self_signed([name.to_owned()]).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone());
        let server = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (chain, key) = of_server(&server);
        let ca = self.directory.path().join("ca-cert.pem");
        fs::write(ca, server.cert.pem()).unwrap();
        self.server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(chain, key)
            .unwrap();
        fs::write(self.directory.path().join("of-client.pem"), made.cert.pem()).unwrap();
        let key = made.signing_key.serialize_pem();
        fs::write(self.directory.path().join("of-client.key"), key).unwrap();
        self
    }

    fn gives_client_its_certificate(self) -> Self {
        for (from, to) in [
            ("of-client.pem", "client-cert.pem"),
            ("of-client.key", "client-key.pem"),
        ] {
            let at = |name: &str| self.directory.path().join(name);
            fs::copy(at(from), at(to)).unwrap();
        }
        self
    }
}

fn of_server<K: rcgen::SigningKey + PublicDer>(
    made: &CertifiedKey<K>,
) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    (vec![made.cert.der().clone()], made.signing_key.der())
}

trait PublicDer {
    fn der(&self) -> PrivateKeyDer<'static>;
}

impl PublicDer for rcgen::KeyPair {
    fn der(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::try_from(self.serialize_der()).unwrap()
    }
}

fn reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn read_option(stream: &mut impl Read) -> Option<u32> {
    let mut header = [0; 16];
    stream.read_exact(&mut header).ok()?;
    let field = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    let mut data = vec![0; usize::try_from(field(12)).unwrap()];
    stream.read_exact(&mut data).ok()?;
    Some(field(8))
}

/// Serves one client, over TLS if there is a configuration, and returns the port.
fn serve(config: Option<ServerConfig>) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = thread::spawn(move || {
        let mut stream: TcpStream = listener.accept().unwrap().0;
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        assert_eq!(read_option(&mut stream), Some(5));
        let Some(config) = config else {
            stream.write_all(&reply(5, (1 << 31) | 1, b"")).unwrap();
            return;
        };
        stream.write_all(&reply(5, 1, b"")).unwrap();
        let session = ServerConnection::new(Arc::new(config)).unwrap();
        let mut secured = StreamOwned::new(session, stream);
        if read_option(&mut secured) == Some(7) {
            let mut info = 0_u16.to_be_bytes().to_vec();
            info.extend(SIZE.to_be_bytes());
            info.extend(1_u16.to_be_bytes());
            let answer = [reply(7, 3, &info), reply(7, 1, b"")].concat();
            secured.write_all(&answer).unwrap();
            // The client ends the connection.
            let _ = secured.read(&mut [0; 1]);
        }
    });
    (port, serving)
}

/// The size of the export, and the certificate that the server showed.
fn agreed(
    config: Option<ServerConfig>,
    directory: &TempDir,
    name: &str,
) -> Result<(u64, ServerCertificate)> {
    let (port, serving) = serve(config);
    let directory = Some(directory.path());
    let uri = NbdUri::tls("127.0.0.1", Some(port), "x", directory, Some(name)).unwrap();
    let deadline = Deadline::after(Duration::from_secs(60));
    let stream = OwnedFd::from(TcpStream::connect(("127.0.0.1", port)).unwrap());
    let agreed = negotiate_in_user_space(&stream, uri.server(), uri.export(), deadline)
        .and_then(|(export, session)| Ok((export.size, session?.1)));
    drop(stream);
    serving.join().unwrap();
    agreed
}

#[test]
fn an_export_is_agreed_on_in_tls() {
    let Authority { directory, server } = Authority::new("localhost");
    let (size, certificate) = agreed(Some(server), &directory, "localhost").unwrap();
    assert_eq!(size, SIZE);
    // The default subject of rcgen.
    assert_eq!(certificate.subject, "CN=rcgen self signed cert");
    let end = humantime::format_rfc3339_seconds(certificate.valid_until);
    assert_eq!(end.to_string(), "4096-01-01T00:00:00Z");
}

#[test]
fn a_server_of_another_name_or_another_authority_is_not_the_one() {
    let Authority { directory, server } = Authority::new("localhost");
    let other_name = agreed(Some(server.clone()), &directory, "elsewhere").unwrap_err();
    let other = Authority::new("localhost");
    let other_authority = agreed(Some(server), &other.directory, "localhost").unwrap_err();
    for (error, hint) in [
        (other_name, "tls-hostname="),
        (other_authority, "ca-cert.pem"),
    ] {
        assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
        assert_eq!(error.stage(), Some(Stage::Tls));
        assert!(error.to_string().contains(hint), "{error}");
    }
}

#[test]
fn a_server_that_wants_a_certificate_gets_it_or_is_understood() {
    let asks = || Authority::new("localhost").asks_for_client("client");
    let Authority { directory, server } = asks();
    let error = agreed(Some(server), &directory, "localhost").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
    assert!(error.to_string().contains("client-cert.pem"), "{error}");
    let Authority { directory, server } = asks().gives_client_its_certificate();
    let (size, _) = agreed(Some(server), &directory, "localhost").unwrap();
    assert_eq!(size, SIZE);
}

#[test]
fn a_server_without_tls_is_spoken_to_no_further() {
    let directory = Authority::new("localhost").directory;
    let error = agreed(None, &directory, "localhost").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert!(error.to_string().contains("TLS"), "{error}");
}

#[test]
fn a_directory_that_lacks_a_file_is_refused_and_the_file_named() {
    let directory = TempDir::new().unwrap();
    let read = || {
        let deadline = Deadline::after(Duration::from_secs(60));
        Certificates::read(Some(directory.path()), deadline).unwrap_err()
    };
    assert!(read().path().unwrap().ends_with("ca-cert.pem"));
    fs::write(directory.path().join("client-cert.pem"), "x").unwrap();
    assert!(read().path().unwrap().ends_with("client-key.pem"));
    fs::write(directory.path().join("client-key.pem"), "x").unwrap();
    assert_eq!(read().kind(), ErrorKind::InvalidInput);
}
