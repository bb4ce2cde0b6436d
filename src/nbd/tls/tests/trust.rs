//! Which certificates prove a server, and until when.

use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

use super::*;
use crate::error::Retry;

type Issuer = CertifiedIssuer<'static, KeyPair>;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn params(name: &str, end: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    let since = end.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    params.not_after = date_time_ymd(1970, 1, 1) + since;
    params
}

fn issuer(name: &str, end: SystemTime, above: Option<&Issuer>) -> Issuer {
    let mut params = params(name, end);
    params.subject_alt_names.clear();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate().unwrap();
    match above {
        Some(above) => CertifiedIssuer::signed_by(params, key, above).unwrap(),
        None => CertifiedIssuer::self_signed(params, key).unwrap(),
    }
}

/// The server's part, and a directory that trusts `root`.
fn trusting(
    root: &Issuer,
    issuer: &Issuer,
    params: &CertificateParams,
    between: &[&Issuer],
) -> (ServerConfig, TempDir) {
    let key = KeyPair::generate().unwrap();
    let own = params.signed_by(&key, issuer).unwrap();
    let mut chain = vec![own.der().clone()];
    chain.extend(between.iter().map(|issuer| issuer.der().clone()));
    let provider = Arc::new(ring::default_provider());
    let server = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key.der())
        .unwrap();
    let directory = TempDir::new().unwrap();
    fs::write(directory.path().join("ca-cert.pem"), root.pem()).unwrap();
    (server, directory)
}

fn revoke(issuer: &Issuer, serial: u64, directory: &TempDir) {
    let revoked = RevokedCertParams {
        serial_number: SerialNumber::from(serial),
        revocation_time: date_time_ymd(2024, 1, 1),
        reason_code: None,
        invalidity_date: None,
    };
    let list = CertificateRevocationListParams {
        this_update: date_time_ymd(2024, 1, 1),
        next_update: date_time_ymd(2024, 2, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: vec![revoked],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let list = list.signed_by(issuer).unwrap();
    fs::write(directory.path().join("ca-crl.pem"), list.pem().unwrap()).unwrap();
}

#[test]
fn a_server_whose_certificate_its_authority_has_revoked_is_refused() {
    let end = SystemTime::now() + 400 * DAY;
    let root = issuer("root", end, None);
    let mut own = params("server", end);
    own.serial_number = Some(SerialNumber::from(7));
    let (server, directory) = trusting(&root, &root, &own, &[]);
    let attempt = || agreed(Some(server.clone()), &directory, "localhost");
    // An outdated list of another certificate does no harm.
    revoke(&root, 8, &directory);
    attempt().unwrap();
    // The list of another authority says nothing of this one's certificates.
    revoke(&issuer("another", end, None), 7, &directory);
    attempt().unwrap();
    revoke(&root, 7, &directory);
    let error = attempt().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    assert!(error.to_string().contains("was revoked"), "{error}");
}

#[test]
fn a_revocation_list_that_cannot_be_read_keeps_every_server_away() {
    let directory = Authority::new("localhost").directory;
    fs::write(directory.path().join("ca-crl.pem"), "no list").unwrap();
    let deadline = Deadline::after(Duration::from_secs(60));
    let error = Certificates::read(Some(directory.path()), deadline).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.path().unwrap().ends_with("ca-crl.pem"), "{error}");
}

#[test]
fn a_certificate_ends_with_the_intermediate_one_on_which_it_depends() {
    let (soon, late) = (SystemTime::now() + 10 * DAY, SystemTime::now() + 400 * DAY);
    let root = issuer("root", late + DAY, None);
    let shown_end = |intermediate_end, more: &[&Issuer]| {
        let intermediate = issuer("intermediate", intermediate_end, Some(&root));
        let between = [&[&intermediate], more].concat();
        let (server, directory) = trusting(&root, &intermediate, &params("server", late), &between);
        let (_, certificate) = agreed(Some(server), &directory, "localhost").unwrap();
        certificate.valid_until
    };
    let is_about = |end: SystemTime, expected: SystemTime| {
        let (earlier, later) = (end.min(expected), end.max(expected));
        later.duration_since(earlier).unwrap() <= Duration::from_secs(2)
    };
    assert!(is_about(shown_end(soon, &[]), soon));
    assert!(is_about(shown_end(late + DAY, &[]), late));
    // The server sends a certificate that proves nothing of it.
    let unrelated = issuer("unrelated", soon, None);
    assert!(is_about(shown_end(late + DAY, &[&unrelated]), late));
}

#[test]
fn a_certificates_subject_is_shown_without_control_characters() {
    let end = SystemTime::now() + 400 * DAY;
    let root = issuer("root", end, None);
    let own = params("a\u{9b}31m\u{202e}b, \u{fc}", end);
    let (server, directory) = trusting(&root, &root, &own, &[]);
    let (_, certificate) = agreed(Some(server), &directory, "localhost").unwrap();
    assert_eq!(certificate.subject, "CN=a\\u{9b}31m\\u{202e}b\\, \u{fc}");
}

#[test]
fn a_certificate_whose_serial_number_is_longer_than_the_standard_allows_is_shown() {
    let end = SystemTime::now() + 400 * DAY;
    let root = issuer("root", end, None);
    let mut own = params("server", end);
    own.serial_number = Some(SerialNumber::from(vec![0x5a; 24]));
    let (server, directory) = trusting(&root, &root, &own, &[]);
    let (_, certificate) = agreed(Some(server), &directory, "localhost").unwrap();
    assert_eq!(certificate.subject, "CN=server");
}

#[test]
fn a_file_server_that_does_not_answer_costs_one_thread_however_often_a_server_is_dialled() {
    let Authority { directory, .. } = Authority::new("localhost");
    let at = |name: &str| directory.path().join(name);
    fs::rename(at("ca-cert.pem"), at("right.pem")).unwrap();
    // An open of it waits for a writer.
    nix::unistd::mkfifo(&at("ca-cert.pem"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let read = |limit| Certificates::read(Some(directory.path()), Deadline::after(limit));
    let error = read(Duration::from_millis(50)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    let error = read(Duration::from_millis(50)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Quarantined, "{error}");
    assert!(error.to_string().contains("has not returned"), "{error}");
    // Another directory is read.
    let other = Authority::new("localhost").directory;
    Certificates::read(Some(other.path()), Deadline::after(Duration::from_secs(60))).unwrap();
    let writer = fs::File::options()
        .write(true)
        .open(at("ca-cert.pem"))
        .unwrap();
    fs::rename(at("right.pem"), at("ca-cert.pem")).unwrap();
    drop(writer);
    while let Err(error) = read(Duration::from_secs(60)) {
        assert_eq!(error.kind(), ErrorKind::Quarantined, "{error}");
        thread::yield_now();
    }
}

#[test]
fn what_a_file_or_the_servers_settings_prevent_is_tried_again() {
    let Authority { directory, .. } = Authority::new("localhost");
    let error = agreed(None, &directory, "localhost").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
    assert_eq!(error.stage(), Some(Stage::Tls), "{error}");
    assert_eq!(error.retry(), Retry::AfterChange, "{error}");
    fs::write(directory.path().join("client-cert.pem"), "x").unwrap();
    let deadline = Deadline::after(Duration::from_secs(60));
    let error = Certificates::read(Some(directory.path()), deadline).unwrap_err();
    assert!(error.path().unwrap().ends_with("client-key.pem"), "{error}");
    assert_eq!(error.retry(), Retry::AfterChange, "{error}");
}

#[test]
fn a_server_that_stops_after_it_was_shown_a_certificate_is_dialled_again() {
    let Authority { directory, server } = Authority::new("localhost")
        .asks_for_client("client")
        .gives_client_its_certificate();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = thread::spawn(move || {
        let mut stream: TcpStream = listener.accept().unwrap().0;
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        assert_eq!(read_option(&mut stream), Some(5));
        stream.write_all(&reply(5, 1, b"")).unwrap();
        let mut session = ServerConnection::new(Arc::new(server)).unwrap();
        while session.is_handshaking() {
            session.complete_io(&mut stream).unwrap();
        }
        // It has accepted the certificate, and is killed before it answers.
    });
    let certificates = Some(directory.path());
    let uri = NbdUri::tls(
        "127.0.0.1",
        Some(port),
        "x",
        certificates,
        Some("localhost"),
    )
    .unwrap();
    let deadline = Deadline::after(Duration::from_secs(60));
    let stream = OwnedFd::from(TcpStream::connect(("127.0.0.1", port)).unwrap());
    let error = negotiate_in_user_space(&stream, uri.server(), uri.export(), deadline).unwrap_err();
    serving.join().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("client-cert.pem"), "{error}");
}

#[test]
fn a_certificate_without_alternative_names_and_one_of_an_authority_are_refused_with_their_reason() {
    let end = SystemTime::now() + 400 * DAY;
    let root = issuer("root", end, None);
    let mut nameless = params("localhost", end);
    nameless.subject_alt_names.clear();
    let mut own_authority = params("localhost", end);
    own_authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    for (own, hint) in [
        (nameless, "no subjectAltName"),
        (own_authority, "is an authority's"),
    ] {
        let (server, directory) = trusting(&root, &root, &own, &[]);
        let error = agreed(Some(server), &directory, "localhost").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
        assert!(error.to_string().contains(hint), "{error}");
    }
}

#[test]
fn a_directory_with_a_revocation_list_alone_has_the_systems_authorities() {
    let directory = tempfile::tempdir().unwrap();
    let root = issuer("root", SystemTime::now() + 400 * DAY, None);
    revoke(&root, 7, &directory);
    let deadline = Deadline::after(Duration::from_secs(60));
    match Certificates::read(Some(directory.path()), deadline) {
        Ok(read) => assert_eq!(read.revoked.len(), 1),
        Err(error) => {
            let message = error.to_string();
            let expected = "the system has no certificate authorities";
            assert!(message.contains(expected), "{message}");
        }
    }
}
