//! NBD attach and detach, with servers of other projects.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use lunbd::engine::{Flush, NbdOptions, Unit, UnitKind};
use lunbd::error::Stage;
use lunbd::id::{BackendId, NbdIndex};
use lunbd::uevent::Settled;
use lunbd::{
    AttachRequest, Attachment, Deadline, DetachRequest, DetachTarget, Engine, ErrorKind, Source,
};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const MIB: u64 = 1 << 20;
/// The limit of a wait, also on a machine that is several times slower.
const LIMIT: Duration = Duration::from_secs(60);

/// Loads the driver, if it keeps backend ids.
fn module(devices: u32) -> NbdModule {
    if guest::kernel() < (5, 14) {
        guest::skip("the kernel keeps no backend ids before 5.14");
    }
    NbdModule::load(devices)
}

fn attach(engine: &Engine, uri: &str) -> Attachment {
    let request = AttachRequest::new(source(uri));
    engine.attach(&request, soon()).expect("an attach")
}

fn source(uri: &str) -> Source {
    uri.parse().expect("a source")
}

fn detach(engine: &Engine, uri: &str) {
    let detachment = engine.detach(source(uri), soon()).expect("a detach");
    assert!(detachment.changed);
}

fn sysfs(attachment: &Attachment, attribute: &str) -> String {
    let name = attachment.node.file_name().unwrap().to_str().unwrap();
    let text = fs::read_to_string(format!("/sys/block/{name}/{attribute}"));
    text.unwrap_or_default().trim().to_owned()
}

fn assert_free(attachment: &Attachment) {
    assert_eq!(sysfs(attachment, "pid"), "");
    assert_eq!(sysfs(attachment, "size"), "0");
}

fn configured() -> Vec<String> {
    let mut names = guest::entries("/sys/block");
    names.retain(|name| Path::new(&format!("/sys/block/{name}/pid")).exists());
    names.sort();
    names
}

fn random(length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    let mut source = File::open("/dev/urandom").unwrap();
    source.read_exact(&mut data).unwrap();
    data
}

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
    assert_eq!(sysfs(&attachment, "backend"), canonical);
    assert!(!sysfs(&attachment, "pid").is_empty());
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
    let _module = module(4);
    comes_and_goes(&NbdServer::nbdkit(At::tcp(), &["memory", "64M"]));
}

#[test]
fn an_export_of_nbdkit_comes_and_goes_over_a_unix_socket() {
    let _module = module(4);
    comes_and_goes(&NbdServer::nbdkit(At::unix(), &["memory", "64M"]));
}

#[test]
fn an_export_of_qemu_nbd_comes_and_goes() {
    let _module = module(4);
    let store = Store::sparse(64 * MIB);
    for at in [At::tcp(), At::unix()] {
        comes_and_goes(&NbdServer::qemu_nbd(at, "disk", store.path(), &[]));
    }
}

#[test]
fn an_export_of_nbd_server_comes_and_goes() {
    let _module = module(4);
    let store = Store::sparse(64 * MIB);
    comes_and_goes(&NbdServer::of_nbd_server("disk", store.path(), &[]));
}

#[test]
fn a_repeated_attach_returns_the_attached_device_unchanged_only_under_its_id() {
    let _module = module(4);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    let first = attach(&engine, &uri);
    let again = attach(&engine, &uri);
    assert!(!again.changed);
    assert_eq!(again.nbd_index(), first.nbd_index());
    assert_eq!(configured().len(), 1);

    // The same index with another id belongs to another device.
    let index = first.nbd_index().unwrap();
    let other = NbdOptions::default()
        .index(index)
        .backend("another".parse().unwrap());
    let request = AttachRequest::new(source(&uri)).nbd(other);
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.to_string().contains("connected already"), "{error}");

    // The same id at another index is not attached a second time.
    let elsewhere = NbdOptions::default().index(NbdIndex::new(index.get() + 1).unwrap());
    let request = AttachRequest::new(source(&uri)).nbd(elsewhere);
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(configured().len(), 1);
    detach(&engine, &uri);
}

#[test]
fn two_processes_that_attach_one_source_get_one_device() {
    let _module = module(8);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let uri = server.uri("");
    guest::enter();
    let start = || {
        Command::new("lunbd")
            .args(["attach", &uri, "--json"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let both = [start(), start()].map(|child| child.wait_with_output().unwrap());
    let answers: Vec<serde_json::Value> = both
        .iter()
        .map(|output| serde_json::from_slice(&output.stdout).unwrap())
        .collect();
    assert_eq!(answers[0]["node"], answers[1]["node"]);
    assert_ne!(answers[0]["changed"], answers[1]["changed"]);
    assert_eq!(configured().len(), 1);
    detach(&engine(), &uri);
}

#[test]
fn an_index_that_is_asked_for_is_taken_or_made() {
    let _module = module(2);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    for index in [1, 40] {
        let options = NbdOptions::default().index(NbdIndex::new(index).unwrap());
        let request = AttachRequest::new(source(&uri)).nbd(options);
        let attachment = engine.attach(&request, soon()).unwrap();
        assert_eq!(attachment.node, Path::new(&format!("/dev/nbd{index}")));
        detach(&engine, &uri);
        assert_free(&attachment);
    }
}

#[test]
fn with_every_device_taken_one_more_is_made() {
    let _module = module(1);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let engine = engine();
    let uris: Vec<String> = (0..3).map(|n| server.uri(&format!("e{n}"))).collect();
    let mut names: Vec<String> = uris
        .iter()
        .map(|uri| attach(&engine, uri).nbd_index().unwrap().name())
        .collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 3);
    // The devices are not always 0 to 2: udev's probe may have a new one open, and then the
    // kernel makes the next one.
    assert!(names.contains(&"nbd0".to_owned()), "{names:?}");
    assert_eq!(configured(), names);
    for uri in &uris {
        detach(&engine, uri);
    }
}

#[test]
fn sixteen_concurrent_attaches_get_one_device_each_although_only_one_existed() {
    let _module = module(1);
    let server = NbdServer::nbdkit(At::unix(), &["memory", "8M"]);
    let engine = engine();
    let uris: Vec<String> = (0..16).map(|n| server.uri(&format!("e{n}"))).collect();
    let mut nodes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = uris
            .iter()
            .map(|uri| scope.spawn(|| attach(&engine, uri).node))
            .collect();
        let nodes = threads.into_iter().map(|thread| thread.join().unwrap());
        nodes.collect()
    });
    nodes.sort();
    nodes.dedup();
    assert_eq!(nodes.len(), 16);
    assert_eq!(configured().len(), 16);
    thread::scope(|scope| {
        for uri in &uris {
            scope.spawn(|| detach(&engine, uri));
        }
    });
    assert_eq!(configured(), [] as [&str; 0]);
}

#[test]
fn a_read_only_export_is_read_only_and_refuses_writes() {
    let _module = module(4);
    let engine = engine();
    let refuses_writes = |attachment: &Attachment| {
        assert!(attachment.read_only);
        assert_eq!(sysfs(attachment, "ro"), "1");
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
    let _module = module(4);
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
    let _module = module(4);
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
    let _module = module(4);
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
fn a_disk_that_udev_reads_is_disconnected_after_the_read() {
    let _module = NbdModule::load(2);
    let server = NbdServer::nbdkit(
        At::tcp(),
        &["--filter=delay", "memory", "8M", "rdelay=200ms"],
    );
    let engine = engine();
    let attachment = attach(&engine, &server.uri(""));
    // udevd's worker reads like this, under a shared lock.
    let disk = File::open(&attachment.node).unwrap();
    disk.lock_shared().unwrap();
    let read = thread::spawn(move || {
        let mut block = [0; 512];
        (1..=10u64).try_for_each(|at| disk.read_exact_at(&mut block, at << 19))
    });
    let by_node = DetachTarget::Device(attachment.node.clone());
    engine.detach(by_node, soon()).unwrap();
    read.join().unwrap().unwrap();
    assert_free(&attachment);
}

#[test]
fn requests_are_no_longer_than_the_server_takes() {
    let _module = module(4);
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
    assert_eq!(sysfs(&attachment, "queue/max_sectors_kb"), "64");
    let data = random(4 << 20);
    fs::write(&attachment.node, &data).unwrap();
    detach(&engine, &server.uri(""));

    // The next server on this index accepts longer requests.
    let server = NbdServer::nbdkit(At::unix(), &["memory", "8M"]);
    let next = attach(&engine, &server.uri(""));
    assert_eq!(next.node, attachment.node);
    assert_eq!(sysfs(&next, "queue/max_sectors_kb"), "128");
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
fn a_mounted_device_is_refused_and_a_detached_one_was_flushed() {
    let _module = module(4);
    let store = Store::sparse(64 * MIB);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let node = attach(&engine, &uri).node;
    guest::run(&["mkfs.ext4", "-q", "-F", node.to_str().unwrap()]);
    fs::create_dir_all("/tmp/nbd").unwrap();
    guest::run(&["mount", node.to_str().unwrap(), "/tmp/nbd"]);
    let error = engine.detach(source(&uri), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(error.stage(), Some(Stage::Claim));
    assert!(error.to_string().contains("mounted on /tmp/nbd"), "{error}");
    fs::write("/tmp/nbd/file", "still here").unwrap();
    guest::run(&["umount", "/tmp/nbd"]);
    fs::remove_dir("/tmp/nbd").unwrap();
    detach(&engine, &uri);
    guest::run(&["e2fsck", "-fn", store.path().to_str().unwrap()]);
}

#[test]
fn a_free_device_and_one_of_another_id_are_left_alone_unless_named() {
    let _module = module(4);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    let free = engine
        .detach(DetachTarget::Device("/dev/nbd2".into()), soon())
        .unwrap();
    assert!(!free.changed);

    let id: BackendId = "volume-17".parse().unwrap();
    let options = NbdOptions::default().backend(id.clone());
    let request = AttachRequest::new(source(&uri)).nbd(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    assert_eq!(sysfs(&attachment, "backend"), "volume-17");
    // The source alone does not find it, because it has another id.
    assert!(!engine.detach(source(&uri), soon()).unwrap().changed);
    assert_eq!(configured().len(), 1);
    let by_id = DetachRequest::new(source(&uri)).backend(id.clone());
    assert!(engine.detach(by_id, soon()).unwrap().changed);

    // Its node names the device.
    let options = NbdOptions::default().backend(id);
    let request = AttachRequest::new(source(&uri)).nbd(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    let by_node = DetachTarget::Device(attachment.node.clone());
    assert!(engine.detach(by_node, soon()).unwrap().changed);
    assert_free(&attachment);
}

#[test]
fn a_device_that_somebody_reads_is_free_when_the_reader_has_closed_it() {
    let _module = module(4);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    let attachment = attach(&engine, &uri);
    let reader = File::open(&attachment.node).unwrap();
    // The claim proves that the device is not mounted; a reader only delays the end.
    let error = engine
        .detach(source(&uri), Deadline::after(Duration::from_secs(10)))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Confirm));
    drop(reader);
    guest::wait_until("the device to be free", LIMIT, || {
        sysfs(&attachment, "pid").is_empty().then_some(())
    });
    assert!(!engine.detach(source(&uri), soon()).unwrap().changed);
    assert_free(&attachment);
}

#[test]
fn a_device_that_a_process_has_open_for_writing_is_refused_by_name_and_serves_on() {
    let _module = module(4);
    let store = Store::sparse(8 * MIB);
    let server = NbdServer::qemu_nbd(At::unix(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let attachment = attach(&engine, &uri);
    guest::udevd::settle();
    let mut options = OpenOptions::new();
    let mut writer = options.write(true).open(&attachment.node).unwrap();
    let data = random(64 << 10);
    writer.write_all(&data).unwrap();
    let error = engine.detach(source(&uri), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert_eq!(error.stage(), Some(Stage::Claim), "{error}");
    let us = format!("open for writing in process {}", std::process::id());
    assert!(error.to_string().contains(&us), "{error}");
    writer.sync_all().unwrap();
    drop(writer);
    detach(&engine, &uri);
    assert!(fs::read(store.path()).unwrap().starts_with(&data));
}

#[test]
fn a_probe_that_has_the_node_open_is_waited_for() {
    let _module = module(1);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    let probe = File::open("/dev/nbd0").unwrap();
    let options = NbdOptions::default().index(NbdIndex::new(0).unwrap());
    let request = AttachRequest::new(source(&uri)).nbd(options);
    let error = engine
        .attach(&request, Deadline::after(Duration::from_secs(10)))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    let opener = format!("{} (", std::process::id());
    assert!(error.to_string().contains(&opener), "{error}");

    let attachment = thread::scope(|scope| {
        let waiting = scope.spawn(|| engine.attach(&request, soon()));
        thread::sleep(Duration::from_millis(300));
        drop(probe);
        waiting.join().unwrap().unwrap()
    });
    assert_eq!(attachment.node, Path::new("/dev/nbd0"));
    detach(&engine, &uri);
}

#[test]
fn a_failed_dial_configures_no_device() {
    let _module = module(2);
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
    assert_eq!(configured(), [] as [&str; 0]);
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
    let _module = module(4);
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
