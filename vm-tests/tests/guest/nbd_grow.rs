//! NBD devices whose export grows, and the exports that a server lists.

use std::fs::{self, OpenOptions};
use std::num::NonZeroU16;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lunbd::engine::{DetachVolume, Finding, HealOutcome, NbdOptions, ResizeRequest};
use lunbd::error::Stage;
use lunbd::id::VolumeId;
use lunbd::nbd::Difference;
use lunbd::reconcile::{Desired, Options, Reconciler};
use lunbd::{AttachRequest, Attachment, Deadline, DetachTarget, Engine, ErrorKind};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::Value;
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::directory::Directory;
use vm_tests::guest::nbd_agent::{detach, heal, source};
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const MIB: u64 = 1 << 20;
const SMALL: u64 = 8 * MIB;
const LARGE: u64 = 24 * MIB;

fn attach(engine: &Engine, uri: &str) -> Attachment {
    // The kernel resends what was in flight on a dead link after this time.
    let options = NbdOptions::default().io_timeout(Duration::from_secs(5));
    let request = AttachRequest::new(source(uri)).nbd(options);
    engine.attach(&request, soon()).expect("an attach")
}

fn shown(node: &Path) -> u64 {
    let name = node.file_name().unwrap().to_str().unwrap();
    let sectors = fs::read_to_string(format!("/sys/block/{name}/size")).unwrap();
    sectors.trim().parse::<u64>().unwrap() * 512
}

fn set_len(store: &Store, bytes: u64) {
    let file = OpenOptions::new().write(true).open(store.path()).unwrap();
    file.set_len(bytes).unwrap();
}

/// Writes the last block of the device, and reads it from the server's file.
fn writes_its_last_block(node: &Path, store: &Store, size: u64) {
    let block = [0xa5; 4096];
    let at = size - 4096;
    let disk = OpenOptions::new().write(true).open(node).unwrap();
    disk.write_all_at(&block, at).unwrap();
    disk.sync_all().unwrap();
    let mut found = [0; 4096];
    let file = fs::File::open(store.path()).unwrap();
    file.read_exact_at(&mut found, at).unwrap();
    assert!(found == block, "the server has other bytes at {at}");
}

#[test]
fn a_device_whose_export_grew_at_nbdkit_grows_while_it_is_open_and_never_shrinks() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(SMALL);
    let server = NbdServer::nbdkit(At::tcp(), &["file", store.path().to_str().unwrap()]);
    let (ours, another, uri) = (engine(), engine(), server.uri(""));
    let node = attach(&ours, &uri).node;
    let opened = fs::File::open(&node).unwrap();
    let request = ResizeRequest::new(source(&uri));
    let resized = ours.resize(&request, soon()).unwrap();
    assert!(!resized.changed && resized.size == SMALL, "{resized:?}");
    let error = ours.resize(&request.clone().at_least(LARGE), soon());
    assert_eq!(error.unwrap_err().kind(), ErrorKind::NotReady);
    set_len(&store, LARGE);
    assert_eq!(shown(&node), SMALL);
    // nbdkit serves each connection the size that it began with, and another process cannot
    // replace a connection.
    let by_node = ResizeRequest::new(DetachTarget::Device(node.clone())).at_least(LARGE);
    let error = another.resize(&by_node, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert!(
        error.to_string().contains("the process that attached it"),
        "{error}"
    );
    assert_eq!(shown(&node), SMALL);
    let resized = ours.resize(&by_node, soon()).unwrap();
    assert!(resized.changed, "{resized:?}");
    assert_eq!((resized.old_size, resized.size), (SMALL, LARGE));
    assert_eq!(shown(&node), LARGE);
    writes_its_last_block(&node, &store, LARGE);
    assert_eq!(ours.inventory().unwrap().units[0].size, Some(LARGE));
    set_len(&store, SMALL);
    let error = ours.resize(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    let sizes = format!("{SMALL} bytes and nbd0 has {LARGE}");
    assert!(error.to_string().contains(&sizes), "{error}");
    assert_eq!(shown(&node), LARGE);
    set_len(&store, LARGE);
    drop(opened);
    detach(&ours, &uri);
}

#[test]
fn a_device_whose_attach_timed_out_grows_in_the_process_that_attached_it() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(SMALL);
    let server = NbdServer::nbdkit(At::tcp(), &["file", store.path().to_str().unwrap()]);
    let (engine, uri) = (engine(), server.uri(""));
    let options = NbdOptions::default()
        .io_timeout(Duration::from_secs(5))
        .connections(NonZeroU16::new(2).unwrap());
    let request = AttachRequest::new(source(&uri)).nbd(options);
    let held = guest::udevd::stopped();
    let late = engine.attach(&request, Deadline::after(Duration::from_secs(15)));
    let error = late.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Settle), "{error}");
    drop(held);
    let attachment = engine.attach(&request, soon()).unwrap();
    assert!(!attachment.changed);
    set_len(&store, LARGE);
    let by_node = ResizeRequest::new(DetachTarget::Device(attachment.node.clone())).at_least(LARGE);
    let resized = engine.resize(&by_node, soon()).unwrap();
    assert_eq!((resized.old_size, resized.size), (SMALL, LARGE));
    writes_its_last_block(&attachment.node, &store, LARGE);
    detach(&engine, &uri);
}

#[test]
fn a_device_with_several_connections_grows_in_the_process_that_attached_it_alone() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(SMALL);
    let server = NbdServer::nbdkit(At::tcp(), &["file", store.path().to_str().unwrap()]);
    let (ours, another, uri) = (engine(), engine(), server.uri(""));
    let options = NbdOptions::default()
        .io_timeout(Duration::from_secs(5))
        .connections(NonZeroU16::new(2).unwrap());
    let request = AttachRequest::new(source(&uri)).nbd(options);
    let node = ours.attach(&request, soon()).unwrap().node;
    set_len(&store, LARGE);
    let by_node = ResizeRequest::new(DetachTarget::Device(node.clone()));
    let error = another.resize(&by_node, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert!(error.to_string().contains("several connections"), "{error}");
    assert_eq!(shown(&node), SMALL);
    assert!(ours.resize(&by_node, soon()).unwrap().changed);
    // Each processor uses another connection.
    thread::scope(|scope| {
        for processor in 0..2 {
            let (node, store) = (&node, &store);
            scope.spawn(move || {
                let mut one = CpuSet::new();
                one.set(processor).unwrap();
                sched_setaffinity(Pid::from_raw(0), &one).unwrap();
                writes_its_last_block(node, store, LARGE);
            });
        }
    });
    // The error says what another process can do.
    set_len(&store, LARGE + SMALL);
    let error = another.resize(&by_node, soon()).unwrap_err();
    let advice = "or detach it and attach it again";
    assert!(error.to_string().contains(advice), "{error}");
    detach(&another, &uri);
    let node = another.attach(&request, soon()).unwrap().node;
    writes_its_last_block(&node, &store, LARGE + SMALL);
    detach(&another, &uri);
}

#[test]
fn a_device_that_grew_is_healed_at_its_new_size_and_refused_one_that_is_smaller() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(SMALL);
    let mut server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let (ours, uri) = (engine(), server.uri("disk"));
    let node = attach(&ours, &uri).node;
    // A device whose link is dead cannot grow.
    server.kill();
    let limit = Deadline::after(Duration::from_secs(10));
    let error = ours.resize(&ResizeRequest::new(source(&uri)), limit);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::NotReady);
    set_len(&store, LARGE);
    server.start();
    let healing = heal(&ours);
    let HealOutcome::Adopted(differences) = &healing.outcome else {
        panic!("{healing:?}");
    };
    assert!(matches!(differences[..], [Difference::Grown { .. }]));
    assert_eq!(shown(&node), SMALL);
    let resized = ours.resize(&ResizeRequest::new(source(&uri)), soon());
    assert_eq!(resized.unwrap().size, LARGE);
    writes_its_last_block(&node, &store, LARGE);
    // From now on a heal compares the new size.
    server.kill();
    server.start();
    let healing = heal(&ours);
    let is_whole = matches!(&healing.outcome, HealOutcome::Adopted(found) if found.is_empty());
    assert!(is_whole, "{healing:?}");
    server.kill();
    set_len(&store, SMALL);
    server.start();
    let limit = Deadline::after(Duration::from_secs(10));
    let healings = ours.heal(limit).unwrap();
    let outcome = &healings[0].outcome;
    assert!(
        matches!(outcome, HealOutcome::GeometryChanged(_)),
        "{outcome:?}"
    );
    server.kill();
    set_len(&store, LARGE);
    server.start();
    assert!(heal(&ours).outcome.serves());
    detach(&ours, &uri);
}

#[test]
fn a_volume_of_a_journal_is_brought_to_the_size_that_is_wanted_and_its_record_says_so() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(SMALL);
    let server = NbdServer::nbdkit(At::unix(), &["file", store.path().to_str().unwrap()]);
    let place = Directory::new("grow");
    let engine = Arc::new(engine());
    let journal = engine.open_journal_at(&place.join("journal"), soon());
    let reconciler = Reconciler::new(engine, journal.unwrap(), Options::default());
    let converge = |desired: &Desired| {
        reconciler.set(desired.clone());
        let left = reconciler.apply(soon()).unwrap();
        assert!(left.is_empty(), "{left}: {:?}", reconciler.errors());
    };
    let volume: VolumeId = "pvc-1".parse().unwrap();
    let mut desired = Desired::default();
    // The id names no server, but the record does.
    let options = NbdOptions::default()
        .backend("pvc-1".parse().unwrap())
        .io_timeout(Duration::from_secs(5));
    let request = AttachRequest::new(source(&server.uri(""))).nbd(options);
    desired.insert(volume.clone(), &request).unwrap();
    converge(&desired);
    let outcome = || {
        reconciler
            .journal()
            .record(&volume)
            .unwrap()
            .outcome
            .unwrap()
    };
    assert_eq!(outcome().size, SMALL);
    set_len(&store, LARGE);
    desired.set_min_size(&volume, Some(LARGE)).unwrap();
    converge(&desired);
    assert_eq!(outcome().size, LARGE);
    assert_eq!(shown(&outcome().node), LARGE);
    writes_its_last_block(&outcome().node, &store, LARGE);
    assert!(desired.remove(&volume));
    converge(&desired);
}

#[test]
fn a_volume_whose_resize_timed_out_at_a_server_of_one_client_is_attached_again_without_a_wait() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(SMALL);
    // This is qemu-nbd's own default. Each further client waits for the first one to leave.
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &["--shared=1"]);
    let place = Directory::new("one-client");
    let engine = engine();
    let journal = engine.open_journal_at(&place.join("journal"), soon());
    let journal = journal.unwrap();
    let volume: VolumeId = "pvc-1".parse().unwrap();
    let request = AttachRequest::new(source(&server.uri("disk")));
    let attach = || engine.attach_volume(&journal, &volume, &request, soon());
    let node = attach().unwrap().node;
    let limit = Deadline::after(Duration::from_secs(6));
    let error = engine.resize_volume(&journal, &volume, Some(LARGE), limit);
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(journal.record(&volume).unwrap().intent.is_some());
    assert_eq!(attach().unwrap().node, node);
    assert!(journal.record(&volume).unwrap().intent.is_none());
    let how = DetachVolume::default();
    engine
        .detach_volume(&journal, &volume, &how, soon())
        .unwrap();
}

/// The command's output, as an object.
#[track_caller]
fn json(arguments: &[&str]) -> Value {
    let output = guest::lunbd(&[arguments, &["--json"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_exports_of_each_server_are_discovered_with_their_size_and_flags() {
    guest::enter();
    let store = Store::sparse(SMALL);
    let nbdkit = NbdServer::nbdkit(At::tcp(), &["--readonly", "memory", "8M"]);
    let qemu = NbdServer::qemu_nbd(At::unix(), "disk", store.path(), &[]);
    // nbd-server reports the size of an export only to a client that opens it.
    let of_nbd = NbdServer::of_nbd_server(&[("disk", store.path())], &["readonly = true"]);
    for (server, name, read_only) in [
        (&nbdkit, "", true),
        (&qemu, "disk", false),
        (&of_nbd, "disk", true),
    ] {
        let found = json(&["discover", &server.uri("")]);
        let exports = found["exports"].as_array().unwrap();
        let [export] = exports.as_slice() else {
            panic!("{found}");
        };
        assert_eq!(export["name"], name, "{found}");
        assert_eq!(export["export"]["size"], SMALL, "{found}");
        let flags = export["export"]["flags"].as_array().unwrap();
        assert_eq!(flags.contains(&"read_only".into()), read_only, "{found}");
    }
}

#[test]
fn swap_on_an_nbd_device_is_warned_of() {
    let _module = NbdModule::with_backend_ids(2);
    let server = NbdServer::nbdkit(At::tcp(), &["memory", "8M"]);
    let (engine, uri) = (engine(), server.uri(""));
    let node = attach(&engine, &uri).node;
    let node = node.to_str().unwrap();
    let check = || {
        let mut checks = engine.preflight(soon()).into_iter();
        checks.find(|check| check.name == "nbd").unwrap()
    };
    assert_eq!(check().finding, Finding::Good);
    guest::run(&["mkswap", node]);
    guest::run(&["swapon", node]);
    let warned = check();
    guest::run(&["swapoff", node]);
    assert_eq!(warned.finding, Finding::Limited, "{warned:?}");
    assert!(warned.seen.contains("nbd0"), "{warned:?}");
    detach(&engine, &uri);
}
