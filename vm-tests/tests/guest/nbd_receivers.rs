//! NBD devices with several connections on a machine that is too busy to start threads.

use std::fs;
use std::num::NonZeroU16;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use vm_tests::guest;

use lunbd::engine::{HealOutcome, NbdOptions, Unit};
use lunbd::{AttachRequest, DetachRequest, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const MIB: u64 = 1 << 20;

/// The kernel's thread that starts kernel threads.
const KTHREADD: &str = "2";

/// Makes the kernel start threads only when nothing else runs, and keeps the processors busy
/// but for a [pause](SlowThreads::PAUSE) every few seconds. Without pauses a slow host would
/// give a thread no processor within the time that a read may take.
struct SlowThreads {
    ends: Arc<AtomicBool>,
    spinners: Vec<JoinHandle<()>>,
}

impl SlowThreads {
    const BUSY: Duration = Duration::from_secs(3);
    const PAUSE: Duration = Duration::from_millis(500);

    fn start() -> Self {
        schedule_kthreadd("--idle");
        let ends = Arc::new(AtomicBool::new(false));
        // The pauses of all are at the same time.
        let start = Instant::now();
        let round = (Self::BUSY + Self::PAUSE).as_millis();
        let spinner = |_| {
            let ends = Arc::clone(&ends);
            thread::spawn(move || {
                while !ends.load(Ordering::Relaxed) {
                    if start.elapsed().as_millis() % round > Self::BUSY.as_millis() {
                        thread::sleep(Self::PAUSE / 10);
                    }
                }
            })
        };
        let processors = thread::available_parallelism().unwrap().get();
        let spinners = (0..2 * processors).map(spinner).collect();
        Self { ends, spinners }
    }
}

impl Drop for SlowThreads {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for spinner in self.spinners.drain(..) {
            let _ = spinner.join();
        }
        schedule_kthreadd("--other");
    }
}

fn schedule_kthreadd(policy: &str) {
    let scheduled = Command::new("chrt")
        .args([policy, "--pid", "0", KTHREADD])
        .status();
    assert!(scheduled.unwrap().success());
}

#[test]
fn the_kernel_receives_over_each_connection_though_it_starts_no_thread_in_time() {
    const CONNECTIONS: u16 = 2;
    let _module = NbdModule::with_backend_ids(3);
    let store = Store::sparse(8 * MIB);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let source: Source = server.uri("disk").parse().unwrap();
    // The kernel gives up a connection over which it does not receive long after the attach.
    let options = NbdOptions::default()
        .connections(NonZeroU16::new(CONNECTIONS).unwrap())
        .io_timeout(3 * soon().remaining());
    let engine = engine();
    let slow = SlowThreads::start();
    // Each attach takes the threads that exist.
    let backends = ["one", "two", "three"].map(|id| id.parse().unwrap());
    let attached = backends.clone().map(|backend| {
        let request = AttachRequest::new(source.clone()).nbd(options.clone().backend(backend));
        engine.attach(&request, soon()).map(|attachment| {
            let device = attachment.nbd_index().unwrap().name();
            (attachment.unit, threads_of_receivers(&device, true).len())
        })
    });
    drop(slow);
    for attached in attached {
        let (unit, receivers) = attached.expect("an attach");
        let Unit::Nbd { connections, .. } = unit else {
            panic!("{unit:?}");
        };
        assert_eq!(connections, usize::from(CONNECTIONS));
        assert_eq!(receivers, usize::from(CONNECTIONS));
    }
    for backend in backends {
        let request = DetachRequest::new(source.clone()).backend(backend);
        assert!(engine.detach(request, soon()).unwrap().changed);
    }
}

/// The threads that work for a device's queue of receivers: `kworker/u5:2+nbd0-recv`, or
/// its own rescue thread.
fn threads_of_receivers(device: &str, runs: bool) -> Vec<String> {
    let mark = format!("{}{device}-recv", if runs { "+" } else { "" });
    let mut pids = guest::entries("/proc");
    pids.retain(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        pid.parse::<u32>().is_ok() && name.contains(&mark)
    });
    pids
}

#[test]
fn a_heal_returns_when_the_kernel_receives_over_each_new_connection() {
    const CONNECTIONS: u16 = 2;
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(8 * MIB);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let other = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let options = NbdOptions::default()
        .connections(NonZeroU16::new(CONNECTIONS).unwrap())
        .io_timeout(3 * soon().remaining());
    let engine = engine();
    let attach = |uri: &str| {
        let source: Source = uri.parse().unwrap();
        let request = AttachRequest::new(source.clone()).nbd(options.clone());
        engine.attach(&request, soon()).expect("an attach");
        source
    };
    let source = attach(&server.uri("disk"));
    server.kill();
    // The second device takes the threads that have received for the first one.
    let others = attach(&other.uri(""));
    server.start();
    let slow = SlowThreads::start();
    for rescuer in threads_of_receivers("nbd0", false) {
        let lowered = Command::new("chrt")
            .args(["--idle", "--pid", "0", &rescuer])
            .status();
        // A worker of the kernel may end before.
        let is_gone = || !fs::exists(format!("/proc/{rescuer}")).unwrap();
        assert!(lowered.unwrap().success() || is_gone(), "{rescuer}");
    }
    let healing = engine.heal_source(&source, &options, soon()).unwrap();
    let receivers = threads_of_receivers("nbd0", true).len();
    drop(slow);
    assert!(
        matches!(healing.outcome, HealOutcome::Adopted(_)),
        "{healing:?}"
    );
    assert_eq!(receivers, usize::from(CONNECTIONS));
    for source in [source, others] {
        assert!(engine.detach(source, soon()).unwrap().changed);
    }
}
