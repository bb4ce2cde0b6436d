//! Netlink commands that the kernel begins after the deadline of their caller, or after its
//! cancellation.

use std::fs;
use std::num::NonZeroU16;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use lunbd::engine::{Action, Condition, DetachVolume, HealOutcome, Journal, NbdOptions};
use lunbd::id::NbdIndex;
use lunbd::{
    AttachRequest, Attachment, Cancel, Deadline, Engine, ErrorKind, Result, Roots, Source, nbd,
};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::crash::{Place, volume};
use vm_tests::guest::nbd_agent::healed_in_time;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store, backends};

/// The deadline of a call whose command the kernel does not begin in time.
const SHORT: Duration = Duration::from_secs(4);
const LIMIT: Duration = Duration::from_secs(60);

/// A disconnect that waits for its server. The kernel begins no other netlink command of NBD
/// meanwhile (`net/netlink/genetlink.c`, `genl_mutex`).
struct HangingDisconnect {
    source: Source,
    server: NbdServer,
    writer: Child,
    client: Child,
}

fn knows(index: NbdIndex) -> bool {
    let deadline = Deadline::after(Duration::from_secs(1));
    nbd::status(&Roots::default(), index, deadline).is_ok()
}

impl HangingDisconnect {
    fn begin(engine: &Engine, store: &Store) -> Self {
        let path = store.path().to_str().unwrap();
        let server = NbdServer::nbdkit(At::unix(), &["--export=hung", "file", path]);
        let source: Source = server.uri("hung").parse().unwrap();
        let options = NbdOptions::default().io_timeout(Duration::from_secs(300));
        let request = AttachRequest::new(source.clone()).nbd(options);
        let attached = engine.attach(&request, soon()).unwrap();
        guest::udevd::settle();
        server.stop();
        let node = attached.node.to_str().unwrap();
        let queue = format!("/sys/block/{}", node.trim_start_matches("/dev/"));
        // The first of these requests fits into the socket's buffer, and the second one does not.
        fs::write(format!("{queue}/queue/max_sectors_kb"), "128").unwrap();
        // The stopped server does not read, and the socket's buffer fills.
        let writer = Command::new("dd")
            .args(["if=/dev/zero", "bs=1M", "count=32", "oflag=direct"])
            .arg(format!("of={node}"))
            .spawn()
            .unwrap();
        guest::wait_until("requests in flight", LIMIT, || {
            let counts = fs::read_to_string(format!("{queue}/inflight")).unwrap();
            let written = counts.split_whitespace().nth(1)?.parse::<u32>().ok()?;
            (written >= 2).then_some(())
        });
        let client = Command::new("nbd-client").args(["-d", node]).spawn();
        let client = client.unwrap();
        let stack = format!("/proc/{}/stack", client.id());
        guest::wait_until("the kernel's disconnect to wait", LIMIT, || {
            let stack = fs::read_to_string(&stack).unwrap();
            stack.contains("nbd_genl_disconnect").then_some(())
        });
        Self {
            source,
            server,
            writer,
            client,
        }
    }

    fn end(mut self, engine: &Engine) {
        self.server.cont();
        self.client.wait().unwrap();
        self.writer.wait().unwrap();
        guest::wait_until("the device to be free", LIMIT, || {
            engine.detach(self.source.clone(), soon()).ok()
        });
    }
}

/// Attaches on a thread, with an engine that knows nothing of the other one's calls.
fn attach_aside(source: &Source) -> mpsc::Receiver<Result<Attachment>> {
    let (sender, attached) = mpsc::channel();
    let request = AttachRequest::new(source.clone());
    thread::spawn(move || {
        let engine = engine();
        let attachment = engine.attach(&request, soon());
        let _given_up = sender.send(attachment);
    });
    attached
}

fn served() -> (NbdModule, NbdServer, Source) {
    let module = NbdModule::with_backend_ids(4);
    let server = NbdServer::nbdkit(At::unix(), &["memory", "1M"]);
    let source = server.uri("").parse().unwrap();
    (module, server, source)
}

#[test]
fn a_backend_id_gets_one_device_though_its_first_connect_comes_after_the_deadline() {
    let (_module, _server, source) = served();
    let (engine, store) = (engine(), Store::sparse(64 << 20));
    let hanging = HangingDisconnect::begin(&engine, &store);
    let request = AttachRequest::new(source.clone());
    let late = engine.attach(&request, Deadline::after(SHORT)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut, "{late:#}");
    let attached = attach_aside(&source);
    // Without the lock of the backend id its connect waits behind the late one.
    let early = attached.recv_timeout(SHORT);
    assert!(early.is_err(), "{early:?}");
    hanging.end(&engine);
    attached.recv_timeout(LIMIT).unwrap().unwrap();
    assert_eq!(backends(), [source.to_string()]);
    assert!(engine.detach(source, soon()).unwrap().changed);
}

#[test]
fn a_volume_that_is_attached_again_stays_though_the_disconnect_before_it_comes_late() {
    let (_module, _server, source) = served();
    let (engine, store) = (engine(), Store::sparse(64 << 20));
    engine
        .attach(&AttachRequest::new(source.clone()), soon())
        .unwrap();
    guest::udevd::settle();
    let hanging = HangingDisconnect::begin(&engine, &store);
    let late = engine
        .detach(source.clone(), Deadline::after(SHORT))
        .unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut, "{late}");
    let attached = attach_aside(&source);
    // Without the lock of the backend id the attach returns the device that goes.
    let early = attached.recv_timeout(SHORT);
    hanging.end(&engine);
    let attached = early
        .unwrap_or_else(|_| attached.recv_timeout(LIMIT).unwrap())
        .unwrap();
    guest::wait_until("the kernel to answer", LIMIT, || {
        knows(attached.nbd_index().unwrap()).then_some(())
    });
    assert_eq!(backends(), [source.to_string()]);
    assert!(engine.detach(source, soon()).unwrap().changed);
}

/// Whether a process has a lock whose name begins like this.
fn is_locked(name: &str) -> bool {
    let locks = guest::entries("/run/lunbd");
    locks.iter().any(|lock| lock.starts_with(name))
}

/// Waits until no offer to the device waits in the kernel.
fn late_offer_returns() {
    guest::wait_until("the late offer to return", LIMIT, || {
        (!is_locked("nbd-connections-")).then_some(())
    });
}

/// Heals a device whose only connection has ended. The kernel begins the command of the offer
/// after the deadline. `next_heal` ends what delays the kernel, and heals again.
fn next_heal_keeps_what_the_kernel_took(
    next_heal: impl FnOnce(HangingDisconnect, &Engine, &dyn Fn() -> HealOutcome) -> HealOutcome,
) {
    let _module = NbdModule::with_backend_ids(4);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "1M"]);
    let source: Source = server.uri("").parse().unwrap();
    let (engine, store) = (engine(), Store::sparse(64 << 20));
    let options = NbdOptions::default().dead_connection_timeout(Duration::from_secs(300));
    let request = AttachRequest::new(source.clone()).nbd(options.clone());
    engine.attach(&request, soon()).unwrap();
    guest::udevd::settle();
    let hanging = HangingDisconnect::begin(&engine, &store);
    server.cut(server.tcp_clients()[0]);
    let heal = |deadline| {
        let healing = engine.heal_source(&source, &options, deadline);
        healing.unwrap().outcome
    };
    let late = heal(Deadline::after(SHORT));
    let is_late = |error: &lunbd::Error| error.kind() == ErrorKind::TimedOut;
    assert!(
        matches!(&late, HealOutcome::Failed(error) if is_late(error)),
        "{late:?}"
    );
    let next = next_heal(hanging, &engine, &|| heal(soon()));
    assert!(matches!(next, HealOutcome::Adopted(_)), "{next:?}");
    assert_eq!(server.connections(), 1);
    assert!(engine.detach(source.clone(), soon()).unwrap().changed);
    guest::wait_until("no connection to be left", LIMIT, || {
        (server.connections() == 0).then_some(())
    });
}

#[test]
fn a_connection_that_the_kernel_takes_after_the_end_of_its_heal_is_kept_by_the_next_heal() {
    next_heal_keeps_what_the_kernel_took(|hanging, engine, heal| {
        hanging.end(engine);
        late_offer_returns();
        heal()
    });
}

#[test]
fn a_connection_that_the_kernel_takes_during_the_next_heal_is_kept_by_it() {
    next_heal_keeps_what_the_kernel_took(|hanging, engine, heal| {
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(SHORT / 2);
                hanging.end(engine);
            });
            heal()
        })
    });
}

/// Another process, which does not know the timeouts, sees no mark on a socket that the kernel
/// took.
#[test]
fn a_connection_that_the_kernel_refuses_after_the_end_of_its_heal_is_closed_by_the_next_heal() {
    let _module = NbdModule::with_backend_ids(4);
    let server = NbdServer::nbdkit(At::unix(), &["memory", "1M"]);
    let source: Source = server.uri("").parse().unwrap();
    let (engine, another, store) = (engine(), engine(), Store::sparse(64 << 20));
    let two = NbdOptions::default().connections(NonZeroU16::new(2).unwrap());
    let request = AttachRequest::new(source.clone()).nbd(two);
    engine.attach(&request, soon()).unwrap();
    guest::udevd::settle();
    let hanging = HangingDisconnect::begin(&engine, &store);
    let heal = |deadline| {
        let healing = another.heal_source(&source, &NbdOptions::default(), deadline);
        healing.unwrap()
    };
    let late = heal(Deadline::after(SHORT)).outcome;
    assert!(!matches!(late, HealOutcome::Healthy), "{late:?}");
    guest::wait_until("the offered connection", LIMIT, || {
        (server.connections() == 3).then_some(())
    });
    hanging.end(&engine);
    late_offer_returns();
    let next = healed_in_time(|| heal(soon())).outcome;
    assert!(matches!(next, HealOutcome::Healthy), "{next:?}");
    guest::wait_until("two connections", LIMIT, || {
        (server.connections() == 2).then_some(())
    });
    assert!(engine.detach(source, soon()).unwrap().changed);
}

/// Whether a thread of this process waits for the kernel to take its netlink command.
fn waits_in_netlink() -> bool {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let stacks =
        tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("stack")).ok());
    let mut stacks = stacks.filter(|stack| stack.contains("genl_rcv"));
    stacks.next().is_some()
}

/// Makes a call that is cancelled while its netlink command waits.
fn cancelled<T: Send>(call: impl FnOnce(Deadline) -> T + Send) -> T {
    let cancel = Cancel::new();
    let deadline = Deadline::after(LIMIT).cancelled_by(&cancel);
    thread::scope(|scope| {
        let call = scope.spawn(|| call(deadline));
        guest::wait_until("the command to wait", LIMIT, || {
            waits_in_netlink().then_some(())
        });
        cancel.cancel();
        call.join().unwrap()
    })
}

/// What a recovery finds and does.
fn recovered(engine: &Engine, journal: &Journal) -> (Condition, bool) {
    let recovery = engine.recover(journal, soon()).unwrap();
    assert!(recovery.foreign.is_empty(), "{recovery:?}");
    let [found] = &recovery.volumes[..] else {
        panic!("{recovery:?}");
    };
    (found.condition, matches!(found.action, Action::Finished))
}

#[test]
fn a_cancelled_attach_whose_connect_comes_later_stays_in_the_journal_until_a_recovery_has_it() {
    let (_module, _server, source) = served();
    let (engine, store, place) = (engine(), Store::sparse(64 << 20), Place::new());
    let hanging = HangingDisconnect::begin(&engine, &store);
    let journal = place.open(&engine);
    let request = AttachRequest::new(source.clone());
    let late = cancelled(|deadline| engine.attach_volume(&journal, &volume(), &request, deadline));
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Cancelled);
    hanging.end(&engine);
    guest::wait_until("the late connect to return", LIMIT, || {
        (!is_locked("nbd-id-") && backends() == [source.to_string()]).then_some(())
    });
    assert_eq!(
        recovered(&engine, &journal),
        (Condition::HalfAttached, true)
    );
    let how = DetachVolume::default();
    engine
        .detach_volume(&journal, &volume(), &how, soon())
        .unwrap();
}

#[test]
fn a_cancelled_detach_whose_disconnect_comes_later_is_finished_by_a_recovery() {
    let (_module, _server, source) = served();
    let (engine, store, place) = (engine(), Store::sparse(64 << 20), Place::new());
    let journal = place.open(&engine);
    let request = AttachRequest::new(source);
    engine
        .attach_volume(&journal, &volume(), &request, soon())
        .unwrap();
    guest::udevd::settle();
    let hanging = HangingDisconnect::begin(&engine, &store);
    let how = DetachVolume::default();
    let late = cancelled(|deadline| engine.detach_volume(&journal, &volume(), &how, deadline));
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Cancelled);
    hanging.end(&engine);
    guest::wait_until("the late disconnect", LIMIT, || {
        backends().is_empty().then_some(())
    });
    assert_eq!(recovered(&engine, &journal), (Condition::Gone, true));
    assert!(journal.detached_as(&volume()).is_some());
}
