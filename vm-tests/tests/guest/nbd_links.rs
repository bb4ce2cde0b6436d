//! The connections of one NBD device: which of them are dead, and what replaces them.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::num::NonZeroU16;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use lunbd::engine::{HealOutcome, HealReport, NbdOptions};
use lunbd::error::Stage;
use lunbd::{AttachRequest, Deadline, DetachTarget, Engine, ErrorKind};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_agent::{attach_with, detach, heal, healed_in_time, source};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store, in_flight};

const MIB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// More connections than the guest has processors, so that the kernel has slots that `mq/` does
/// not show.
const CONNECTIONS: usize = 4;

/// The kernel resends what was in flight on a dead link after this time.
const IO_TIMEOUT: Duration = Duration::from_secs(5);

fn options() -> NbdOptions {
    let connections = u16::try_from(CONNECTIONS).ok().and_then(NonZeroU16::new);
    NbdOptions::default()
        .connections(connections.unwrap())
        .io_timeout(IO_TIMEOUT)
        .dead_connection_timeout(Duration::from_secs(120))
}

fn is_adopted(healing: &HealReport) -> bool {
    matches!(healing.outcome, HealOutcome::Adopted(_))
}

/// Bytes in which each eight hold their own offset.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).step_by(8).flat_map(usize::to_le_bytes).collect()
}

/// Readers past the page cache, which compare their data with the pattern.
struct Readers {
    ends: AtomicBool,
    done: [AtomicUsize; 8],
    wrong: Mutex<Vec<String>>,
}

impl Readers {
    fn new() -> Self {
        Self {
            ends: AtomicBool::new(false),
            done: Default::default(),
            wrong: Mutex::default(),
        }
    }

    fn read(&self, reader: usize, node: &Path, pattern: &[u8]) {
        const LENGTH: usize = 32 << 10;
        let disk = OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_DIRECT)
            .open(node)
            .unwrap();
        let mut page = memmap2::MmapMut::map_anon(LENGTH).unwrap();
        let places = pattern.len() / LENGTH;
        let mut place = reader;
        while !self.ends.load(Ordering::Relaxed) {
            place = (place * 13 + 5) % places;
            let offset = place * LENGTH;
            let read = disk.read_exact_at(&mut page, offset as u64);
            let expected = &pattern[offset..offset + LENGTH];
            let told = match read {
                Err(error) => Some(format!("reader {reader} at {offset}: {error}")),
                Ok(()) if page[..] != *expected => {
                    let first = page.iter().zip(expected).position(|(a, b)| a != b);
                    let first = first.unwrap_or_default() / 8 * 8;
                    let found = usize::from_le_bytes(page[first..first + 8].try_into().unwrap());
                    let at = offset + first;
                    Some(format!(
                        "reader {reader} got the bytes of {found:#x} at {at:#x}"
                    ))
                }
                Ok(()) => None,
            };
            self.wrong.lock().unwrap().extend(told);
            self.done[reader].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn assert_right(&self) {
        let wrong = self.wrong.lock().unwrap();
        assert!(wrong.is_empty(), "{} wrong: {:?}", wrong.len(), wrong[0]);
    }

    /// Waits until each reader has read more.
    fn go_on(&self) {
        let count = |reader: &AtomicUsize| reader.load(Ordering::Relaxed);
        let before: Vec<usize> = self.done.iter().map(count).collect();
        guest::wait_until("every reader to go on", LIMIT, || {
            self.assert_right();
            let mut each = self.done.iter().zip(&before);
            each.all(|(reader, before)| count(reader) > before + 2)
                .then_some(())
        });
    }
}

/// Restarts `server` under readers; `store` is what it serves.
fn restart_under_readers(mut server: NbdServer, export: &str, pattern: &[u8]) {
    let restarts = if guest::sweeps_are_whole() { 20 } else { 4 };
    let (engine, uri) = (engine(), server.uri(export));
    let attachment = attach_with(&engine, &uri, &options());
    assert_eq!(server.connections(), CONNECTIONS);
    let readers = Readers::new();
    thread::scope(|scope| {
        for reader in 0..readers.done.len() {
            let (readers, node) = (&readers, &attachment.node);
            scope.spawn(move || readers.read(reader, node, pattern));
        }
        // The readers end even if this part fails.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for restart in 0..restarts {
                readers.go_on();
                server.kill();
                server.start();
                let healing = heal(&engine);
                assert!(is_adopted(&healing), "{restart}: {healing:?}");
                readers.go_on();
                assert_eq!(server.connections(), CONNECTIONS, "{restart}");
            }
        }));
        readers.ends.store(true, Ordering::Relaxed);
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
    readers.assert_right();
    detach(&engine, &uri);
}

fn filled(pattern: &[u8]) -> Store {
    let store = Store::sparse(0);
    File::create(store.path())
        .and_then(|mut file| file.write_all(pattern))
        .unwrap();
    store
}

#[test]
fn no_read_is_wrong_when_nbdkit_restarts_four_times_or_twenty_in_a_whole_sweep() {
    let _module = NbdModule::with_backend_ids(2);
    let pattern = pattern(8 * MIB);
    let store = filled(&pattern);
    let file = store.path().to_str().unwrap();
    let slowly = ["--filter=delay", "file", file, "rdelay=60ms"];
    restart_under_readers(NbdServer::nbdkit(At::tcp(), &slowly), "", &pattern);
}

#[test]
fn no_read_is_wrong_when_qemu_nbd_restarts_four_times_or_twenty_in_a_whole_sweep() {
    let _module = NbdModule::with_backend_ids(2);
    let pattern = pattern(8 * MIB);
    let store = filled(&pattern);
    let server = NbdServer::qemu_nbd(At::unix(), "disk", store.path(), &[]);
    restart_under_readers(server, "disk", &pattern);
}

fn assert_is_left_to_go(healing: &HealReport) {
    let HealOutcome::Failed(error) = &healing.outcome else {
        panic!("{healing:?}");
    };
    assert_eq!(error.kind(), ErrorKind::Vanished, "{error}");
    assert_eq!(healing.dials, 0, "{error}");
}

#[test]
fn a_heal_leaves_a_device_alone_that_is_being_disconnected() {
    let _module = NbdModule::with_backend_ids(2);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (ours, uri) = (engine(), server.uri(""));
    let attachment = attach_with(&ours, &uri, &options());
    let mut healer = ours.healer(soon()).unwrap();
    assert!(healer.next(soon()).unwrap()[0].outcome.serves());
    // The device stays until the last close.
    let opener = File::open(&attachment.node).unwrap();
    let limit = Deadline::after(Duration::from_secs(20));
    let error = ours.detach(source(&uri), limit).unwrap_err();
    assert_eq!(error.stage(), Some(Stage::Confirm), "{error}");
    for engine in [&ours, &engine()] {
        let limit = Deadline::after(Duration::from_secs(15));
        let [healing] = <[HealReport; 1]>::try_from(engine.heal(limit).unwrap()).unwrap();
        assert_is_left_to_go(&healing);
    }
    let news = healer
        .next(Deadline::after(Duration::from_secs(4)))
        .unwrap();
    news.iter().for_each(assert_is_left_to_go);
    assert_eq!(server.connections(), 0);
    drop((healer, opener));
    guest::wait_until("the device to be free", LIMIT, || {
        let name = attachment.node.file_name().unwrap().to_str().unwrap();
        let pid = Path::new("/sys/block").join(name).join("pid");
        (!pid.exists()).then_some(())
    });
    // The next instance of the volume is healed like any other.
    attach_with(&ours, &uri, &options());
    detach(&ours, &uri);
}

#[test]
fn without_an_io_timeout_connections_are_replaced_too() {
    let _module = NbdModule::with_backend_ids(2);
    let mut server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (ours, uri) = (engine(), server.uri(""));
    attach_with(&ours, &uri, &options().io_timeout(Duration::ZERO));
    for engine in [&ours, &engine()] {
        guest::udevd::settle();
        server.kill();
        server.start();
        let healing = heal(engine);
        assert!(is_adopted(&healing), "{healing:?}");
        if std::ptr::eq(engine, &raw const ours) {
            assert_eq!(server.connections(), CONNECTIONS);
        }
    }
    detach(&ours, &uri);
}

#[test]
fn without_an_io_timeout_a_connection_that_the_kernel_did_not_take_is_closed() {
    let _module = NbdModule::with_backend_ids(2);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (ours, another, uri) = (engine(), engine(), server.uri(""));
    let without_timeout = options().io_timeout(Duration::ZERO);
    attach_with(&ours, &uri, &without_timeout);
    server.cut(server.tcp_clients()[1]);
    let all = || {
        guest::wait_until("four connections", LIMIT, || {
            (server.connections() == CONNECTIONS).then_some(())
        });
    };
    let healing = healed_in_time(|| {
        let healing = another.heal_source(&source(&uri), &without_timeout, soon());
        healing.unwrap()
    });
    assert!(healing.outcome.serves(), "{healing:?}");
    all();
    // One of its own connections has ended, and the kernel has another one in its place.
    let healing = heal(&ours);
    assert!(
        !is_adopted(&healing) && healing.outcome.serves(),
        "{healing:?}"
    );
    all();
    detach(&ours, &uri);
}

#[test]
fn a_repeated_attach_returns_an_attached_device_only_if_it_answers() {
    let _module = NbdModule::with_backend_ids(2);
    // Without udevd only the kernel's events settle the device, and nothing reads it.
    let _absent = guest::udevd::absent();
    let mut server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (ours, another, uri) = (engine(), engine(), server.uri(""));
    let options = options().backend("volume".parse().unwrap());
    let node = attach_with(&ours, &uri, &options).node;
    let refusal = |engine: &Engine, uri: &str, limit| {
        let request = AttachRequest::new(source(uri)).nbd(options.clone());
        let limit = Deadline::after(Duration::from_secs(limit));
        engine.attach(&request, limit).unwrap_err()
    };
    let error = refusal(&ours, "nbd://192.0.2.1/other", 10);
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    server.kill();
    let error = refusal(&ours, &uri, 10);
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert!(
        error.to_string().contains("connections have ended"),
        "{error}"
    );
    let error = refusal(&another, &uri, 20);
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Probe), "{error}");
    server.start();
    let healing = ours.heal_source(&source(&uri), &options, soon()).unwrap();
    assert!(is_adopted(&healing), "{healing:?}");
    assert!(!attach_with(&ours, &uri, &options).changed);
    assert!(
        ours.detach(DetachTarget::Device(node), soon())
            .unwrap()
            .changed
    );
}

#[test]
fn a_uri_that_is_too_long_for_the_kernel_needs_a_backend_id() {
    let _module = NbdModule::with_backend_ids(2);
    let mut server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (ours, uri) = (engine(), server.uri(&"x".repeat(300)));
    let error = ours
        .attach(&AttachRequest::new(source(&uri)), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.to_string().contains("255 at most"), "{error}");
    let options = options().backend("long".parse().unwrap());
    let node = attach_with(&ours, &uri, &options).node;
    server.kill();
    server.start();
    let another = engine();
    let healing = another
        .heal_source(&source(&uri), &options, soon())
        .unwrap();
    assert!(is_adopted(&healing), "{healing:?}");
    let detached = another.detach(DetachTarget::Device(node), soon());
    assert!(detached.unwrap().changed);
}

#[test]
fn a_repeated_attach_that_waits_for_an_answer_notices_the_end_of_the_connection() {
    let _module = NbdModule::with_backend_ids(1);
    let store = Store::sparse(8 << 20);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (ours, uri) = (engine(), server.uri("disk"));
    let options = NbdOptions::default().io_timeout(IO_TIMEOUT);
    let node = attach_with(&ours, &uri, &options).node;
    guest::udevd::settle();
    server.stop();
    let failure = thread::scope(|scope| {
        scope.spawn(|| {
            guest::wait_until("the attach to read", LIMIT, || {
                (in_flight(&node) > 0).then_some(())
            });
            server.kill();
        });
        let request = AttachRequest::new(source(&uri)).nbd(options.clone());
        ours.attach(&request, soon()).unwrap_err()
    });
    assert_eq!(failure.kind(), ErrorKind::NotReady, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Probe), "{failure}");
    server.start();
    assert!(is_adopted(&heal(&ours)));
    detach(&ours, &uri);
}
