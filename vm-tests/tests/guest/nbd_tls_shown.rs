//! What lunbd shows of the TLS of a device, and why a handshake fails.

use std::time::{Duration, SystemTime};

use lunbd::engine::{DetachVolume, NbdOptions};
use lunbd::error::Stage;
use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Event, Options, Reconciler};
use lunbd::{AttachRequest, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::certificates::Certificates;
use vm_tests::guest::directory::Directory;
use vm_tests::guest::nbd_server::{NbdModule, Store};
use vm_tests::guest::tls_servers::{address, nbdkit, qemu_nbd, source};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Stops the reconciler, also if the test fails: otherwise its thread would block the test.
struct Stop<'a>(&'a Reconciler);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn volume() -> VolumeId {
    "pvc-1".parse().unwrap()
}

fn request_options() -> NbdOptions {
    NbdOptions::default().dead_connection_timeout(Duration::from_secs(120))
}

fn request(source: &Source) -> AttachRequest {
    AttachRequest::new(source.clone()).nbd(request_options())
}

#[test]
fn an_attach_and_a_later_process_show_the_tls_and_the_servers_certificate() {
    let _module = NbdModule::with_backend_ids(1);
    let certificates = Certificates::new("tls");
    let end = SystemTime::now() + 400 * DAY;
    certificates.renew_until(end);
    let store = Store::sparse(1 << 20);
    let server = nbdkit(&certificates, store.path(), &[]);
    let source = source(address(&server), "", &certificates);
    let place = Directory::new("journal");
    let agent = engine();
    let journal = agent.open_journal_at(&place, soon()).unwrap();
    let attachment = agent
        .attach_volume(&journal, &volume(), &request(&source), soon())
        .unwrap();
    let tls = attachment.tls().unwrap();
    assert_eq!(tls.to_string(), "1.3 chacha20-poly1305");
    assert_eq!(tls.certificate.subject, "CN=server");
    let differs = tls.certificate.time_left(end);
    assert!(differs <= Duration::from_secs(1), "{differs:?}");
    // An attach by a process that did not make the connection keeps the TLS in the record.
    drop((journal, agent));
    let agent = engine();
    let journal = agent.open_journal_at(&place, soon()).unwrap();
    let again = agent
        .attach_volume(&journal, &volume(), &request(&source), soon())
        .unwrap();
    assert_eq!((again.changed, again.tls()), (false, None));
    drop(journal);

    let journal = place.display().to_string();
    let shown = |arguments: &[&str]| {
        let output = guest::lunbd(&[&["status", "--journal", &journal], arguments].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let words = "pvc-1: TLS 1.3 chacha20-poly1305, the server's certificate (CN=server) is valid \
                 until ";
    let text = shown(&[]);
    assert!(text.contains(words), "{text}");
    let json: serde_json::Value = serde_json::from_str(&shown(&["--json"])).unwrap();
    let tls = &json["volumes"][0]["tls"];
    assert_eq!(tls["version"], "1.3", "{json}");
    assert_eq!(tls["certificate"]["subject"], "CN=server", "{json}");
    agent.detach(source, soon()).unwrap();
}

#[test]
fn after_a_heal_by_another_process_the_tls_of_the_earlier_connection_is_no_longer_shown() {
    let _module = NbdModule::with_backend_ids(1);
    let certificates = Certificates::new("tls");
    let store = Store::sparse(1 << 20);
    let mut server = nbdkit(&certificates, store.path(), &[]);
    let source = source(address(&server), "", &certificates);
    let place = Directory::new("journal");
    let agent = engine();
    let journal = agent.open_journal_at(&place, soon()).unwrap();
    agent
        .attach_volume(&journal, &volume(), &request(&source), soon())
        .unwrap();
    let shown = || {
        let volumes = agent.survey(&journal).unwrap();
        volumes[0].tls.as_ref().map(ToString::to_string)
    };
    assert_eq!(shown().as_deref(), Some("1.3 chacha20-poly1305"));
    server.kill();
    server.start();
    let healed = engine().heal_source(&source, &request_options(), soon());
    assert!(healed.as_ref().unwrap().outcome.serves(), "{healed:?}");
    for healing in agent.heal(soon()).unwrap() {
        assert!(healing.outcome.serves(), "{healing:?}");
    }
    assert_eq!(shown(), None);
    agent
        .attach_volume(&journal, &volume(), &request(&source), soon())
        .unwrap();
    assert_eq!(shown(), None);
    agent
        .detach_volume(&journal, &volume(), &DetachVolume::default(), soon())
        .unwrap();
}

#[test]
fn a_reconciler_tells_of_a_certificate_that_ends_soon_and_of_the_next_one() {
    let _module = NbdModule::with_backend_ids(1);
    let certificates = Certificates::new("tls");
    certificates.renew_until(SystemTime::now() + 20 * DAY);
    let store = Store::sparse(1 << 20);
    let mut server = nbdkit(&certificates, store.path(), &[]);
    let source = source(address(&server), "", &certificates);
    let place = Directory::new("journal");
    let agent = std::sync::Arc::new(engine());
    let journal = agent.open_journal_at(&place, soon()).unwrap();
    let reconciler = Reconciler::new(std::sync::Arc::clone(&agent), journal, Options::default());
    let mut events = reconciler.subscribe();
    let mut next_end = || loop {
        let event = events.next(soon()).expect("an event").event;
        println!("{event}");
        if let Event::CertificateEnds { certificate, .. } = event {
            return certificate.valid_until;
        }
    };
    std::thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let mut desired = Desired::default();
        desired.insert(volume(), &request(&source)).unwrap();
        reconciler.set(desired);
        let _stop = Stop(&reconciler);
        let first = next_end();
        server.kill();
        certificates.renew_until(SystemTime::now() + 10 * DAY);
        server.start();
        let second = next_end();
        assert!(second < first, "{second:?} {first:?}");
        reconciler.set(Desired::default());
        guest::wait_until(
            "the volume to be detached",
            Duration::from_secs(120),
            || reconciler.in_use().is_empty().then_some(()),
        );
        reconciler.stop();
        running.join().unwrap().unwrap();
    });
}

#[test]
fn each_reason_why_no_tls_is_agreed_on_has_its_kind_and_says_what_to_do() {
    let _module = NbdModule::with_backend_ids(1);
    let certificates = Certificates::new("tls");
    let store = Store::sparse(1 << 20);
    let engine = engine();
    let refused = |source: Source, kind: ErrorKind, hint: &str| {
        let attached = engine.attach(&AttachRequest::new(source), soon());
        let error = attached.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.stage(), Some(Stage::Tls), "{error}");
        assert!(error.to_string().contains(hint), "{error}");
    };
    let server = nbdkit(&certificates, store.path(), &[]);
    let right = source(address(&server), "", &certificates);
    let other_name = format!("{right}&tls-hostname=other.example");
    let other_name = other_name.parse().unwrap();
    refused(other_name, ErrorKind::IdentityMismatch, "tls-hostname=NAME");
    let others = Certificates::new("others");
    let other_authority = source(address(&server), "", &others);
    refused(other_authority, ErrorKind::IdentityMismatch, "ca-cert.pem");
    drop(server);

    certificates.renew_until(SystemTime::now() - DAY);
    let server = nbdkit(&certificates, store.path(), &[]);
    let expired = source(address(&server), "", &certificates);
    refused(expired, ErrorKind::IdentityMismatch, "has expired");
    drop(server);

    certificates.renew();
    let server = qemu_nbd(&certificates, store.path(), "NORMAL:-CHACHA20-POLY1305");
    let other_ciphers = source(address(&server), "disk", &certificates);
    // qemu-nbd ends the connection without an alert.
    refused(other_ciphers, ErrorKind::Unreachable, "ChaCha20-Poly1305");
}
