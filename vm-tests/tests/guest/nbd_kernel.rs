//! The properties of the kernel's NBD driver that the engine relies on, with servers of other
//! projects.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;

use lunbd::ErrorKind;
use lunbd::id::BackendId;
use lunbd::nbd::{Connect, Hints, NbdDevice, Reconfigure, Refusal, State, disconnect, status};
use vm_tests::guest::nbd_device::{
    Device, HEALING, LIMIT, has_backend_ids, idle_link, index, refusal, roots, soon, state,
    wait_for,
};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, wait_until};

const MIB: u64 = 1 << 20;

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
    assert!(facts.pid.is_some());
    assert!(device.sysfs().disk().read_only().unwrap());
    let expected = has_backend_ids().then_some("volume a");
    assert_eq!(facts.backend.as_deref(), expected);
    assert_eq!(device.read(4096).unwrap(), 0x5a);
    assert_eq!(state(device.0), State::Connected);

    let hints = Hints {
        backend: Some("volume b".parse().unwrap()),
        ..Hints::default()
    };
    let as_another = NbdDevice::state(&roots(), device.0, &hints, soon()).unwrap();
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
fn every_server_is_read_and_written_over_tcp_and_those_that_can_over_unix_sockets() {
    let _module = NbdModule::load(1);
    let store = Store::sparse(8 * MIB);
    let file = format!("file={}", store.path().display());
    let starts: [&dyn Fn() -> NbdServer; 5] = [
        &|| NbdServer::qemu_nbd(At::tcp(), "a", store.path(), &[]),
        &|| NbdServer::qemu_nbd(At::unix(), "a", store.path(), &[]),
        &|| NbdServer::nbdkit(At::tcp(), &["file", &file]),
        &|| NbdServer::nbdkit(At::unix(), &["file", &file]),
        &|| NbdServer::of_nbd_server(&[("a", store.path())], &[]),
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
