//! The properties of the kernel's NBD driver that the engine relies on, with servers of other
//! projects.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use lunbd::id::{BackendId, NbdIndex, NbdUri};
use lunbd::nbd::{
    Connect, Connection, DeadLinks, Hints, LinkNotice, NbdDevice, Reconfigure, Refusal, State,
    Timeouts, dial, disconnect, status,
};
use lunbd::{Deadline, Error, ErrorKind, Roots};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, wait_until};

const LIMIT: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;
/// The kernel resends requests to a dead server after this time. It is longer than an emulated
/// machine pauses: no test heals a link that dies in such a pause.
const RESENT: Duration = Duration::from_secs(5);

const HEALING: Timeouts = Timeouts {
    request: Duration::from_secs(30),
    dead_connection: Duration::from_secs(60),
};

fn roots() -> Roots {
    Roots::default()
}

fn soon() -> Deadline {
    Deadline::after(LIMIT)
}

fn index(number: u32) -> NbdIndex {
    NbdIndex::new(number).unwrap()
}

fn open_link(uri: &str) -> Connection {
    dial(&uri.parse::<NbdUri>().unwrap(), soon()).unwrap()
}

/// A device that is disconnected when this is dropped.
struct Device(NbdIndex);

impl Device {
    fn connect(uri: &str, number: u32, timeouts: Timeouts) -> Self {
        Self::with(uri, timeouts, |connect| connect.index(index(number)))
    }

    fn with(uri: &str, timeouts: Timeouts, more: impl Fn(Connect) -> Connect) -> Self {
        // udev's probe may have the device open, which is then busy for a moment.
        let connected = wait_until("the device to be connected", LIMIT, || {
            let link = open_link(uri);
            let geometry = link.export.geometry(4096, None).unwrap();
            let connect = Connect::new(vec![link.stream], geometry.size, timeouts)
                .block_size(geometry.block_size)
                .server_flags(link.export.flags);
            match more(connect).send(&roots(), soon()) {
                Err(error) if Refusal::of(&error) == Some(Refusal::OpenedByOther) => None,
                result => Some(result.unwrap()),
            }
        });
        Self(connected)
    }

    fn node(&self) -> PathBuf {
        PathBuf::from(format!("/dev/{}", self.0.name()))
    }

    fn sysfs(&self) -> NbdDevice {
        NbdDevice::find(&roots(), self.0).unwrap().unwrap()
    }

    fn open(&self) -> File {
        File::open(self.node()).unwrap()
    }

    /// Reads one page past the page cache.
    fn read(&self, offset: u64) -> std::io::Result<u8> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(nix::fcntl::OFlag::O_DIRECT.bits())
            .open(self.node())?;
        let mut page = memmap2::MmapMut::map_anon(4096)?;
        file.read_exact_at(&mut page, offset)?;
        Ok(page[0])
    }

    fn give(&self, link: Connection) -> lunbd::Result<()> {
        let timeouts = Timeouts {
            request: RESENT,
            ..HEALING
        };
        Reconfigure::new(self.0, timeouts)
            .sockets(vec![link.stream])
            .send(&roots(), soon())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = disconnect(&roots(), self.0, soon());
        let start = Instant::now();
        let gone = || matches!(state(self.0), State::Free | State::Absent);
        while !gone() && start.elapsed() < LIMIT {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn state(index: NbdIndex) -> State {
    NbdDevice::state(&roots(), index, &Hints::default()).unwrap()
}

fn wait_for(index: NbdIndex, wanted: State) {
    wait_until(&format!("{} to be {wanted}", index.name()), LIMIT, || {
        (state(index) == wanted).then_some(())
    });
}

fn refusal<T: std::fmt::Debug>(result: lunbd::Result<T>) -> (Refusal, Error) {
    let error = result.unwrap_err();
    let refusal = Refusal::of(&error).unwrap_or_else(|| panic!("{error:?}"));
    (refusal, error)
}

/// A stream socket that no server reads.
fn idle_link() -> (OwnedFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (ours.into(), theirs)
}

fn has_backend_ids() -> bool {
    guest::kernel() >= (5, 14)
}

#[test]
fn a_connect_says_which_index_it_took_and_sysfs_shows_what_was_asked_for() {
    let _module = NbdModule::load(2);
    let store = Store::filled(64 << 10, 0x5a);
    let server = NbdServer::qemu_nbd(At::unix(), "a", store.path(), &["--read-only"]);
    let id: BackendId = "volume a".parse().unwrap();
    let uri = server.uri("a");
    let device = Device::with(&uri, HEALING, |connect| connect.backend(id.clone()));
    assert_eq!(device.0, index(0));
    let facts = device.sysfs().facts().unwrap();
    assert_eq!(facts.size, 64 << 10);
    assert!(facts.read_only && facts.pid.is_some());
    let expected = has_backend_ids().then_some("volume a");
    assert_eq!(facts.backend.as_deref(), expected);
    assert_eq!(device.read(4096).unwrap(), 0x5a);
    assert_eq!(state(device.0), State::Connected);

    let hints = Hints {
        backend: Some("volume b".parse().unwrap()),
        ..Hints::default()
    };
    let as_another = NbdDevice::state(&roots(), device.0, &hints).unwrap();
    assert_eq!(as_another, State::Foreign);
    let by_id = NbdDevice::of_backend(&roots(), &id).unwrap();
    assert_eq!(by_id.len(), usize::from(has_backend_ids()));
}

#[test]
fn a_connect_to_an_index_that_does_not_exist_makes_the_device() {
    let _module = NbdModule::load(1);
    let store = Store::sparse(MIB);
    let server = NbdServer::qemu_nbd(At::tcp(), "a", store.path(), &[]);
    assert_eq!(state(index(500)), State::Absent);
    assert_eq!(status(&roots(), index(500), soon()).unwrap(), None);
    let device = Device::connect(&server.uri("a"), 500, HEALING);
    assert_eq!(device.0, index(500));
    assert_eq!(device.sysfs().disk().size().unwrap(), MIB);
    let indexes = NbdDevice::all(&roots()).unwrap();
    let indexes: Vec<u32> = indexes.iter().map(|device| device.index().get()).collect();
    assert_eq!(indexes, [0, 500]);
}

#[test]
fn every_server_is_read_and_written_over_tcp_and_unix_sockets() {
    let _module = NbdModule::load(1);
    for at in [At::tcp, At::unix] {
        let store = Store::sparse(8 * MIB);
        let file = format!("file={}", store.path().display());
        let starts: [&dyn Fn() -> NbdServer; 3] = [
            &|| NbdServer::qemu_nbd(at(), "a", store.path(), &[]),
            &|| NbdServer::nbdkit(at(), &["file", &file]),
            &|| NbdServer::of_nbd_server("a", store.path(), &[]),
        ];
        for (byte, start) in (1..).zip(starts) {
            let server = start();
            let device = Device::connect(&server.uri("a"), 0, HEALING);
            let mut node = OpenOptions::new().write(true).open(device.node()).unwrap();
            node.write_all(&vec![byte; 64 << 10]).unwrap();
            node.sync_all().unwrap();
            drop(node);
            assert_eq!(device.read(0).unwrap(), byte, "{server:?}");
            drop(device);
            drop(server);
            let mut stored = [0];
            File::open(store.path())
                .unwrap()
                .read_exact(&mut stored)
                .unwrap();
            assert_eq!(stored, [byte]);
        }
    }
}

#[test]
fn an_opener_of_a_free_device_makes_a_connect_fail_as_busy_and_the_error_names_it() {
    let _module = NbdModule::load(1);
    wait_for(index(0), State::Free);
    let opener = File::open("/dev/nbd0").unwrap();
    assert_eq!(state(index(0)), State::OpenedByOther);
    // The kernel's own status reports such a device as connected.
    let by_kernel = status(&roots(), index(0), soon()).unwrap().unwrap();
    assert!(by_kernel.connected);

    let (link, _peer) = idle_link();
    let connect = Connect::new(vec![link], MIB, HEALING).index(index(0));
    let (rule, error) = refusal(connect.send(&roots(), soon()));
    assert_eq!(rule, Refusal::OpenedByOther);
    assert_eq!(error.kind(), ErrorKind::InUse);
    let me = format!("{} (", std::process::id());
    assert!(error.to_string().contains(&me), "{error}");

    drop(opener);
    wait_for(index(0), State::Free);
    // udev's probe may have the device open once more, which also counts there.
    wait_until("the kernel to call it free", LIMIT, || {
        let by_kernel = status(&roots(), index(0), soon()).unwrap().unwrap();
        (!by_kernel.connected).then_some(())
    });
}

#[test]
fn every_rule_that_a_connect_breaks_is_named() {
    let _module = NbdModule::load(1);
    wait_for(index(0), State::Free);
    let broken = |size: u64, more: &dyn Fn(Connect) -> Connect, links: usize| {
        loop {
            let pairs: Vec<_> = (0..links).map(|_| idle_link()).collect();
            let (ours, _theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            let connect = Connect::new(ours, size, HEALING).index(index(0));
            let (rule, _) = refusal(more(connect).send(&roots(), soon()));
            if rule != Refusal::OpenedByOther {
                break rule;
            }
            // A refused connect causes an event, and udevd's probe of the device is in the way
            // of the next connect.
            guest::udevd::settle();
        }
    };
    assert_eq!(broken(MIB, &|c| c.block_size(1000), 1), Refusal::BlockSize);
    assert_eq!(broken(MIB, &|c| c.block_size(256), 1), Refusal::BlockSize);
    // Only the newest kernel accepts sizes above a page and up to this one.
    let above = broken(MIB, &|c| c.block_size(128 << 10), 1);
    assert_eq!(above, Refusal::BlockSize);
    // 5.10 accepts any size, and then has a device of a nonsensical size.
    if guest::kernel() >= (6, 1) {
        assert_eq!(broken(1 << 63, &|c| c, 1), Refusal::Size);
    }
    assert_eq!(broken(MIB, &|c| c, 2), Refusal::MultiConn);
    let beyond = broken(MIB, &|c| c.index(index(1 << 20)), 1);
    assert_eq!(beyond, Refusal::IndexTooLarge);

    // 5.10 does not check what kind of socket it gets.
    if guest::kernel() >= (6, 1) {
        guest::udevd::settle();
        let (datagrams, _peer) = UnixDatagram::pair().unwrap();
        let connect = Connect::new(vec![datagrams.into()], MIB, HEALING).index(index(0));
        let (rule, error) = refusal(connect.send(&roots(), soon()));
        assert_eq!(rule, Refusal::Unseen, "{error}");
    }
    // None of the refused connects left anything behind.
    wait_for(index(0), State::Free);
}

#[test]
fn what_is_connected_refuses_another_connect_and_another_backend_id() {
    let _module = NbdModule::load(1);
    let store = Store::sparse(MIB);
    let server = NbdServer::qemu_nbd(At::unix(), "a", store.path(), &[]);
    let id: BackendId = "mine".parse().unwrap();
    let uri = server.uri("a");
    let device = Device::with(&uri, HEALING, |connect| {
        connect.index(index(0)).backend(id.clone())
    });

    let (link, _peer) = idle_link();
    let connect = Connect::new(vec![link], MIB, HEALING).index(index(0));
    let (rule, error) = refusal(connect.send(&roots(), soon()));
    assert_eq!(rule, Refusal::Connected);
    assert!(
        !has_backend_ids() || error.to_string().contains("mine"),
        "{error}"
    );

    let with = |id: Option<&str>| {
        let reconfigure = Reconfigure::new(device.0, HEALING);
        match id {
            Some(id) => reconfigure.backend(id.parse().unwrap()),
            None => reconfigure,
        }
        .send(&roots(), soon())
    };
    with(Some("mine")).unwrap();
    if !has_backend_ids() {
        // This kernel compares nothing there.
        with(None).unwrap();
        return;
    }
    for wrong in [Some("theirs"), None] {
        let (rule, error) = refusal(with(wrong));
        assert_eq!(rule, Refusal::OtherBackend);
        assert_eq!(error.kind(), ErrorKind::IdentityMismatch);
    }
}

#[test]
fn a_device_without_a_backend_id_ignores_the_one_that_is_given() {
    let _module = NbdModule::load(1);
    let store = Store::sparse(MIB);
    let server = NbdServer::qemu_nbd(At::unix(), "a", store.path(), &[]);
    let device = Device::connect(&server.uri("a"), 0, HEALING);
    Reconfigure::new(device.0, HEALING)
        .backend("any".parse().unwrap())
        .send(&roots(), soon())
        .unwrap();
    assert_eq!(device.sysfs().backend().unwrap(), None);
}

#[test]
fn commands_distinguish_an_absent_index_from_an_unconnected_one() {
    let _module = NbdModule::load(1);
    wait_for(index(0), State::Free);
    let (rule, error) = refusal(disconnect(&roots(), index(9), soon()));
    assert_eq!(
        (rule, error.kind()),
        (Refusal::UnknownIndex, ErrorKind::NotFound)
    );
    let reconfigure = |number| Reconfigure::new(index(number), HEALING).send(&roots(), soon());
    assert_eq!(refusal(reconfigure(9)).0, Refusal::UnknownIndex);
    assert_eq!(refusal(reconfigure(0)).0, Refusal::NotConnected);
    disconnect(&roots(), index(0), soon()).unwrap();
}

#[test]
fn a_reconfiguration_of_a_live_device_succeeds_and_drops_the_new_socket() {
    let _module = NbdModule::load(1);
    let (one, two) = (Store::filled(64 << 10, 1), Store::filled(64 << 10, 2));
    let first = NbdServer::qemu_nbd(At::unix(), "a", one.path(), &[]);
    let second = NbdServer::qemu_nbd(At::unix(), "a", two.path(), &[]);
    let device = Device::connect(&first.uri("a"), 0, HEALING);
    let link = open_link(&second.uri("a"));
    let kept = link.stream.try_clone().unwrap();
    device.give(link).unwrap();
    assert_eq!(device.read(0).unwrap(), 1);

    // The device adopts the new link if the old one was shut down first.
    drop(kept);
    let links = DeadLinks::listen(soon()).unwrap();
    let mut watch = links.watch(Some(device.0));
    drop(first);
    assert_eq!(watch.next(soon()), Some(LinkNotice::Dead(device.0)));
    // The kernel reports the dead link a moment before it counts it as dead. Until then it
    // still drops a new link (`nbd_mark_nsock_dead`).
    let read = read_aside(&device);
    let read = wait_until("the new link to be adopted", LIMIT, || {
        device.give(open_link(&second.uri("a"))).unwrap();
        read.recv_timeout(Duration::from_secs(1)).ok()
    });
    assert_eq!(read.unwrap(), 2);
}

/// Reads the device on a separate thread.
fn read_aside(device: &Device) -> mpsc::Receiver<std::io::Result<u8>> {
    let (done, result) = mpsc::channel();
    let device = Device(device.0);
    thread::spawn(move || {
        let read = device.read(0);
        // This is a copy; the original disconnects.
        std::mem::forget(device);
        let _ = done.send(read);
    });
    result
}

#[test]
fn the_request_timeout_detects_a_hung_server_and_a_heal_causes_no_error() {
    let _module = NbdModule::load(1);
    let store = Store::filled(64 << 10, 7);
    let mut server = NbdServer::qemu_nbd(At::unix(), "a", store.path(), &[]);
    let timeouts = Timeouts {
        request: RESENT,
        dead_connection: Duration::from_secs(60),
    };
    let device = Device::connect(&server.uri("a"), 0, timeouts);
    guest::udevd::settle();
    let links = DeadLinks::listen(soon()).unwrap();
    let mut watch = links.watch(Some(device.0));
    server.stop();
    let read = read_aside(&device);
    assert_eq!(watch.next(soon()), Some(LinkNotice::Dead(device.0)));
    assert!(read.try_recv().is_err());
    // The kernel does not count a request that waits for a new link as in flight.
    server.kill();
    server.start();
    device.give(open_link(&server.uri("a"))).unwrap();
    assert_eq!(read.recv_timeout(LIMIT).unwrap().unwrap(), 7);
}

#[test]
fn a_killed_server_is_replaced_under_a_writer_that_sees_no_error() {
    let _module = NbdModule::load(1);
    let store = Store::sparse(16 * MIB);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "a", store.path(), &[]);
    let timeouts = Timeouts {
        request: RESENT,
        ..HEALING
    };
    let device = Device::connect(&server.uri("a"), 0, timeouts);
    guest::udevd::settle();
    let links = DeadLinks::listen(soon()).unwrap();
    let mut watch = links.watch(Some(device.0));
    let node = device.node();
    let writer = thread::spawn(move || -> std::io::Result<()> {
        let mut node = OpenOptions::new().write(true).open(node)?;
        for byte in 0..16 {
            node.write_all(&vec![byte; 1 << 20])?;
            node.sync_all()?;
        }
        Ok(())
    });
    for _ in 0..2 {
        server.kill();
        assert_eq!(watch.next(soon()), Some(LinkNotice::Dead(device.0)));
        server.start();
        device.give(open_link(&server.uri("a"))).unwrap();
    }
    writer.join().unwrap().unwrap();
    drop(device);
    let written = std::fs::read(store.path()).unwrap();
    let whole = written
        .chunks(1 << 20)
        .zip(0..)
        .all(|(part, byte)| part.iter().all(|&written| written == byte));
    assert!(whole && written.len() == 16 << 20);
}

#[test]
fn a_spent_budget_is_an_error_to_the_reader_and_the_device_can_still_be_revived() {
    let _module = NbdModule::load(1);
    let store = Store::filled(64 << 10, 9);
    let mut server = NbdServer::qemu_nbd(At::unix(), "a", store.path(), &[]);
    let timeouts = Timeouts {
        request: Duration::from_secs(30),
        dead_connection: Duration::from_secs(2),
    };
    let device = Device::connect(&server.uri("a"), 0, timeouts);
    guest::udevd::settle();
    let links = DeadLinks::listen(soon()).unwrap();
    let mut watch = links.watch(Some(device.0));
    server.kill();
    // A request that is sent before the kernel has seen the end waits for its own timeout.
    assert_eq!(watch.next(soon()), Some(LinkNotice::Dead(device.0)));
    let start = Instant::now();
    let error = device.read(0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    let waited = start.elapsed();
    // The dead-connection timeout ended it, and not that of a request, which is 30 s.
    assert!((2..20).contains(&waited.as_secs()), "{waited:?}");
    assert_eq!(state(device.0), State::Connected);
    server.start();
    device.give(open_link(&server.uri("a"))).unwrap();
    assert_eq!(device.read(0).unwrap(), 9);
}

#[test]
fn a_disconnect_while_the_device_is_open_leaves_its_pid_until_the_last_close() {
    let _module = NbdModule::load(1);
    let store = Store::sparse(MIB);
    let server = NbdServer::qemu_nbd(At::unix(), "a", store.path(), &[]);
    let device = Device::connect(&server.uri("a"), 0, HEALING);
    guest::udevd::settle();
    let opener = device.open();
    disconnect(&roots(), device.0, soon()).unwrap();
    guest::udevd::settle();
    assert!(device.sysfs().pid().unwrap().is_some());
    let hints = Hints {
        disconnected: true,
        ..Hints::default()
    };
    let seen = NbdDevice::state(&roots(), device.0, &hints).unwrap();
    assert_eq!(seen, State::Draining);
    drop(opener);
    wait_for(device.0, State::Free);
}

#[test]
fn the_deaths_of_32_simultaneous_links_are_all_reported() {
    let _module = NbdModule::load(32);
    let store = Store::sparse(MIB);
    let mut server = NbdServer::qemu_nbd(At::unix(), "a", store.path(), &[]);
    let uri = server.uri("a");
    let devices: Vec<_> = (0..32).map(|n| Device::connect(&uri, n, HEALING)).collect();
    let links = DeadLinks::listen(soon()).unwrap();
    let mut all = links.watch(None);
    let mut each: Vec<_> = devices
        .iter()
        .map(|device| links.watch(Some(device.0)))
        .collect();
    server.kill();
    for (device, watch) in devices.iter().zip(&mut each) {
        assert_eq!(watch.next(soon()), Some(LinkNotice::Dead(device.0)));
    }
    let mut dead: Vec<_> = devices.iter().filter_map(|_| all.next(soon())).collect();
    dead.sort_unstable_by_key(|notice| match notice {
        LinkNotice::Dead(index) => index.get(),
        LinkNotice::Resync => u32::MAX,
    });
    let expected: Vec<_> = devices
        .iter()
        .map(|device| LinkNotice::Dead(device.0))
        .collect();
    assert_eq!(dead, expected);
}

#[test]
fn a_diskseq_does_not_tell_one_connection_from_the_next() {
    let _module = NbdModule::load(1);
    let (one, two) = (Store::sparse(MIB), Store::sparse(2 * MIB));
    let first = NbdServer::qemu_nbd(At::unix(), "a", one.path(), &[]);
    let second = NbdServer::qemu_nbd(At::unix(), "b", two.path(), &[]);
    let seen = |uri: &str| {
        let device = Device::connect(uri, 0, HEALING);
        let disk = device.sysfs().disk().clone();
        (disk.size().unwrap(), disk.diskseq().unwrap())
    };
    let (before, after) = (seen(&first.uri("a")), seen(&second.uri("b")));
    assert_eq!((before.0, after.0), (MIB, 2 * MIB));
    assert_eq!(before.1, after.1);
}

#[test]
fn commands_and_events_work_after_the_module_is_loaded_again() {
    guest::enter();
    // A newer kernel loads the module when a process asks for the family.
    let is_loaded = || std::path::Path::new("/sys/module/nbd").exists();
    match status(&roots(), index(0), soon()) {
        Ok(_) => assert!(is_loaded()),
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotSupported, "{error:?}"),
    }
    // On such a kernel the module is unloaded only after this process listens. To listen would
    // load it again, and the family would be announced just as the watch is made.
    let links = DeadLinks::listen(soon()).unwrap();
    let mut watch = links.watch(None);
    if is_loaded() {
        guest::udevd::settle();
        drop(NbdModule::load(1));
        assert!(!is_loaded());
    }
    for _ in 0..2 {
        let _module = NbdModule::load(1);
        assert_eq!(watch.next(soon()), Some(LinkNotice::Resync));
        let store = Store::sparse(MIB);
        let mut server = NbdServer::qemu_nbd(At::unix(), "a", store.path(), &[]);
        let device = Device::connect(&server.uri("a"), 0, HEALING);
        server.kill();
        assert_eq!(watch.next(soon()), Some(LinkNotice::Dead(device.0)));
    }
}

#[test]
fn a_socket_handed_over_may_be_closed_here_and_stays_the_kernels() {
    let _module = NbdModule::load(1);
    let store = Store::filled(64 << 10, 3);
    let server = NbdServer::nbdkit(
        At::unix(),
        &["file", &format!("file={}", store.path().display())],
    );
    let device = Device::connect(&server.uri(""), 0, HEALING);
    // None of our descriptors leads to the server any more.
    let sockets = guest::entries("/proc/self/fd").into_iter().filter(|fd| {
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
        link.is_ok_and(|target| target.to_string_lossy().starts_with("socket:"))
    });
    assert_eq!(sockets.count(), 0);
    assert_eq!(device.read(0).unwrap(), 3);
    assert!(device.open().as_fd().try_clone_to_owned().is_ok());
}
