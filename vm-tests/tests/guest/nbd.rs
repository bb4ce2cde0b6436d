//! NBD attach and detach, with servers of other projects.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::path::Path;
use std::time::{Duration, Instant};

use lunbd::engine::{Flush, NbdOptions, Unit, UnitKind};
use lunbd::uevent::Settled;
use lunbd::{AttachRequest, Attachment, DetachTarget, ErrorKind};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_agent::{
    assert_free, attach, attach_with, attribute, connected, detach, random, source,
};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const MIB: u64 = 1 << 20;
/// The limit of a wait, also on a machine that is several times slower.
const LIMIT: Duration = Duration::from_secs(60);

/// Attaches an export of this server, reads it back, writes data and detaches it.
fn comes_and_goes(server: &NbdServer) {
    let (engine, uri) = (engine(), server.uri("disk"));
    let attachment = attach(&engine, &uri);
    assert!(attachment.changed);
    assert_eq!(attachment.size, 64 * MIB);
    let capacity = engine.capacity(&attachment.node, soon()).unwrap();
    assert_eq!((capacity.bytes, capacity.file_systems.len()), (64 * MIB, 0));
    assert!(!attachment.read_only);
    assert_ne!(attachment.settled, Settled::KernelOnly);
    let Unit::Nbd {
        backend,
        connections,
        ..
    } = &attachment.unit
    else {
        panic!("{:?}", attachment.unit);
    };
    assert_eq!(*connections, 1);
    let canonical = source(&uri).to_string();
    assert_eq!(backend.as_ref().unwrap().as_str(), canonical);
    assert_eq!(attribute(&attachment, "backend"), canonical);
    assert!(!attribute(&attachment, "pid").is_empty());
    for link in &attachment.links {
        assert_eq!(fs::canonicalize(link).unwrap(), attachment.node);
    }

    let data = random(1 << 20);
    let mut disk = OpenOptions::new()
        .write(true)
        .open(&attachment.node)
        .unwrap();
    disk.write_all(&data).unwrap();
    drop(disk);
    let detachment = engine.detach(source(&uri), soon()).unwrap();
    assert_eq!(detachment.flush, Some(Flush::Done));
    assert_free(&attachment);

    let again = attach(&engine, &uri);
    let mut back = vec![0; data.len()];
    File::open(&again.node)
        .unwrap()
        .read_exact(&mut back)
        .unwrap();
    assert!(back == data, "what was written is not what is read");
    detach(&engine, &uri);
    let nothing = engine.detach(source(&uri), soon()).unwrap();
    assert!(!nothing.changed);
}

#[test]
fn an_export_is_attached_by_source_and_detached_by_node_on_every_kernel() {
    let _module = NbdModule::load(2);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let engine = engine();
    let attachment = attach(&engine, &server.uri(""));
    assert_eq!(attachment.size, 8 * MIB);
    fs::write(&attachment.node, random(1 << 20)).unwrap();
    let by_node = DetachTarget::Device(attachment.node.clone());
    let detachment = engine.detach(by_node, soon()).unwrap();
    assert_eq!(detachment.flush, Some(Flush::Done));
    assert_free(&attachment);
}

#[test]
fn an_export_of_nbdkit_comes_and_goes_over_tcp() {
    let _module = NbdModule::with_backend_ids(4);
    comes_and_goes(&NbdServer::nbdkit(At::tcp(), &["memory", "64M"]));
}

#[test]
fn an_export_of_nbdkit_comes_and_goes_over_a_unix_socket() {
    let _module = NbdModule::with_backend_ids(4);
    comes_and_goes(&NbdServer::nbdkit(At::unix(), &["memory", "64M"]));
}

#[test]
fn an_export_of_qemu_nbd_comes_and_goes() {
    let _module = NbdModule::with_backend_ids(4);
    let store = Store::sparse(64 * MIB);
    for at in [At::tcp(), At::unix()] {
        comes_and_goes(&NbdServer::qemu_nbd(at, "disk", store.path(), &[]));
    }
}

#[test]
fn an_export_of_nbd_server_comes_and_goes() {
    let _module = NbdModule::with_backend_ids(4);
    let store = Store::sparse(64 * MIB);
    comes_and_goes(&NbdServer::of_nbd_server(&[("disk", store.path())], &[]));
}

#[test]
fn a_read_only_export_is_read_only_and_refuses_writes() {
    let _module = NbdModule::with_backend_ids(4);
    let engine = engine();
    let refuses_writes = |attachment: &Attachment| {
        assert!(attachment.read_only);
        assert_eq!(attribute(attachment, "ro"), "1");
        let opened = OpenOptions::new().write(true).open(&attachment.node);
        let written = opened.and_then(|mut disk| {
            disk.write_all(&[1; 4096])?;
            disk.sync_all()
        });
        assert!(written.is_err());
    };
    let server = NbdServer::nbdkit(At::tcp(), &["--readonly", "memory", "8M"]);
    refuses_writes(&attach(&engine, &server.uri("")));
    detach(&engine, &server.uri(""));

    // This device is read-only for the caller alone; its server accepts writes.
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let options = NbdOptions::default().read_only();
    let request = AttachRequest::new(source(&server.uri(""))).nbd(options);
    refuses_writes(&engine.attach(&request, soon()).unwrap());
    detach(&engine, &server.uri(""));
}

#[test]
fn every_size_is_the_right_size() {
    let _module = NbdModule::with_backend_ids(4);
    let engine = engine();
    for (size, expected) in [
        ("512", 512),
        ("1G", 1 << 30),
        ("3T", 3 << 40),
        ("1073742336", 1_073_742_336),
        // The kernel has no half sectors, so the tail cannot be reached.
        ("1000001", 1_000_001 / 512 * 512),
    ] {
        let server = NbdServer::nbdkit(At::unix(), &["memory", size]);
        let attachment = attach(&engine, &server.uri(""));
        assert_eq!(attachment.size, expected, "{size}");
        detach(&engine, &server.uri(""));
    }
}

#[test]
fn several_connections_carry_io_where_the_server_allows_them() {
    let _module = NbdModule::with_backend_ids(4);
    let store = Store::sparse(64 * MIB);
    let server = NbdServer::qemu_nbd(At::unix(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let options = NbdOptions::default().connections(NonZeroU16::new(2).unwrap());
    let request = AttachRequest::new(source(&uri)).nbd(options.clone());
    let attachment = engine.attach(&request, soon()).unwrap();
    assert!(matches!(attachment.unit, Unit::Nbd { connections: 2, .. }));
    let data = random(8 << 20);
    fs::write(&attachment.node, &data).unwrap();
    let mut back = vec![0; data.len()];
    File::open(&attachment.node)
        .unwrap()
        .read_exact(&mut back)
        .unwrap();
    assert!(back == data);
    detach(&engine, &uri);

    // A server that does not report multi-conn gets one connection.
    let server = NbdServer::nbdkit(
        At::unix(),
        &[
            "--filter=multi-conn",
            "memory",
            "8M",
            "multi-conn-mode=disable",
        ],
    );
    let request = AttachRequest::new(source(&server.uri(""))).nbd(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    assert!(matches!(attachment.unit, Unit::Nbd { connections: 1, .. }));
    detach(&engine, &server.uri(""));
}

#[test]
fn exports_that_are_slow_have_an_overlay_or_fail_reads_attach_and_detach() {
    let _module = NbdModule::with_backend_ids(4);
    let store = Store::filled(8 << 20, 3);
    let file = format!("file={}", store.path().display());
    let engine = engine();
    let first_block = |node: &Path| {
        let mut block = [0; 512];
        let read = File::open(node).and_then(|mut disk| disk.read_exact(&mut block));
        read.map(|()| block[0])
    };
    let slow = ["--filter=delay", "file", &file, "rdelay=200ms"];
    let overlaid = ["--filter=cow", "file", &file];
    for arguments in [&slow[..], &overlaid] {
        let server = NbdServer::nbdkit(At::unix(), arguments);
        let attachment = attach(&engine, &server.uri(""));
        assert_eq!(first_block(&attachment.node).unwrap(), 3);
        detach(&engine, &server.uri(""));
    }
    let failing = [
        "--filter=error",
        "file",
        &file,
        "error-pread=EIO",
        "error-pread-rate=100%",
    ];
    let server = NbdServer::nbdkit(At::unix(), &failing);
    let attachment = attach(&engine, &server.uri(""));
    let error = first_block(&attachment.node).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    detach(&engine, &server.uri(""));
    assert_free(&attachment);
}

#[test]
fn requests_are_no_longer_than_the_server_takes() {
    let _module = NbdModule::with_backend_ids(4);
    let arguments = [
        "--filter=blocksize-policy",
        "memory",
        "8M",
        "blocksize-minimum=1",
        "blocksize-preferred=4096",
        "blocksize-maximum=64K",
        "blocksize-error-policy=error",
    ];
    let server = NbdServer::nbdkit(At::unix(), &arguments);
    let engine = engine();
    let attachment = attach(&engine, &server.uri(""));
    assert_eq!(attribute(&attachment, "queue/max_sectors_kb"), "64");
    let data = random(4 << 20);
    fs::write(&attachment.node, &data).unwrap();
    detach(&engine, &server.uri(""));

    // The next server on this index accepts longer requests.
    let server = NbdServer::nbdkit(At::unix(), &["memory", "8M"]);
    // The attach waits for a probe of udev that still has this index open.
    let same = NbdOptions::default().index(attachment.nbd_index().unwrap());
    let next = attach_with(&engine, &server.uri(""), &same);
    assert_eq!(next.node, attachment.node);
    assert_eq!(attribute(&next, "queue/max_sectors_kb"), "128");
    detach(&engine, &server.uri(""));

    // A limit of half a KiB would be written as 0, which newer kernels read as no limit.
    let too_short = [
        "--filter=blocksize-policy",
        "memory",
        "8M",
        "blocksize-minimum=1",
        "blocksize-preferred=512",
        "blocksize-maximum=512",
    ];
    let server = NbdServer::nbdkit(At::unix(), &too_short);
    let request = AttachRequest::new(source(&server.uri("")));
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
}

#[test]
fn a_failed_dial_configures_no_device() {
    let _module = NbdModule::with_backend_ids(2);
    let engine = engine();
    let fds = || guest::entries("/proc/self/fd").len();
    let before = fds();
    let At::Tcp(address) = At::tcp() else {
        unreachable!()
    };
    for (uri, kind) in [
        (format!("nbd://{address}/x"), ErrorKind::Unreachable),
        (
            "nbd+unix:///x?socket=/tmp/no-such".to_owned(),
            ErrorKind::Unreachable,
        ),
    ] {
        let start = Instant::now();
        let error = engine
            .attach(&AttachRequest::new(source(&uri)), soon())
            .unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        // The attach does not try again until the deadline, which is a minute away.
        assert!(start.elapsed() < Duration::from_secs(30));
    }
    let store = Store::sparse(MIB);
    let server = NbdServer::qemu_nbd(At::tcp(), "right", store.path(), &[]);
    let error = engine
        .attach(&AttachRequest::new(source(&server.uri("wrong"))), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(connected(), [] as [&str; 0]);
    guest::wait_until("no descriptor to be left", LIMIT, || {
        (fds() <= before).then_some(())
    });
}

#[test]
fn a_module_that_is_not_loaded_is_named_or_loaded_by_the_kernel_itself() {
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    let request = AttachRequest::new(source(&uri));
    match engine.attach(&request, soon()) {
        // Since 6.12 the kernel loads the module for a process that asks for its family.
        Ok(_) => {
            assert!(guest::kernel() >= (6, 12));
            detach(&engine, &uri);
            // The module can be unloaded as soon as none of its devices is open.
            drop(NbdModule::load(1));
            assert!(!Path::new("/sys/module/nbd").exists());
        }
        Err(error) => {
            assert!(guest::kernel() < (6, 12), "{error}");
            assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
            let text = error.to_string();
            assert!(text.contains("module is not loaded"), "{text}");
        }
    }
}

#[test]
fn the_list_shows_nbd_beside_scsi() {
    let _module = NbdModule::with_backend_ids(4);
    let target = guest::ScsiDebug::with_luns(2);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri("e"));
    guest::agent::attach(&engine, &target, 1);
    let attachment = attach(&engine, &uri);
    let units = engine.inventory().unwrap().units;
    let [scsi, nbd] = units.as_slice() else {
        panic!("{units:?}");
    };
    assert!(matches!(scsi.kind, UnitKind::Scsi(_)));
    let UnitKind::Nbd(shown) = &nbd.kind else {
        panic!("{nbd:?}");
    };
    assert_eq!(shown.source, Some(source(&uri)));
    assert_eq!(shown.node, attachment.node);
    assert_eq!(shown.state, lunbd::nbd::State::Connected);
    assert_eq!(shown.connections, 1);
    assert_eq!(nbd.size, Some(attachment.size));
    detach(&engine, &uri);
    assert_eq!(engine.inventory().unwrap().units.len(), 1);
}
