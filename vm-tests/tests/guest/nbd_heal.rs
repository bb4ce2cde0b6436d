//! NBD devices whose server dies, hangs, and comes back.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lunbd::engine::{HealOutcome, HealReport, NbdOptions, StageObserver};
use lunbd::error::Stage;
use lunbd::nbd::Difference;
use lunbd::{Attachment, Deadline, DetachRequest, Engine, ErrorKind};
use nix::fcntl::{Flock, FlockArg};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_agent::{attach_with, detach, source};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::writer::Writer;

const MIB: u64 = 1 << 20;

/// The kernel resends a request that was in flight when the link died, after its timeout. A
/// live server answers sooner, on a busy machine too: no test heals a link that dies where no
/// server was killed.
fn patient() -> NbdOptions {
    NbdOptions::default()
        .io_timeout(Duration::from_secs(5))
        .dead_connection_timeout(Duration::from_secs(60))
}

fn healed(healings: Vec<HealReport>) -> HealReport {
    let [healing] = <[HealReport; 1]>::try_from(healings).expect("one device");
    assert!(
        matches!(healing.outcome, HealOutcome::Adopted(_)),
        "{healing:?}"
    );
    healing
}

#[test]
fn a_server_that_is_killed_and_restarted_under_a_writer_ten_times_loses_nothing() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(64 * MIB);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let attachment = attach_with(&engine, &uri, &patient());
    let writer = Writer::start(&attachment.node);
    for round in 0..10 {
        writer.goes_on();
        server.kill();
        server.start();
        let healing = healed(engine.heal(soon()).unwrap());
        assert_eq!(healing.index, attachment.nbd_index().unwrap(), "{round}");
        writer.goes_on();
    }
    writer.end();
    detach(&engine, &uri);
}

#[test]
fn the_healer_heals_as_links_die_over_unix_sockets_too() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(64 * MIB);
    let mut server = NbdServer::nbdkit(At::unix(), &["file", store.path().to_str().unwrap()]);
    let (engine, uri) = (engine(), server.uri(""));
    let attachment = attach_with(&engine, &uri, &patient());
    let mut healer = engine.healer(soon()).unwrap();
    let writer = Writer::start(&attachment.node);
    for _ in 0..3 {
        writer.goes_on();
        server.kill();
        let news = healer.next(soon()).unwrap();
        assert!(
            news.iter().all(|healing| !healing.outcome.serves()),
            "{news:?}"
        );
        assert!(news[0].budget_left.unwrap() > Duration::from_secs(30));
        server.start();
        guest::wait_until("the healer to heal", Duration::from_secs(60), || {
            let news = healer
                .next(Deadline::after(Duration::from_secs(5)))
                .unwrap();
            news.iter()
                .any(|healing| healing.outcome.serves())
                .then_some(())
        });
        writer.goes_on();
    }
    writer.end();
    drop(healer);
    detach(&engine, &uri);
}

#[test]
fn a_server_that_answers_and_refuses_is_asked_again_with_pauses_and_healed_when_it_serves() {
    const LOOK: Duration = Duration::from_secs(4);
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(64 * MIB);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let attachment = attach_with(&engine, &uri, &patient());
    let mut healer = engine.healer(soon()).unwrap();
    let writer = Writer::start(&attachment.node);
    writer.goes_on();
    server.kill();
    // This server speaks, but not NBD.
    let At::Tcp(address) = server.at() else {
        unreachable!("a TCP server");
    };
    let stranger = TcpListener::bind(address).unwrap();
    let (asked, ends) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for client in stranger.incoming() {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                asked.fetch_add(1, Ordering::Relaxed);
                let _gone_already = client
                    .unwrap()
                    .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            }
        });
        let look = Deadline::after(LOOK);
        while !look.has_passed() {
            let news = healer.next(look).unwrap();
            assert!(
                news.iter().all(|healing| !healing.outcome.serves()),
                "{news:?}"
            );
        }
        ends.store(true, Ordering::Relaxed);
        let _wakes_it = TcpStream::connect(address);
    });
    // From 20 ms on each pause is twice as long as the last, up to 2 s.
    let asked = asked.into_inner();
    assert!((2..=24).contains(&asked), "{asked} times in {LOOK:?}");
    drop(stranger);
    server.start();
    guest::wait_until("the healer to heal", Duration::from_secs(60), || {
        let news = healer.next(Deadline::after(Duration::from_secs(5)));
        let mut news = news.unwrap().into_iter();
        news.any(|healing| healing.outcome.serves()).then_some(())
    });
    writer.goes_on();
    writer.end();
    drop(healer);
    detach(&engine, &uri);
}

/// The timeout in the kernel's ticks, as `nbd.c` shows it in debugfs.
fn io_timeout_of(node: &Path) -> u64 {
    let name = node.file_name().unwrap();
    let path = Path::new("/sys/kernel/debug/nbd")
        .join(name)
        .join("timeout");
    let ticks: u64 = fs::read_to_string(path).unwrap().trim().parse().unwrap();
    assert!(ticks > 0);
    ticks
}

struct Agent(Child);

impl Agent {
    /// Starts an agent in another process: it heals links as they die.
    fn start() -> Self {
        let child = Command::new("lunbd")
            .args(["heal", "--watch", "--json"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }
}

impl Agent {
    /// Kills the agent. It has ended only when this is dropped: the kernel may hold one of its
    /// reads until the device has a server again.
    fn kill(&mut self) {
        self.0.kill().unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_next_agent_heals_a_device_after_its_agent_and_server_were_killed_together() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(64 * MIB);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let uri = server.uri("disk");
    let attached = guest::lunbd(&[
        "attach",
        &uri,
        "--json",
        "--dead-timeout",
        "60s",
        "--io-timeout",
        "5s",
    ]);
    let attached: serde_json::Value = serde_json::from_slice(&attached.stdout).unwrap();
    let node = PathBuf::from(attached["node"].as_str().unwrap());
    let io_timeout = io_timeout_of(&node);
    let writer = Writer::start(&node);
    for _ in 0..2 {
        let mut agent = Agent::start();
        writer.goes_on();
        server.kill();
        agent.kill();
        server.start();
        let output = guest::lunbd(&["heal", "--json"]);
        assert!(output.status.success(), "{output:?}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["devices"][0]["outcome"], "adopted", "{report}");
        drop(agent);
        writer.goes_on();
        // Only the process that attached the device knew its timeout, so the heal left it
        // unchanged.
        assert_eq!(io_timeout_of(&node), io_timeout);
    }
    writer.end();
    detach(&engine(), &uri);
}

#[test]
fn a_server_that_hangs_for_longer_than_the_io_timeout_causes_no_error() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(64 * MIB);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let attachment = attach_with(&engine, &uri, &patient());
    let writer = Writer::start(&attachment.node);
    let mut healer = engine.healer(soon()).unwrap();
    writer.goes_on();
    server.stop();
    // The kernel treats the link as dead when a request has timed out.
    let news = healer.next(soon()).unwrap();
    assert!(!news.is_empty());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The pause is longer than a request's timeout.
            std::thread::sleep(Duration::from_secs(4));
            server.cont();
        });
        guest::wait_until("the device to serve again", Duration::from_secs(60), || {
            let news = healer
                .next(Deadline::after(Duration::from_secs(5)))
                .unwrap();
            news.iter()
                .any(|healing| healing.outcome.serves())
                .then_some(())
        });
    });
    writer.goes_on();
    writer.end();
    drop(healer);
    detach(&engine, &uri);
}

#[test]
fn a_healthy_device_is_left_as_it_is() {
    let _module = NbdModule::with_backend_ids(2);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    attach_with(&engine, &uri, &patient());
    let [healing] = <[HealReport; 1]>::try_from(engine.heal(soon()).unwrap()).unwrap();
    assert!(
        matches!(healing.outcome, HealOutcome::Healthy),
        "{healing:?}"
    );
    assert_eq!(healing.dials, 0);
    detach(&engine, &uri);
}

/// Writes a block of the device, and flushes it on the returned thread, which waits for a server.
fn write_and_flush(node: PathBuf) -> JoinHandle<std::io::Result<()>> {
    let (written, is_written) = std::sync::mpsc::channel();
    let flushing = std::thread::spawn(move || {
        let disk = File::options().write(true).open(node)?;
        disk.write_all_at(&[0x5a; 4096], MIB)?;
        written.send(()).unwrap();
        disk.sync_all()
    });
    let limit = soon().remaining();
    is_written.recv_timeout(limit).expect("a write");
    flushing
}

/// Attaches a store, replaces its server by another one while a write waits, and heals.
fn healed_by_another(
    first: &[&str],
    second: &[&str],
) -> (
    HealReport,
    NbdServer,
    Engine,
    Attachment,
    String,
    JoinHandle<std::io::Result<()>>,
) {
    let at = At::tcp();
    let mut server = NbdServer::nbdkit(at.clone(), first);
    let (engine, uri) = (engine(), server.uri(""));
    let attachment = attach_with(&engine, &uri, &patient());
    server.kill();
    drop(server);
    let flushing = write_and_flush(attachment.node.clone());
    let server = NbdServer::nbdkit(at, second);
    let [healing] = <[HealReport; 1]>::try_from(engine.heal(soon()).unwrap()).unwrap();
    (healing, server, engine, attachment, uri, flushing)
}

#[test]
fn a_server_that_is_back_with_another_export_is_refused_and_not_written_to() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::filled(4 << 20, 7);
    let path = store.path().to_str().unwrap();
    let is_untouched = || {
        let bytes = fs::read(store.path()).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 7));
    };
    for second in [&["file", path][..], &["--readonly", "memory", "8M"]] {
        let (healing, server, engine, _, uri, flushing) =
            healed_by_another(&["memory", "8M"], second);
        let HealOutcome::GeometryChanged(differences) = &healing.outcome else {
            panic!("{healing:?}");
        };
        let expected = |difference: &Difference| {
            matches!(
                difference,
                Difference::Shrunk { .. } | Difference::BecameReadOnly
            )
        };
        assert!(differences.iter().any(expected), "{differences:?}");
        assert!(healing.budget_left.is_some());
        assert_eq!(server.connections(), 0, "the kernel got one");
        is_untouched();
        // The heal accepts the right server again.
        let at = server.at().clone();
        drop(server);
        let _right = NbdServer::nbdkit(at, &["memory", "8M"]);
        healed(engine.heal(soon()).unwrap());
        flushing.join().unwrap().unwrap();
        is_untouched();
        detach(&engine, &uri);
    }
}

#[test]
fn a_heal_takes_a_grown_export_and_reports_its_growth() {
    let _module = NbdModule::with_backend_ids(2);
    let (healing, _server, engine, attachment, uri, flushing) =
        healed_by_another(&["memory", "8M"], &["memory", "16M"]);
    let HealOutcome::Adopted(differences) = &healing.outcome else {
        panic!("{healing:?}");
    };
    assert!(matches!(differences[..], [Difference::Grown { .. }]));
    flushing.join().unwrap().unwrap();
    assert_eq!(
        engine.inventory().unwrap().units[0].size,
        Some(attachment.size)
    );
    detach(&engine, &uri);
}

#[test]
fn a_heal_reports_an_export_that_its_server_no_longer_has() {
    let _module = NbdModule::with_backend_ids(2);
    let (one, other) = (Store::sparse(MIB), Store::sparse(MIB));
    let at = At::tcp();
    let server = NbdServer::qemu_nbd(at.clone(), "one", one.path(), &[]);
    let (engine, uri) = (engine(), server.uri("one"));
    attach_with(&engine, &uri, &patient());
    drop(server);
    let server = NbdServer::qemu_nbd(at.clone(), "other", other.path(), &[]);
    let limit = Deadline::after(Duration::from_secs(10));
    let [healing] = <[HealReport; 1]>::try_from(engine.heal(limit).unwrap()).unwrap();
    let HealOutcome::Failed(error) = &healing.outcome else {
        panic!("{healing:?}");
    };
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    drop(server);
    let _right = NbdServer::qemu_nbd(at, "one", one.path(), &[]);
    healed(engine.heal(soon()).unwrap());
    detach(&engine, &uri);
}

#[test]
fn a_spent_budget_is_an_error_to_the_reader_and_a_later_heal_revives_the_device() {
    let _module = NbdModule::with_backend_ids(2);
    let mut server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    // A request that is sent before the kernel knows that the link is dead has to time out
    // first.
    let options = patient().dead_connection_timeout(Duration::from_secs(2));
    let attachment = attach_with(&engine, &uri, &options);
    server.kill();
    let [healing] = <[HealReport; 1]>::try_from(engine.heal(soon()).unwrap()).unwrap();
    assert!(
        matches!(healing.outcome, HealOutcome::BudgetSpent),
        "{healing:?}"
    );
    let read = File::open(&attachment.node).and_then(|mut disk| {
        disk.seek(SeekFrom::Start(MIB))?;
        disk.read_exact(&mut [0; 512])
    });
    assert_eq!(read.unwrap_err().raw_os_error(), Some(nix::libc::EIO));
    server.start();
    healed(engine.heal(soon()).unwrap());
    let mut disk = File::open(&attachment.node).unwrap();
    disk.seek(SeekFrom::Start(2 * MIB)).unwrap();
    disk.read_exact(&mut [0; 512]).unwrap();
    drop(disk);
    detach(&engine, &uri);
}

#[test]
fn a_detach_writes_back_over_the_connection_that_a_heal_makes_meanwhile() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(64 * MIB);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let node = attach_with(&engine, &uri, &patient()).node;
    guest::udevd::settle();
    // The last close of a device writes back, so a reader keeps it open until the heal. udev
    // would read the partition table after the writer's close, write back before that, and hold
    // that close up until then (`bdev_disk_changed`). It leaves a locked disk alone.
    let reader = File::open(&node).unwrap();
    let reader = Flock::lock(reader, FlockArg::LockExclusiveNonblock).unwrap();
    let data = vec![0x5a; 64 << 10];
    server.kill();
    File::options()
        .write(true)
        .open(&node)
        .unwrap()
        .write_all(&data)
        .unwrap();
    let (entered, stages) = std::sync::mpsc::channel();
    let observer = StageObserver::new(move |stage| entered.send(stage).unwrap());
    let request = DetachRequest::new(source(&uri)).observe(observer);
    let detachment = std::thread::scope(|scope| {
        let detaching = scope.spawn(|| engine.detach(request, soon()));
        while stages.recv().unwrap() != Stage::Claim {}
        server.start();
        let limit = Deadline::after(soon().remaining() / 2);
        let healing = engine
            .heal_source(&source(&uri), &patient(), limit)
            .unwrap();
        assert!(
            matches!(healing.outcome, HealOutcome::Adopted(_)),
            "{healing:?}"
        );
        drop(reader);
        detaching.join().unwrap().unwrap()
    });
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    let mut stored = vec![0; data.len()];
    let mut file = File::open(store.path()).unwrap();
    file.read_exact(&mut stored).unwrap();
    assert!(stored == data, "it is lost");
}

#[test]
fn a_detach_that_abandons_data_frees_a_device_whose_server_is_gone() {
    let _module = NbdModule::with_backend_ids(2);
    let mut server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    let attachment = attach_with(&engine, &uri, &patient());
    server.kill();
    let limit = Deadline::after(Duration::from_secs(3));
    let error = engine.detach(source(&uri), limit).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    let request = DetachRequest::new(source(&uri)).abandon_unwritten();
    let detachment = engine.detach(request, soon()).unwrap();
    assert!(matches!(
        detachment.flush,
        Some(lunbd::engine::Flush::Abandoned(_))
    ));
    let name = attachment.node.file_name().unwrap().to_str().unwrap();
    assert!(!Path::new(&format!("/sys/block/{name}/pid")).exists());
    // Both flushes have failed, and neither says so of the next volume.
    let marks = guest::entries("/run/lunbd");
    let is_left = |mark: &String| mark.starts_with(&format!("lost-{name}-"));
    assert!(!marks.iter().any(is_left), "{marks:?}");
}

/// A process that changes an attribute of the queue waits for the requests in flight, and a read of
/// an attribute waits for that process (`block/blk-sysfs.c`).
#[test]
fn a_dead_link_is_healed_while_a_change_of_its_queue_waits_for_the_requests() {
    let _module = NbdModule::with_backend_ids(1);
    let store = Store::sparse(8 * MIB);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (ours, another, uri) = (engine(), engine(), server.uri("disk"));
    let attachment = attach_with(&ours, &uri, &patient());
    guest::udevd::settle();
    // A process that has not connected the device learns of its queue while it serves.
    let healings = another.heal(soon()).unwrap();
    assert!(matches!(healings[0].outcome, HealOutcome::Healthy));
    let index = attachment.nbd_index().unwrap();
    let requests = format!("/sys/block/{}/queue/nr_requests", index.name());
    let writer = Writer::start(&attachment.node);
    for (engine, count) in [(&ours, "64"), (&another, "32")] {
        writer.goes_on();
        server.kill();
        let (requests, (own, id)) = (requests.clone(), std::sync::mpsc::channel());
        let change = std::thread::spawn(move || {
            own.send(nix::unistd::gettid()).unwrap();
            fs::write(requests, count)
        });
        let stack = format!("/proc/self/task/{}/stack", id.recv().unwrap());
        let mut since = None;
        guest::wait_until("the change to wait", Duration::from_secs(30), || {
            let stack = fs::read_to_string(&stack).unwrap_or_default();
            if !stack.contains("freeze_queue") {
                since = None;
                return None;
            }
            // Without a request it takes no longer than a grace period of RCU.
            let since = since.get_or_insert_with(Instant::now);
            (since.elapsed() > Duration::from_secs(2)).then_some(())
        });
        server.start();
        healed(engine.heal(soon()).unwrap());
        change.join().unwrap().unwrap();
    }
    writer.goes_on();
    writer.end();
    detach(&another, &uri);
}
