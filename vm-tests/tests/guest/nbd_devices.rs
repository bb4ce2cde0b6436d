//! Which NBD device an attach takes, which a detach frees, and their other users.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use lunbd::engine::{NbdOptions, StageObserver};
use lunbd::error::Stage;
use lunbd::id::{BackendId, NbdIndex};
use lunbd::{AttachRequest, Deadline, DetachRequest, DetachTarget, ErrorKind};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::nbd_agent::{
    assert_free, attach, attribute, connected, detach, random, source,
};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::unwritten::{LazyWriteback, keep_unwritten};

const MIB: u64 = 1 << 20;
/// The limit of a wait, also on a machine that is several times slower.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_repeated_attach_returns_the_attached_device_unchanged_only_under_its_id() {
    let _module = NbdModule::with_backend_ids(4);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    let first = attach(&engine, &uri);
    let again = attach(&engine, &uri);
    assert!(!again.changed);
    assert_eq!(again.nbd_index(), first.nbd_index());
    assert_eq!(connected().len(), 1);

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
    assert_eq!(connected().len(), 1);
    detach(&engine, &uri);
}

#[test]
fn two_processes_that_attach_one_source_get_one_device() {
    let _module = NbdModule::with_backend_ids(8);
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
    assert_eq!(connected().len(), 1);
    detach(&engine(), &uri);
}

#[test]
fn an_index_that_is_asked_for_is_taken_or_made() {
    let _module = NbdModule::with_backend_ids(2);
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
    let _module = NbdModule::with_backend_ids(1);
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
    assert_eq!(connected(), names);
    for uri in &uris {
        detach(&engine, uri);
    }
}

#[test]
fn sixteen_concurrent_attaches_get_one_device_each_although_only_one_existed() {
    let _module = NbdModule::with_backend_ids(1);
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
    assert_eq!(connected().len(), 16);
    thread::scope(|scope| {
        for uri in &uris {
            scope.spawn(|| detach(&engine, uri));
        }
    });
    assert_eq!(connected(), [] as [&str; 0]);
}

#[test]
fn a_free_device_and_one_of_another_id_are_left_alone_unless_named() {
    let _module = NbdModule::with_backend_ids(4);
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
    assert_eq!(attribute(&attachment, "backend"), "volume-17");
    // The source alone does not find it, because it has another id.
    assert!(!engine.detach(source(&uri), soon()).unwrap().changed);
    assert_eq!(connected().len(), 1);
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
fn a_probe_that_has_the_node_open_is_waited_for() {
    let _module = NbdModule::with_backend_ids(1);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    let probe = File::open("/dev/nbd0").unwrap();
    let options = NbdOptions::default().index(NbdIndex::new(0).unwrap());
    let request = AttachRequest::new(source(&uri)).nbd(options);
    let limit = Deadline::after(Duration::from_secs(10));
    let error = engine.attach(&request, limit).unwrap_err();
    assert!(limit.has_passed(), "it did not wait: {error}");
    assert_eq!(error.kind(), ErrorKind::InUse);
    let opener = format!("{} (", std::process::id());
    assert!(error.to_string().contains(&opener), "{error}");

    // The kernel logs each refusal. The probe ends after one, when the attach waits already.
    let mut log = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open("/dev/kmsg")
        .unwrap();
    log.seek(SeekFrom::End(0)).unwrap();
    let mut record = vec![0; 8 << 10];
    let attachment = thread::scope(|scope| {
        let waiting = scope.spawn(|| engine.attach(&request, soon()));
        guest::wait_until("the kernel's refusal", LIMIT, || {
            // One read is one record. It fails where there is no further one.
            let length = log.read(&mut record).ok()?;
            let record = String::from_utf8_lossy(&record[..length]);
            record.contains("nbd0 already in use").then_some(())
        });
        drop(probe);
        waiting.join().unwrap().unwrap()
    });
    assert_eq!(attachment.node, Path::new("/dev/nbd0"));
    detach(&engine, &uri);
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
fn a_mounted_device_is_refused_and_a_detached_one_was_flushed() {
    /// The file system ends before this byte, so that its unmount does not write what is here.
    const BEHIND_IT: u64 = 48 * MIB;
    let _lazy = LazyWriteback::start();
    let _module = NbdModule::with_backend_ids(4);
    let store = Store::sparse(64 * MIB);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let node = attach(&engine, &uri).node;
    guest::run(&["mkfs.ext4", "-q", "-F", node.to_str().unwrap(), "32M"]);
    fs::create_dir_all("/tmp/nbd").unwrap();
    guest::run(&["mount", "-t", "ext4", node.to_str().unwrap(), "/tmp/nbd"]);
    let error = engine.detach(source(&uri), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(error.stage(), Some(Stage::Claim));
    assert!(error.to_string().contains("mounted on /tmp/nbd"), "{error}");
    fs::write("/tmp/nbd/file", "still here").unwrap();
    guest::run(&["umount", "/tmp/nbd"]);
    fs::remove_dir("/tmp/nbd").unwrap();
    let reader = Mutex::new(Some(keep_unwritten(&node)));
    let disk = OpenOptions::new().write(true).open(&node).unwrap();
    disk.write_all_at(&[0x5a; 4096], BEHIND_IT).unwrap();
    drop(disk);
    let is_stored = || {
        let mut block = [0; 4096];
        let file = File::open(store.path()).unwrap();
        file.read_exact_at(&mut block, BEHIND_IT).unwrap();
        block == [0x5a; 4096]
    };
    assert!(!is_stored(), "it is written already");
    // The disconnect frees the device only after the last close. The claim is still open when
    // the reader closes, so that this close writes nothing back.
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Disconnect {
            drop(reader.lock().unwrap().take());
        }
    });
    let request = DetachRequest::new(source(&uri)).observe(observer);
    assert!(engine.detach(request, soon()).unwrap().changed);
    assert!(is_stored(), "it was not written back");
    guest::run(&["e2fsck", "-fn", store.path().to_str().unwrap()]);
}

#[test]
fn a_device_that_somebody_reads_is_free_when_the_reader_has_closed_it() {
    let _module = NbdModule::with_backend_ids(4);
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
        attribute(&attachment, "pid").is_empty().then_some(())
    });
    assert!(!engine.detach(source(&uri), soon()).unwrap().changed);
    assert_free(&attachment);
}

#[test]
fn a_repeated_detach_beside_a_reader_waits_for_the_reader_and_reports_no_loss() {
    let _module = NbdModule::with_backend_ids(4);
    let store = Store::sparse(8 * MIB);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let attachment = attach(&engine, &uri);
    guest::udevd::settle();
    let reader = File::open(&attachment.node).unwrap();
    for _ in 0..2 {
        let late = engine.detach(source(&uri), Deadline::after(Duration::from_secs(10)));
        let error = late.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(error.stage(), Some(Stage::Confirm), "{error}");
    }
    drop(reader);
    guest::wait_until("the device to be free", LIMIT, || {
        attribute(&attachment, "pid").is_empty().then_some(())
    });
    assert!(!engine.detach(source(&uri), soon()).unwrap().changed);
    assert_free(&attachment);
    // A map of an earlier test on this machine may have left a mark.
    let name = attachment.node.file_name().unwrap().to_string_lossy();
    let own = format!("lost-{name}-");
    let marks = guest::entries("/run/lunbd");
    assert!(
        !marks.iter().any(|mark| mark.starts_with(&own)),
        "{marks:?}"
    );
}

/// The server has no flush, so that the kernel sends none to a device that has nothing to write.
#[test]
fn a_repeated_detach_of_a_device_that_was_disconnected_with_unwritten_data_is_not_safe() {
    let _lazy = LazyWriteback::start();
    let _module = NbdModule::with_backend_ids(1);
    let store = Store::sparse(8 * MIB);
    let server = NbdServer::of_nbd_server(&[("disk", store.path())], &[]);
    let (engine, uri) = (engine(), server.uri("disk"));
    let attachment = attach(&engine, &uri);
    assert_eq!(attribute(&attachment, "queue/write_cache"), "write through");
    guest::udevd::settle();
    let reader = Mutex::new(Some(keep_unwritten(&attachment.node)));
    let disk = OpenOptions::new()
        .write(true)
        .open(&attachment.node)
        .unwrap();
    disk.write_all_at(&[0x5a; 4096], MIB).unwrap();
    drop(disk);
    let index = attachment.nbd_index().unwrap();
    lunbd::nbd::disconnect(engine.roots(), index, soon()).unwrap();
    let late = engine.detach(source(&uri), Deadline::after(Duration::from_secs(10)));
    let error = late.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Confirm), "{error}");
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Confirm {
            drop(reader.lock().unwrap().take());
        }
    });
    let request = DetachRequest::new(source(&uri)).observe(observer);
    let detachment = engine.detach(request, soon()).unwrap();
    let stored = fs::read(store.path()).unwrap();
    assert!(stored.iter().all(|byte| *byte == 0), "it was written back");
    assert!(!detachment.safe_to_unmap, "{detachment:?}");
    assert_free(&attachment);
}

#[test]
fn a_device_that_a_process_has_open_for_writing_is_refused_by_name_and_serves_on() {
    let _module = NbdModule::with_backend_ids(4);
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
