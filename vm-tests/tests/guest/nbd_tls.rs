//! NBD over TLS in the kernel.

use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroU16;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use lunbd::engine::{Flush, HealOutcome, NbdOptions, ResizeRequest};
use lunbd::error::Stage;
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::certificates::Certificates;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::tls_servers::{address, nbd_server, nbdkit, qemu_nbd, source};
use vm_tests::guest::writer::Writer;

const MIB: usize = 1 << 20;

/// The kernel waits for a new connection longer than a server takes to start: `nbd-server` took
/// more than a minute under emulation.
fn attach(engine: &Engine, source: &Source) -> Attachment {
    let options = NbdOptions::default()
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(Duration::from_secs(600));
    let request = AttachRequest::new(source.clone()).nbd(options);
    engine.attach(&request, soon()).expect("an attach")
}

fn pattern() -> Vec<u8> {
    b"this goes over the wire in no plain block. "
        .iter()
        .copied()
        .cycle()
        .take(2 * MIB)
        .collect()
}

/// Requires that data written through the device is in the server's file, and that reads return
/// the file's data.
fn carries(server: &NbdServer, certificates: &Certificates, store: &Store) {
    let engine = engine();
    let source = source(address(server), "disk", certificates);
    let Source::Nbd(uri) = &source else {
        unreachable!("just made");
    };
    let exports = lunbd::nbd::discover(uri.server(), soon()).unwrap();
    let size = exports[0].export.as_ref().unwrap().size;
    let attachment = attach(&engine, &source);
    assert_eq!((size, attachment.size), (8 * MIB as u64, size));
    let stored = File::options()
        .read(true)
        .write(true)
        .open(store.path())
        .unwrap();
    stored.write_all_at(&[7; 4096], 4 * MIB as u64).unwrap();
    let mut disk = File::options()
        .read(true)
        .write(true)
        .open(&attachment.node)
        .unwrap();
    disk.write_all(&pattern()).unwrap();
    disk.sync_all().unwrap();
    let mut block = [0; 4096];
    disk.read_exact_at(&mut block, 4 * MIB as u64).unwrap();
    assert!(block == [7; 4096], "what was read is not what is there");
    drop(disk);
    let detachment = engine.detach(source, soon()).unwrap();
    assert_eq!(detachment.flush, Some(Flush::Done));
    let written = fs::read(store.path()).unwrap();
    assert!(
        written.starts_with(&pattern()),
        "what was written is not there"
    );
}

#[test]
fn an_export_of_nbdkit_and_of_qemu_nbd_attaches_and_detaches_over_tls() {
    let _module = NbdModule::with_backend_ids(2);
    let certificates = Certificates::new("tls");
    let store = Store::sparse(8 * MIB as u64);
    carries(
        &nbdkit(&certificates, store.path(), &[]),
        &certificates,
        &store,
    );
    let store = Store::sparse(8 * MIB as u64);
    carries(
        &qemu_nbd(&certificates, store.path(), "NORMAL"),
        &certificates,
        &store,
    );
}

#[test]
fn a_server_that_asks_for_the_clients_certificate_gets_it_or_the_error_says_so() {
    let _module = NbdModule::with_backend_ids(2);
    let certificates = Certificates::new("tls");
    let store = Store::sparse(8 * MIB as u64);
    let server = nbdkit(&certificates, store.path(), &["--tls-verify-peer"]);
    let source = source(address(&server), "", &certificates);
    let engine = engine();
    let refused = engine
        .attach(&AttachRequest::new(source.clone()), soon())
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotPermitted, "{refused}");
    assert_eq!(refused.stage(), Some(Stage::Tls));
    certificates.give_to_client();
    attach(&engine, &source);
    engine.detach(source, soon()).unwrap();
}

#[test]
fn a_server_without_tls_and_one_of_another_authority_get_no_byte_of_the_volume() {
    let _module = NbdModule::with_backend_ids(2);
    let (certificates, others) = (Certificates::new("tls"), Certificates::new("other"));
    let store = Store::sparse(8 * MIB as u64);
    let plain = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let secured = nbdkit(&certificates, store.path(), &[]);
    let engine = engine();
    let refused = |server: &NbdServer| {
        let source = source(address(server), "", &others);
        engine
            .attach(&AttachRequest::new(source), soon())
            .unwrap_err()
    };
    let error = refused(&plain);
    assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
    let error = refused(&secured);
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    assert_eq!(error.stage(), Some(Stage::Tls));
    assert!(!Path::new("/sys/block/nbd0/pid").exists());
}

fn is_healed_after_a_kill(
    server: &mut NbdServer,
    certificates: &Certificates,
    engine: &Engine,
    writer: &Writer,
) {
    writer.goes_on();
    server.kill();
    certificates.renew();
    server.start();
    let healings = engine.heal(soon()).unwrap();
    assert!(
        matches!(healings[0].outcome, HealOutcome::Adopted(_)),
        "{healings:?}"
    );
    writer.goes_on();
}

#[test]
fn a_server_that_is_killed_under_a_writer_is_healed_over_tls_with_its_new_certificate() {
    let _module = NbdModule::with_backend_ids(2);
    let certificates = Certificates::new("tls");
    let store = Store::sparse(64 * MIB as u64);
    let mut server = nbdkit(&certificates, store.path(), &[]);
    let engine = engine();
    let source = source(address(&server), "", &certificates);
    let attachment = attach(&engine, &source);
    let writer = Writer::start(&attachment.node);
    for _ in 0..10 {
        is_healed_after_a_kill(&mut server, &certificates, &engine, &writer);
    }
    // A later process knows the certificates from the id that the kernel keeps.
    server.kill();
    server.start();
    let healings = guest::agent::engine().heal(soon()).unwrap();
    assert!(healings[0].outcome.serves(), "{healings:?}");
    writer.goes_on();
    writer.end();
    assert!(engine.detach(source, soon()).unwrap().changed);
}

/// `nbd-server` asks each client for a certificate where it has a certificate authority.
#[test]
fn an_nbd_server_serves_a_client_with_a_certificate_and_is_healed_over_tls_after_kills() {
    // The server makes DH parameters at each of its four starts.
    guest::time_limit(Duration::from_mins(20));
    let _module = NbdModule::with_backend_ids(2);
    let certificates = Certificates::new("tls");
    let store = Store::sparse(8 * MIB as u64);
    let mut server = nbd_server(&certificates, &[("disk", store.path())]);
    let engine = engine();
    let source = source(address(&server), "disk", &certificates);
    let request = AttachRequest::new(source.clone());
    let refused = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotPermitted, "{refused}");
    assert_eq!(refused.stage(), Some(Stage::Tls));

    certificates.give_to_client();
    carries(&server, &certificates, &store);
    let attachment = attach(&engine, &source);
    let writer = Writer::start(&attachment.node);
    for _ in 0..3 {
        is_healed_after_a_kill(&mut server, &certificates, &engine, &writer);
    }
    writer.end();
    assert!(engine.detach(source, soon()).unwrap().changed);
}

#[test]
fn four_connections_carry_tls_each_with_keys_of_its_own() {
    let _module = NbdModule::with_backend_ids(2);
    let certificates = Certificates::new("tls");
    let store = Store::sparse(64 * MIB as u64);
    let mut server = nbdkit(&certificates, store.path(), &[]);
    let engine = engine();
    let source = source(address(&server), "", &certificates);
    let options = NbdOptions::default()
        .connections(NonZeroU16::new(4).unwrap())
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(Duration::from_secs(60));
    let request = AttachRequest::new(source.clone()).nbd(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    assert_eq!(server.connections(), 4);
    let writer = Writer::start(&attachment.node);
    writer.goes_on();
    server.kill();
    server.start();
    let healings = engine.heal(soon()).unwrap();
    assert!(healings[0].outcome.serves(), "{healings:?}");
    writer.goes_on();
    assert_eq!(server.connections(), 4);
    writer.end();
    assert!(engine.detach(source, soon()).unwrap().changed);
}

fn grows(
    (server, export): (&NbdServer, &str),
    certificates: &Certificates,
    store: &Store,
    connections: u16,
) {
    let (small, large) = (8 * MIB as u64, 24 * MIB as u64);
    let engine = engine();
    let source = source(address(server), export, certificates);
    let options = NbdOptions::default()
        .connections(NonZeroU16::new(connections).unwrap())
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(Duration::from_secs(60));
    let request = AttachRequest::new(source.clone()).nbd(options);
    let node = engine.attach(&request, soon()).unwrap().node;
    let stored = File::options()
        .read(true)
        .write(true)
        .open(store.path())
        .unwrap();
    stored.set_len(large).unwrap();
    let resized = engine.resize(&ResizeRequest::new(source.clone()), soon());
    let resized = resized.unwrap();
    assert_eq!((resized.old_size, resized.size), (small, large));
    let (block, last) = ([0xa5; 4096], large - 4096);
    let disk = File::options().write(true).open(&node).unwrap();
    disk.write_all_at(&block, last).unwrap();
    disk.sync_all().unwrap();
    let mut found = [0; 4096];
    stored.read_exact_at(&mut found, last).unwrap();
    assert!(found == block, "the server has other bytes at {last}");
    drop(disk);
    assert!(engine.detach(source, soon()).unwrap().changed);
}

/// nbdkit serves an old connection the old size, so the connections are replaced.
#[test]
fn a_device_of_nbdkit_grows_over_tls_with_one_connection_and_with_two() {
    let _module = NbdModule::with_backend_ids(1);
    let certificates = Certificates::new("tls");
    for connections in [1, 2] {
        let store = Store::sparse(8 * MIB as u64);
        let server = nbdkit(&certificates, store.path(), &[]);
        grows((&server, "disk"), &certificates, &store, connections);
    }
}

/// `nbd-server` looks at the size of its file for each client.
#[test]
fn a_device_of_nbd_server_grows_over_tls_with_one_connection_and_with_two() {
    let _module = NbdModule::with_backend_ids(1);
    let certificates = Certificates::new("tls");
    certificates.give_to_client();
    let volumes = [(1, "one"), (2, "two")];
    let volumes = volumes.map(|volume| (volume, Store::sparse(8 * MIB as u64)));
    let exports: Vec<(&str, &Path)> = volumes
        .iter()
        .map(|((_, name), it)| (*name, it.path()))
        .collect();
    let server = nbd_server(&certificates, &exports);
    for ((connections, export), store) in &volumes {
        grows((&server, export), &certificates, store, *connections);
    }
}
