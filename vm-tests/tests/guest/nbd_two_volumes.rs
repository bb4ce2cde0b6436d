//! New connections that lead to another volume than a device's existing ones.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use lunbd::engine::{HealOutcome, HealReport, Healer, NbdOptions, ResizeRequest};
use lunbd::error::Stage;
use lunbd::{AttachRequest, Deadline, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_agent::healed_in_time;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::relay::Relay;

const SMALL: u64 = 16 << 20;
const LARGE: u64 = 24 << 20;
const LIMIT: Duration = Duration::from_secs(60);

/// Starts a server of a store, of one of two kinds.
type Serve = fn(&Store) -> NbdServer;

fn nbdkit(store: &Store) -> NbdServer {
    let path = store.path().to_str().unwrap();
    NbdServer::nbdkit(At::tcp(), &["--export=disk", "file", path])
}

fn qemu_nbd(store: &Store) -> NbdServer {
    NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[])
}

fn formatted(size: u64) -> Store {
    let store = Store::sparse(size);
    guest::run(&["mkfs.ext4", "-q", "-F", store.path().to_str().unwrap()]);
    store
}

/// A store whose first bytes contain no known names.
fn unnamed(size: u64, with: u8) -> Store {
    let store = Store::sparse(size);
    let mut file = OpenOptions::new().write(true).open(store.path()).unwrap();
    file.write_all(&[with; 4096]).unwrap();
    store
}

/// A store that has the first MiB of `original`, and other bytes behind it.
fn copy_of_first_mib(original: &Store) -> Store {
    const MIB: usize = 1 << 20;
    let mut bytes = fs::read(original.path()).unwrap();
    bytes[MIB..].iter_mut().for_each(|byte| *byte ^= 0xa5);
    let copy = Store::sparse(0);
    fs::write(copy.path(), bytes).unwrap();
    copy
}

fn options(connections: u16) -> NbdOptions {
    NbdOptions::default()
        .connections(NonZeroU16::new(connections).unwrap())
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(Duration::from_secs(60))
}

fn source(relay: &Relay) -> Source {
    relay.at().uri("disk").parse().unwrap()
}

fn heal(engine: &Engine, source: &Source, options: &NbdOptions) -> HealReport {
    let limit = Deadline::after(Duration::from_secs(30));
    engine.heal_source(source, options, limit).unwrap()
}

fn shown(node: &Path) -> u64 {
    let name = node.file_name().unwrap().to_str().unwrap();
    let sectors = fs::read_to_string(format!("/sys/block/{name}/size")).unwrap();
    sectors.trim().parse::<u64>().unwrap() * 512
}

/// The device's first bytes, read past the page cache.
fn first_bytes(node: &Path) -> Vec<u8> {
    let disk = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(node)
        .unwrap();
    let mut page = memmap2::MmapMut::map_anon(4096).unwrap();
    disk.read_exact_at(&mut page, 0).unwrap();
    page.to_vec()
}

fn assert_has_first_bytes_of(node: &Path, store: &Store) {
    let mut expected = vec![0; 4096];
    let file = File::open(store.path()).unwrap();
    file.read_exact_at(&mut expected, 0).unwrap();
    // One read for each connection, and some more.
    for _ in 0..8 {
        assert!(first_bytes(node) == expected, "the bytes of another volume");
    }
}

/// Requires that these connections are live, and that the relay has seen the end of every other
/// one.
fn assert_stand_alone(relay: &Relay, clients: &[SocketAddr]) {
    guest::wait_until("the new connections to be closed", LIMIT, || {
        (relay.clients().len() <= clients.len()).then_some(())
    });
    assert_eq!(relay.clients(), clients);
}

/// One of two connections dies, and the address leads to another volume of the same size. No
/// write may reach that volume, and the device may get nothing of it.
fn a_dead_connection_is_replaced_by_none_to_another_volume(
    serve: Serve,
    right: &Store,
    wrong: &Store,
) {
    let before = fs::read(wrong.path()).unwrap();
    let (right_server, wrong_server) = (serve(right), serve(wrong));
    let relay = Relay::to(&right_server);
    let (engine, source, options) = (engine(), source(&relay), options(2));
    let request = AttachRequest::new(source.clone()).nbd(options.clone());
    let node = engine.attach(&request, soon()).unwrap().node;
    // Like a virtual machine, this writer may write anything.
    let opened = OpenOptions::new().write(true).open(&node).unwrap();
    relay.lead_to(&wrong_server);
    relay.cut(1);
    let left = relay.clients();
    assert_eq!(left.len(), 1);
    for options in [&options, &options.clone().accept_content()] {
        let healing = heal(&engine, &source, options);
        let HealOutcome::Degraded(error) = &healing.outcome else {
            panic!("{healing:?}");
        };
        assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
        assert_stand_alone(&relay, &left);
        assert_has_first_bytes_of(&node, right);
    }
    relay.lead_to(&right_server);
    let healing = heal(&engine, &source, &options);
    assert!(
        matches!(healing.outcome, HealOutcome::Adopted(_)),
        "{healing:?}"
    );
    // The relay sees later that its client has closed a connection.
    guest::wait_until("no more connections than the device has", LIMIT, || {
        (relay.clients().len() <= 2).then_some(())
    });
    assert_eq!(relay.clients().len(), 2);
    assert_has_first_bytes_of(&node, right);
    drop(opened);
    assert!(engine.detach(source, soon()).unwrap().changed);
    assert!(fs::read(wrong.path()).unwrap() == before, "written to");
}

#[test]
fn a_heal_never_replaces_a_dead_nbdkit_connection_by_one_to_another_volume() {
    let _module = NbdModule::with_backend_ids(1);
    let (right, wrong) = (formatted(SMALL), formatted(SMALL));
    a_dead_connection_is_replaced_by_none_to_another_volume(nbdkit, &right, &wrong);
    let (right, wrong) = (unnamed(SMALL, 1), unnamed(SMALL, 2));
    a_dead_connection_is_replaced_by_none_to_another_volume(nbdkit, &right, &wrong);
}

#[test]
fn a_heal_never_replaces_a_dead_connection_by_one_to_a_volume_with_the_same_first_mib() {
    let _module = NbdModule::with_backend_ids(1);
    let right = formatted(SMALL);
    let wrong = copy_of_first_mib(&right);
    a_dead_connection_is_replaced_by_none_to_another_volume(nbdkit, &right, &wrong);
}

#[test]
fn a_heal_never_replaces_a_dead_qemu_nbd_connection_by_one_to_another_volume() {
    let _module = NbdModule::with_backend_ids(1);
    let (right, wrong) = (formatted(SMALL), formatted(SMALL));
    a_dead_connection_is_replaced_by_none_to_another_volume(qemu_nbd, &right, &wrong);
}

/// The address leads to another, larger volume.
fn a_device_does_not_grow_into(serve: Serve, right: &Store, connections: u16, wrong: &NbdServer) {
    let right_server = serve(right);
    let relay = Relay::to(&right_server);
    let (engine, source) = (engine(), source(&relay));
    // No connection may end for a request that its server is slow to answer.
    let options = options(connections).io_timeout(Duration::from_secs(60));
    let request = AttachRequest::new(source.clone()).nbd(options);
    let node = engine.attach(&request, soon()).unwrap().node;
    let before = relay.clients();
    relay.lead_to(wrong);
    let limit = Deadline::after(Duration::from_secs(30));
    let refused = engine.resize(&ResizeRequest::new(source.clone()), limit);
    let error = refused.unwrap_err();
    let kinds = [ErrorKind::IdentityMismatch, ErrorKind::NotReady];
    assert!(kinds.contains(&error.kind()), "{error}");
    assert_stand_alone(&relay, &before);
    assert_eq!(shown(&node), SMALL);
    assert_has_first_bytes_of(&node, right);
    assert!(engine.detach(source, soon()).unwrap().changed);
}

fn a_resize_to_another_volume_changes_nothing(serve: Serve) {
    let (right, wrong) = (formatted(SMALL), formatted(LARGE));
    let before = fs::read(wrong.path()).unwrap();
    let wrong_server = serve(&wrong);
    for connections in [1, 2] {
        a_device_does_not_grow_into(serve, &right, connections, &wrong_server);
    }
    assert!(fs::read(wrong.path()).unwrap() == before, "written to");
}

#[test]
fn a_resize_to_another_volume_of_nbdkit_changes_nothing_and_ends_no_connection() {
    let _module = NbdModule::with_backend_ids(1);
    a_resize_to_another_volume_changes_nothing(nbdkit);
}

#[test]
fn a_resize_to_another_volume_of_qemu_nbd_changes_nothing_and_ends_no_connection() {
    let _module = NbdModule::with_backend_ids(1);
    a_resize_to_another_volume_changes_nothing(qemu_nbd);
}

/// A blank nbdkit volume of this many bytes, of which only the first `SMALL` can be read.
fn partly_readable(size: u64) -> NbdServer {
    let size = format!("get_size=echo {size}");
    let read = format!(
        "pread=if [ $4 -lt {SMALL} ]; then head -c $3 /dev/zero; else echo EIO lost >&2; exit 1; fi"
    );
    let others = ["can_write=exit 0", "can_multi_conn=exit 0", "pwrite=exit 1"];
    let arguments = [&["--export=disk", "eval", &size, &read][..], &others].concat();
    NbdServer::nbdkit(At::tcp(), &arguments)
}

#[test]
fn a_resize_to_a_size_that_its_server_does_not_serve_changes_nothing_and_ends_no_connection() {
    let _module = NbdModule::with_backend_ids(1);
    let (blank, wrong) = (Store::sparse(SMALL), partly_readable(LARGE));
    for connections in [1, 2] {
        a_device_does_not_grow_into(|_| partly_readable(SMALL), &blank, connections, &wrong);
    }
}

/// The address leads one connection to a volume, and the next one to another.
fn an_attach_over_two_connections_is_refused(first: &Store, second: &Store) {
    let before = [first, second].map(|store| fs::read(store.path()).unwrap());
    let servers = [nbdkit(first), nbdkit(second)];
    let relay = Relay::to(&servers[0]);
    relay.lead_in_turns_to(&[&servers[0], &servers[1]]);
    let (engine, source) = (engine(), source(&relay));
    let request = AttachRequest::new(source).nbd(options(2));
    let error = engine.attach(&request, soon()).expect_err("two volumes");
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    assert_eq!(error.stage(), Some(Stage::Identify), "{error}");
    assert_stand_alone(&relay, &[]);
    let after = [first, second].map(|store| fs::read(store.path()).unwrap());
    assert!(before == after, "written to");
}

#[test]
fn an_attach_whose_connections_lead_to_two_volumes_without_a_name_is_refused() {
    let _module = NbdModule::with_backend_ids(1);
    an_attach_over_two_connections_is_refused(&unnamed(SMALL, 1), &unnamed(SMALL, 2));
}

#[test]
fn an_attach_whose_connections_lead_to_a_volume_and_a_copy_of_its_first_mib_is_refused() {
    let _module = NbdModule::with_backend_ids(1);
    let original = formatted(SMALL);
    an_attach_over_two_connections_is_refused(&original, &copy_of_first_mib(&original));
}

/// The healer's next report.
fn next(healer: &mut Healer<'_>) -> HealReport {
    let mut reports = healer.next(Deadline::after(LIMIT)).unwrap();
    reports.pop().expect("a report")
}

#[test]
fn a_healer_keeps_a_device_of_another_process_until_its_lost_connection_is_replaced() {
    let _module = NbdModule::with_backend_ids(1);
    let (right, wrong) = (unnamed(SMALL, 1), unnamed(SMALL, 2));
    let (right_server, mut wrong_server) = (nbdkit(&right), nbdkit(&wrong));
    let relay = Relay::to(&right_server);
    let (first, source) = (engine(), source(&relay));
    let request = AttachRequest::new(source.clone()).nbd(options(2));
    let node = first.attach(&request, soon()).unwrap().node;
    drop(first);
    guest::udevd::settle();
    let engine = engine();
    let mut healer = engine.healer(soon()).unwrap();
    let healing = next(&mut healer);
    assert!(healing.outcome.serves(), "{healing:?}");
    relay.lead_to(&wrong_server);
    relay.cut(1);
    let left = relay.clients();
    let healing = healed_in_time(|| next(&mut healer));
    let HealOutcome::Degraded(error) = healing.outcome else {
        panic!("the lost connection is not told");
    };
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    wrong_server.kill();
    guest::wait_until("the report that no server answers", LIMIT, || {
        let HealOutcome::Degraded(error) = next(&mut healer).outcome else {
            panic!("the lost connection is not told");
        };
        (error.kind() == ErrorKind::Unreachable).then_some(())
    });
    assert_stand_alone(&relay, &left[..1]);
    relay.lead_to(&right_server);
    guest::wait_until("the lost connection to be replaced", LIMIT, || {
        matches!(next(&mut healer).outcome, HealOutcome::Adopted(_)).then_some(())
    });
    // The kernel did not take a third one.
    guest::wait_until("two connections", LIMIT, || {
        (relay.clients().len() == 2).then_some(())
    });
    assert_has_first_bytes_of(&node, &right);
    drop(healer);
    assert!(engine.detach(source, soon()).unwrap().changed);
}
