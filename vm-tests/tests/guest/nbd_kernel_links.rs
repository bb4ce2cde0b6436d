//! The dead connections of the kernel's NBD driver and their replacement, with servers of other
//! projects.

use std::fs::OpenOptions;
use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use lunbd::ErrorKind;
use lunbd::nbd::{DeadLinks, Hints, LinkNotice, NbdDevice, State, Timeouts, disconnect, status};
use vm_tests::guest::nbd_device::{
    Device, HEALING, LIMIT, RESENT, index, open_link, roots, soon, state, wait_for,
};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, wait_until};

const MIB: u64 = 1 << 20;

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
    // The kernel may count the link as dead only after its report.
    let read = wait_until("the new link to be adopted", LIMIT, || {
        device.give(open_link(&server.uri("a"))).unwrap();
        read.recv_timeout(Duration::from_secs(1)).ok()
    });
    assert_eq!(read.unwrap(), 7);
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
    let (synced, progress) = mpsc::channel();
    let writer = thread::spawn(move || -> std::io::Result<()> {
        let mut node = OpenOptions::new().write(true).open(node)?;
        for byte in 0..16 {
            node.write_all(&vec![byte; 1 << 20])?;
            node.sync_all()?;
            synced.send(()).unwrap();
        }
        Ok(())
    });
    for _ in 0..2 {
        server.kill();
        assert_eq!(watch.next(soon()), Some(LinkNotice::Dead(device.0)));
        server.start();
        while progress.try_recv().is_ok() {}
        // The kernel may count the link as dead only after its report.
        wait_until("the writer to go on or end", LIMIT, || {
            device.give(open_link(&server.uri("a"))).unwrap();
            let next = progress.recv_timeout(Duration::from_secs(1));
            (next != Err(RecvTimeoutError::Timeout)).then_some(())
        });
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
    let seen = NbdDevice::state(&roots(), device.0, &hints, soon()).unwrap();
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
