//! Servers that vanish: no packet arrives any more, and no end of a connection is announced.

use std::time::{Duration, Instant};

use lunbd::engine::{HealOutcome, NbdOptions};
use lunbd::{AttachRequest, Attachment, Deadline, Engine, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::loopback::ImpairedLoopback;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store, in_flight};
use vm_tests::guest::writer::Writer;

const SIZE: u64 = 64 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// Much shorter than the time after which the kernel gives up other connections: 30 s.
const IO_TIMEOUT: Duration = Duration::from_secs(5);

/// A server of a store on TCP, of one of two kinds.
type Serve = fn(&Store) -> NbdServer;

fn nbdkit(store: &Store) -> NbdServer {
    let path = store.path().to_str().unwrap();
    NbdServer::nbdkit(At::tcp(), &["--export=disk", "file", path])
}

fn qemu_nbd(store: &Store) -> NbdServer {
    NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[])
}

fn attach(engine: &Engine, server: &NbdServer) -> (Source, Attachment) {
    let source: Source = server.uri("disk").parse().unwrap();
    let options = NbdOptions::default()
        .io_timeout(IO_TIMEOUT)
        .dead_connection_timeout(Duration::from_secs(120));
    let request = AttachRequest::new(source.clone()).nbd(options);
    let attachment = engine.attach(&request, soon()).expect("an attach");
    (source, attachment)
}

fn serves_again(engine: &Engine) {
    guest::wait_until("the device to serve again", LIMIT, || {
        let healings = engine.heal(Deadline::after(Duration::from_secs(20)));
        let healings = healings.unwrap();
        matches!(healings[0].outcome, HealOutcome::Adopted(_)).then_some(())
    });
}

/// The device has no I/O, so TCP alone can notice it.
fn an_idle_connection_ends_in_time(serve: Serve) {
    let store = Store::sparse(SIZE);
    let server = serve(&store);
    let engine = engine();
    let (source, attachment) = attach(&engine, &server);
    an_idle_connection_of_a_device_ends_in_time(&engine, &source, &attachment);
}

fn an_idle_connection_of_a_device_ends_in_time(
    engine: &Engine,
    source: &Source,
    attachment: &Attachment,
) {
    let mut healer = engine.healer(soon()).unwrap();
    assert!(healer.next(soon()).unwrap()[0].outcome.serves());
    guest::udevd::settle();
    let lost = ImpairedLoopback::silent();
    let start = Instant::now();
    guest::wait_until("the kernel to give the connection up", LIMIT, || {
        let limit = Deadline::after(Duration::from_secs(1));
        (!healer.next(limit).unwrap().is_empty()).then_some(())
    });
    let after = start.elapsed();
    guest::tell(&format!("the connection ended after {after:?}"));
    // The first probe goes out after 10 s and the second 5 s later. The healer then dials for
    // 5 s at most.
    assert!(after < Duration::from_secs(28), "{after:?}");
    assert_eq!(in_flight(&attachment.node), 0, "the device was not idle");
    drop(lost);
    serves_again(engine);
    drop(healer);
    assert!(engine.detach(source.clone(), soon()).unwrap().changed);
}

/// Only the process that attached the device was given the timeout.
#[test]
fn an_idle_connection_that_another_process_has_made_anew_ends_by_the_io_timeout_too() {
    let _module = NbdModule::with_backend_ids(1);
    let store = Store::sparse(SIZE);
    let mut server = nbdkit(&store);
    let first = engine();
    let (source, attachment) = attach(&first, &server);
    drop(first);
    server.kill();
    server.start();
    let engine = engine();
    serves_again(&engine);
    an_idle_connection_of_a_device_ends_in_time(&engine, &source, &attachment);
}

#[test]
fn an_idle_connection_to_a_nbdkit_that_vanished_ends_by_the_io_timeout() {
    let _module = NbdModule::with_backend_ids(1);
    an_idle_connection_ends_in_time(nbdkit);
}

#[test]
fn an_idle_connection_to_a_qemu_nbd_that_vanished_ends_by_the_io_timeout() {
    let _module = NbdModule::with_backend_ids(1);
    an_idle_connection_ends_in_time(qemu_nbd);
}

fn a_writer_waits_and_goes_on(serve: Serve) {
    let store = Store::sparse(SIZE);
    let server = serve(&store);
    let engine = engine();
    let (source, attachment) = attach(&engine, &server);
    let mut healer = engine.healer(soon()).unwrap();
    assert!(healer.next(soon()).unwrap()[0].outcome.serves());
    let writer = Writer::start(&attachment.node);
    writer.goes_on();
    let lost = ImpairedLoopback::silent();
    let written = writer.written();
    let news = healer.next(soon()).unwrap();
    assert!(
        !news.is_empty() && news.iter().all(|healing| !healing.outcome.serves()),
        "{news:?}"
    );
    // The reply to one write may have arrived before the loss.
    assert!(writer.written() <= written + 1);
    drop(lost);
    serves_again(&engine);
    writer.goes_on();
    writer.end();
    drop(healer);
    assert!(engine.detach(source, soon()).unwrap().changed);
}

#[test]
fn a_writer_waits_for_a_nbdkit_that_vanished_and_continues_when_it_is_back() {
    let _module = NbdModule::with_backend_ids(1);
    a_writer_waits_and_goes_on(nbdkit);
}

#[test]
fn a_writer_waits_for_a_qemu_nbd_that_vanished_and_continues_when_it_is_back() {
    let _module = NbdModule::with_backend_ids(1);
    a_writer_waits_and_goes_on(qemu_nbd);
}
