//! The connections that replace dead ones, and those that do not, with two kinds of server.

use std::num::NonZeroU16;
use std::thread;
use std::time::{Duration, Instant};

use lunbd::engine::{HealOutcome, HealReport, NbdOptions};
use lunbd::{AttachRequest, Deadline, Engine, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_agent::healed_in_time;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::relay::Relay;

const SIZE: u64 = 8 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const CONNECTIONS: usize = 4;
const SHORT_CALL: Duration = Duration::from_millis(700);

/// A server of a store on TCP, of one of two kinds; it may serve it read-only.
type Serve = fn(At, &Store, bool) -> NbdServer;

fn nbdkit(at: At, store: &Store, read_only: bool) -> NbdServer {
    let file = ["--export=disk", "file", store.path().to_str().unwrap()];
    let read_only: &[&str] = if read_only { &["--readonly"] } else { &[] };
    NbdServer::nbdkit(at, &[read_only, &file].concat())
}

fn qemu_nbd(at: At, store: &Store, read_only: bool) -> NbdServer {
    let read_only: &[&str] = if read_only { &["--read-only"] } else { &[] };
    NbdServer::qemu_nbd(at, "disk", store.path(), read_only)
}

fn options() -> NbdOptions {
    let connections = u16::try_from(CONNECTIONS).ok().and_then(NonZeroU16::new);
    NbdOptions::default()
        .connections(connections.unwrap())
        .io_timeout(Duration::from_secs(30))
        .dead_connection_timeout(Duration::from_secs(120))
}

fn attach(engine: &Engine, at: &At, options: NbdOptions) -> Source {
    let source: Source = at.uri("disk").parse().unwrap();
    let request = AttachRequest::new(source.clone()).nbd(options);
    engine.attach(&request, soon()).expect("an attach");
    source
}

fn heal(engine: &Engine) -> HealReport {
    let [healing] = <[HealReport; 1]>::try_from(engine.heal(soon()).unwrap()).expect("one device");
    healing
}

fn is_adopted(healing: &HealReport) -> bool {
    matches!(healing.outcome, HealOutcome::Adopted(_))
}

fn only_the_dead_connection_is_replaced(serve: Serve) {
    let store = Store::sparse(SIZE);
    let server = serve(At::tcp(), &store, false);
    let ours = engine();
    let before_the_attach = server.tcp_clients();
    assert!(before_the_attach.is_empty(), "{before_the_attach:?}");
    let source = attach(&ours, server.at(), options());
    let mut healer = ours.healer(soon()).unwrap();
    assert!(healer.next(soon()).unwrap()[0].outcome.serves());
    let another = engine();
    let mut by_watching = || {
        guest::wait_until("the healer to replace the link", LIMIT, || {
            let news = healer.next(Deadline::after(Duration::from_secs(5)));
            news.unwrap().iter().any(is_adopted).then_some(())
        });
    };
    let healers: [(&str, &mut dyn FnMut()); 3] = [
        ("the process that attached it", &mut || {
            let healing = heal(&ours);
            assert!(is_adopted(&healing), "{healing:?}");
        }),
        ("another process", &mut || {
            let healing = healed_in_time(|| heal(&another));
            assert!(is_adopted(&healing), "{healing:?}");
        }),
        ("the watch", &mut by_watching),
    ];
    for (who, heals) in healers {
        let before = server.tcp_clients();
        assert_eq!(before.len(), CONNECTIONS, "{who}");
        server.cut(before[1]);
        let start = Instant::now();
        heals();
        assert!(start.elapsed() < Duration::from_secs(20), "{who}");
        guest::wait_until("four connections again", LIMIT, || {
            (server.connections() == CONNECTIONS).then_some(())
        });
        let kept = server.tcp_clients();
        let kept = before.iter().filter(|client| kept.contains(client));
        assert_eq!(kept.count(), CONNECTIONS - 1, "{who} ended links that live");
    }
    drop(healer);
    assert!(ours.detach(source, soon()).unwrap().changed);
}

#[test]
fn of_four_connections_to_nbdkit_the_dead_one_alone_is_replaced() {
    let _module = NbdModule::with_backend_ids(2);
    only_the_dead_connection_is_replaced(nbdkit);
}

#[test]
fn of_four_connections_to_qemu_nbd_the_dead_one_alone_is_replaced() {
    let _module = NbdModule::with_backend_ids(2);
    only_the_dead_connection_is_replaced(qemu_nbd);
}

/// Each call ends before the kernel has refused as many offers as show that.
#[test]
fn a_healer_learns_in_short_calls_that_another_process_has_replaced_a_connection() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(SIZE);
    let server = nbdkit(At::tcp(), &store, false);
    let (ours, another) = (engine(), engine());
    let source = attach(&ours, server.at(), options());
    let mut healer = ours.healer(soon()).unwrap();
    assert!(healer.next(soon()).unwrap()[0].outcome.serves());
    server.cut(server.tcp_clients()[1]);
    let mut took = Duration::ZERO;
    let healing = healed_in_time(|| {
        let start = Instant::now();
        let healing = heal(&another);
        took = start.elapsed();
        healing
    });
    assert!(is_adopted(&healing), "{healing:?}");
    // On a slow machine a call has the time of this heal, which dials twice. The five offers
    // that show the replacement take longer, with the pauses between them.
    let call = SHORT_CALL.max(took);
    guest::wait_until("the healer to report a whole device", LIMIT, || {
        let news = healer.next(Deadline::after(call)).unwrap();
        let is_whole = |healing: &HealReport| matches!(healing.outcome, HealOutcome::Healthy);
        news.iter().any(is_whole).then_some(())
    });
    drop(healer);
    assert!(ours.detach(source, soon()).unwrap().changed);
}

fn the_right_server_is_taken_in_after_others(serve: Serve) {
    let (store, small) = (Store::sparse(SIZE), Store::sparse(SIZE / 2));
    let mut right = serve(At::tcp(), &store, false);
    let (agent, watcher) = (engine(), engine());
    let source = attach(&agent, right.at(), options());
    let mut healer = watcher.healer(soon()).unwrap();
    assert!(healer.next(soon()).unwrap()[0].outcome.serves());
    let mut until = |what: &str, is_it: fn(&HealOutcome) -> bool| {
        guest::wait_until(what, LIMIT, || {
            let news = healer.next(Deadline::after(Duration::from_secs(5)));
            let mut news = news.unwrap().into_iter();
            news.any(|healing| is_it(&healing.outcome)).then_some(())
        });
    };
    for (what, store, read_only) in [
        ("one of another size", &small, false),
        ("one of another mode", &store, true),
    ] {
        right.kill();
        let wrong = serve(right.at().clone(), store, read_only);
        until(what, |outcome| {
            matches!(outcome, HealOutcome::GeometryChanged(_))
        });
        drop(wrong);
        right.start();
        until("the right server to be taken in", HealOutcome::serves);
    }
    drop(healer);
    assert!(agent.detach(source, soon()).unwrap().changed);
}

#[test]
fn nbdkit_is_taken_in_again_after_servers_of_another_size_and_of_another_mode_were_there() {
    let _module = NbdModule::with_backend_ids(2);
    the_right_server_is_taken_in_after_others(nbdkit);
}

#[test]
fn qemu_nbd_is_taken_in_again_after_servers_of_another_size_and_of_another_mode_were_there() {
    let _module = NbdModule::with_backend_ids(2);
    the_right_server_is_taken_in_after_others(qemu_nbd);
}

/// The connections that the kernel takes in the heal end before the device's read has come
/// back over one.
fn a_server_that_dies_before_its_answer_is_dialled_again(serve: Serve) {
    let store = Store::sparse(SIZE);
    let server = serve(At::tcp(), &store, false);
    let (relay, engine) = (Relay::to(&server), engine());
    // The kernel sends the requests in flight on a dead connection again after this time.
    let options = options().io_timeout(Duration::from_secs(5));
    let source = attach(&engine, &relay.at(), options);
    relay.hold_all_but_one_request(true);
    relay.cut_all();
    let healing = thread::scope(|scope| {
        let healing = scope.spawn(|| heal(&engine));
        guest::wait_until("the kernel to read over a new connection", LIMIT, || {
            relay.has_held_a_request().then_some(())
        });
        relay.hold_all_but_one_request(false);
        relay.cut_all();
        healing.join().unwrap()
    });
    assert!(is_adopted(&healing), "{healing:?}");
    // The relay sees later that its client has closed a connection.
    guest::wait_until("no more connections than the device has", LIMIT, || {
        (relay.clients().len() <= CONNECTIONS).then_some(())
    });
    assert_eq!(relay.clients().len(), CONNECTIONS);
    assert!(engine.detach(source, soon()).unwrap().changed);
}

#[test]
fn a_nbdkit_that_dies_before_it_has_answered_the_heal_is_dialled_again() {
    let _module = NbdModule::with_backend_ids(2);
    a_server_that_dies_before_its_answer_is_dialled_again(nbdkit);
}

#[test]
fn a_qemu_nbd_that_dies_before_it_has_answered_the_heal_is_dialled_again() {
    let _module = NbdModule::with_backend_ids(2);
    a_server_that_dies_before_its_answer_is_dialled_again(qemu_nbd);
}
