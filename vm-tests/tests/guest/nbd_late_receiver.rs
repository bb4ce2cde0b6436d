//! Heals while the kernel's receivers are late: of a new connection that is not received over
//! until another connection ends, and of an ended connection whose receiver is not done.
//!
//! Real-time threads keep every other thread from the processors, except those that a test runs
//! above them: its own, the server's and some of the kernel.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lunbd::engine::{HealOutcome, NbdOptions};
use lunbd::{AttachRequest, Deadline, ErrorKind, Source};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::{Pid, gettid};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::certificates::Certificates;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::tls_servers::{address, nbdkit, source};

const LIMIT: Duration = Duration::from_secs(30);
/// RCU reports a stall after 21 s in which its threads do not run.
const MOST: Duration = Duration::from_secs(15);
const THROTTLING: &str = "/proc/sys/kernel/sched_rt_runtime_us";

/// Priorities, the higher first.
const KERNEL: &str = "3";
const OURS: &str = "2";
const BUSY: &str = "1";

/// Threads of the kernel that go on. A new receiver is work for `kworker/u...`, which is not
/// bound to a processor.
const OF_PROCESSORS: [&str; 4] = ["ksoftirqd/", "rcu_", "kworker/0:", "kworker/1:"];

fn set_priority(thread: &str, priority: &str) {
    guest::run(&["chrt", "--fifo", "--pid", priority, thread]);
}

/// The threads whose name has one of these words.
fn threads_with(words: &[&str]) -> Vec<String> {
    let mut pids = guest::entries("/proc");
    pids.retain(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        pid.parse::<u32>().is_ok() && words.iter().any(|word| name.contains(word))
    });
    pids
}

/// Keeps threads without a real-time priority from running.
struct BusyProcessors {
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    raised: Vec<String>,
    throttling: String,
}

impl BusyProcessors {
    /// The threads of `raised` go on.
    fn start(raised: Vec<String>) -> Self {
        let throttling = fs::read_to_string(THROTTLING).unwrap();
        fs::write(THROTTLING, "-1").unwrap();
        for thread in &raised {
            // A worker of the kernel may end before it is raised.
            if fs::exists(format!("/proc/{thread}")).unwrap() {
                set_priority(thread, KERNEL);
            }
        }
        let (ends, started) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let count = thread::available_parallelism().unwrap().get();
        let busy = |processor| {
            let (ends, started) = (Arc::clone(&ends), Arc::clone(&started));
            thread::spawn(move || {
                let mut processors = CpuSet::new();
                processors.set(processor).unwrap();
                sched_setaffinity(Pid::from_raw(0), &processors).unwrap();
                set_priority(&gettid().to_string(), BUSY);
                started.fetch_add(1, Ordering::Relaxed);
                let start = Instant::now();
                while !ends.load(Ordering::Relaxed) && start.elapsed() < MOST {}
            })
        };
        let threads = (0..count).map(busy).collect();
        guest::wait_until("the processors to be busy", LIMIT, || {
            (started.load(Ordering::Relaxed) == count).then_some(())
        });
        Self {
            ends,
            threads,
            raised,
            throttling,
        }
    }
}

impl Drop for BusyProcessors {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        for thread in &self.raised {
            // A worker of the kernel may have ended.
            let _ = Command::new("chrt")
                .args(["--other", "--pid", "0", thread])
                .status();
        }
        fs::write(THROTTLING, &self.throttling).unwrap();
    }
}

/// Ends one of the two connections of the device, and keeps the kernel from starting a receiver.
/// When the other one ends, the thread of its receiver takes the receiver that waits. Returns the
/// client of the other one.
fn cut_one_of_two(server: &NbdServer) -> (SocketAddr, BusyProcessors) {
    let [dead, living] = server.tcp_clients()[..] else {
        panic!("{:?}", server.tcp_clients());
    };
    server.cut(dead);
    guest::wait_until("one receiver to end", LIMIT, || {
        (threads_with(&["+nbd0-recv"]).len() == 1).then_some(())
    });
    let mut raised = threads_with(&OF_PROCESSORS);
    raised.extend(threads_with(&["+nbd0-recv"]));
    (living, BusyProcessors::start(raised))
}

#[test]
fn a_heal_replaces_also_the_connection_that_keeps_the_kernel_from_receiving_over_the_new_one() {
    const CONNECTIONS: u16 = 2;
    if guest::kernel() >= (6, 12) {
        guest::skip("the kernel runs other threads beside real-time ones from 6.12 on");
    }
    let _module = NbdModule::with_backend_ids(1);
    // What starts from here on inherits the priority.
    set_priority(&gettid().to_string(), OURS);
    let store = Store::sparse(8 << 20);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let options = NbdOptions::default()
        .connections(NonZeroU16::new(CONNECTIONS).unwrap())
        .io_timeout(3 * soon().remaining());
    let engine = engine();
    let source: Source = server.uri("disk").parse().unwrap();
    let request = AttachRequest::new(source.clone()).nbd(options.clone());
    engine.attach(&request, soon()).expect("an attach");
    let (living, busy) = cut_one_of_two(&server);
    let healing = thread::scope(|scope| {
        scope.spawn(|| {
            guest::wait_until("the living connection to end", LIMIT, || {
                (!server.tcp_clients().contains(&living)).then_some(())
            });
            drop(busy);
        });
        engine.heal_source(&source, &options, soon()).unwrap()
    });
    assert!(
        matches!(healing.outcome, HealOutcome::Adopted(_)),
        "{healing:?}"
    );
    let clients = server.tcp_clients();
    assert_eq!(clients.len(), usize::from(CONNECTIONS));
    assert!(!clients.contains(&living), "{living} of {clients:?}");
    assert_eq!(
        threads_with(&["+nbd0-recv"]).len(),
        usize::from(CONNECTIONS)
    );
    assert!(engine.detach(source, soon()).unwrap().changed);
}

#[test]
fn a_connection_that_ends_before_its_receiver_has_begun_is_not_replaced() {
    const CONNECTIONS: u16 = 2;
    if guest::kernel() >= (6, 12) {
        guest::skip("the kernel runs other threads beside real-time ones from 6.12 on");
    }
    let _module = NbdModule::with_backend_ids(1);
    set_priority(&gettid().to_string(), OURS);
    let certificates = Certificates::new("tls");
    let (store, content) = store();
    // TLS does not show that a reply is unread.
    let server = nbdkit(&certificates, store.path(), &[]);
    let source = source(address(&server), "disk", &certificates);
    let options = NbdOptions::default()
        .connections(NonZeroU16::new(CONNECTIONS).unwrap())
        .io_timeout(LATE);
    let engine = engine();
    // The short timeout holds from the first offer on.
    let request = options.clone().io_timeout(10 * LATE);
    let request = AttachRequest::new(source.clone()).nbd(request);
    let node = engine.attach(&request, soon()).expect("an attach").node;
    guest::udevd::settle();
    let (living, busy) = cut_one_of_two(&server);
    // The kernel ends the new connection, over which it does not receive, after the timeout.
    for _ in 0..2 {
        let deadline = Deadline::after(10 * LATE);
        let healing = engine.heal_source(&source, &options, deadline).unwrap();
        let HealOutcome::Degraded(why) = &healing.outcome else {
            panic!("{healing:?}");
        };
        assert_eq!(why.kind(), ErrorKind::NotReady, "{why}");
    }
    drop(busy);
    assert_eq!(server.tcp_clients(), [living]);
    guest::wait_until("the receiver that begins late to end", LIMIT, || {
        (threads_with(&["+nbd0-recv"]).len() == 1).then_some(())
    });
    let mut block = Aligned([0; BLOCK]);
    let mut options = File::options();
    let options = options.read(true).custom_flags(nix::libc::O_DIRECT);
    let disk = options.open(&node).unwrap();
    disk.read_exact_at(&mut block.0, 0).unwrap();
    assert!(block.0 == content[..BLOCK]);
    drop(disk);
    assert!(engine.detach(source, soon()).unwrap().changed);
}

/// The process that heals.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Healer {
    Attacher,
    /// It has no socket of the device, and no other process has one.
    Another,
}

/// Ends a connection whose receiver has a reply to read and does not run, and heals. The kernel
/// learns from a request that it cannot send that the connection has ended.
fn waits_for_the_old_receiver(
    server: &mut NbdServer,
    source: &Source,
    content: &[u8],
    healer: Healer,
) {
    if guest::kernel() >= (6, 12) {
        guest::skip("the kernel runs other threads beside real-time ones from 6.12 on");
    }
    // The requests that the server has not answered go out again after this time.
    let options = NbdOptions::default().io_timeout(10 * LATE);
    let attacher = engine();
    let request = AttachRequest::new(source.clone()).nbd(options.clone());
    let node = attacher.attach(&request, soon()).expect("an attach").node;
    guest::udevd::settle();
    let engine = match healer {
        Healer::Attacher => attacher,
        Healer::Another => {
            drop(attacher);
            engine()
        }
    };
    let read = |block: usize| {
        let node = node.clone();
        move || {
            let mut options = File::options();
            let options = options.read(true).custom_flags(nix::libc::O_DIRECT);
            let mut buffer = Aligned([0; BLOCK]);
            let at = u64::try_from(block * BLOCK).unwrap();
            options
                .open(node)
                .unwrap()
                .read_exact_at(&mut buffer.0, at)
                .unwrap();
            buffer
        }
    };
    let busy = BusyProcessors::start(threads_with(&OF_PROCESSORS));
    thread::scope(|scope| {
        let mut readers = vec![scope.spawn(read(0))];
        // The reply comes meanwhile.
        thread::sleep(LATE / 2);
        server.kill();
        // The answer to the first is a reset, and the next cannot be sent.
        for block in 1..4 {
            readers.push(scope.spawn(read(block)));
            thread::sleep(LATE / 20);
        }
        server.start();
        let is_dialled = || (server.connections() > 0).then_some(());
        scope.spawn(move || {
            guest::wait_until("the heal to dial", LIMIT, is_dialled);
            thread::sleep(LATE / 2);
            drop(busy);
        });
        let healing = engine.heal_source(source, &options, soon()).unwrap();
        assert!(
            matches!(healing.outcome, HealOutcome::Adopted(_)),
            "{healing:?}"
        );
        for (block, reader) in readers.into_iter().enumerate() {
            let expected = &content[block * BLOCK..][..BLOCK];
            assert!(reader.join().unwrap().0 == expected, "block {block}");
        }
    });
    assert!(engine.detach(source.clone(), soon()).unwrap().changed);
}

const BLOCK: usize = 4096;
/// The old receiver is half as late. A heal waits for twice as long.
const LATE: Duration = Duration::from_secs(1);

#[repr(align(4096))]
struct Aligned([u8; BLOCK]);

fn store() -> (Store, Vec<u8>) {
    let store = Store::sparse(8 << 20);
    let content: Vec<u8> = (0..8 * BLOCK)
        .map(|at| u8::try_from(at / BLOCK + 1).unwrap())
        .collect();
    let file = File::options().write(true).open(store.path()).unwrap();
    file.write_all_at(&content, 0).unwrap();
    (store, content)
}

fn waits_over_tcp(healer: Healer) {
    let _module = NbdModule::with_backend_ids(1);
    set_priority(&gettid().to_string(), OURS);
    let (store, content) = store();
    let path = store.path().to_str().unwrap();
    let mut server = NbdServer::nbdkit(At::tcp(), &["--export=disk", "file", path]);
    let source = server.uri("disk").parse().unwrap();
    waits_for_the_old_receiver(&mut server, &source, &content, healer);
}

#[test]
fn a_connection_is_replaced_when_its_receiver_has_read_the_replies_that_it_has() {
    waits_over_tcp(Healer::Attacher);
}

#[test]
fn another_process_replaces_a_connection_when_its_receiver_has_read_the_replies_that_it_has() {
    waits_over_tcp(Healer::Another);
}

#[test]
fn a_tls_connection_is_replaced_when_its_receiver_has_read_the_replies_that_it_has() {
    let _module = NbdModule::with_backend_ids(1);
    set_priority(&gettid().to_string(), OURS);
    let certificates = Certificates::new("tls");
    let (store, content) = store();
    let mut server = nbdkit(&certificates, store.path(), &[]);
    let source = source(address(&server), "disk", &certificates);
    waits_for_the_old_receiver(&mut server, &source, &content, Healer::Attacher);
}
