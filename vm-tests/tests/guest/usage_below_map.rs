//! Data of a map, and of a path beside its map, that a detach cannot write back.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lunbd::engine::{DetachFailure, Detachment, Flush, StageObserver};
use lunbd::error::Stage;
use lunbd::{AttachRequest, Deadline, DetachRequest, DetachTarget, Engine, ErrorKind, Source};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::direct::stored;
use vm_tests::guest::queueing_map::QueueingMap;
use vm_tests::guest::{self, ScsiDebug, partitioned, udevd};

const WRITE_PROTECT: &str = "/sys/module/scsi_debug/parameters/wp";
/// A place of the disk that no table of partitions uses.
const WITHIN: usize = 4 << 20;

fn writer(node: &Path) -> File {
    OpenOptions::new().write(true).open(node).unwrap()
}

/// Attaches both paths of a unit, and returns their nodes.
fn attached_paths(engine: &Engine) -> (ScsiDebug, Vec<PathBuf>) {
    let (target, sources) = ScsiDebug::two_paths_of(16);
    let sources = sources.iter().map(|source| source.parse().unwrap());
    let disks = sources
        .map(|source: Source| {
            let attached = engine.attach(&AttachRequest::new(source), soon());
            attached.unwrap().paths().last().unwrap().node.clone()
        })
        .collect();
    udevd::settle();
    (target, disks)
}

#[test]
fn a_writer_of_a_queueing_map_without_a_path_prevents_the_detach_and_the_map_keeps_queueing() {
    let engine = engine();
    let (target, disks) = attached_paths(&engine);
    let held = udevd::stopped();
    let map = QueueingMap::over(&disks);
    let node = map.node();
    let mut writes = writer(&node);
    writes.write_all(&vec![0x5a; 64 << 10]).unwrap();
    map.set_paths(false);
    // The map would be told to fail after half of this time.
    let deadline = Deadline::after(Duration::from_secs(8));
    let refused = engine.detach(DetachTarget::Device(node.clone()), deadline);
    assert!(map.queues(), "it was told to fail: {refused:?}");
    let failure = refused.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    let us = format!("open for writing in process {}", std::process::id());
    assert!(failure.to_string().contains(&us), "{failure}");
    assert_eq!(target.devices().len(), 2);
    // A detach that does not see the writer learns from the kernel that the map is open.
    let node = node.to_str().unwrap();
    let mut unseen = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "lunbd"])
        .args(["detach", node, "--json", "--timeout", "5s"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Its flush stays in the kernel for as long as the map queues.
    let mut said = String::new();
    let mut output = BufReader::new(unseen.stderr.take().unwrap());
    output.read_line(&mut said).unwrap();
    assert!(map.queues(), "it was told to fail: {said}");
    assert!(said.contains("timed_out"), "{said}");
    map.fail_if_no_path();
    assert_eq!(unseen.wait().unwrap().code(), Some(6));
    drop((writes, map, held));
}

/// A map whose first path has dirty pages of its own, which the map does not know.
struct DirtyPath {
    engine: Engine,
    disks: Vec<PathBuf>,
    map: QueueingMap,
    _target: ScsiDebug,
}

impl DirtyPath {
    fn new() -> Self {
        let engine = engine();
        let (target, disks) = attached_paths(&engine);
        let held = udevd::stopped();
        let map = QueueingMap::over(&disks);
        let data = vec![0xa5; 64 << 10];
        // The map has the path open, so that no close writes it back.
        let mut writes = writer(&disks[0]);
        writes.seek(SeekFrom::Start(WITHIN as u64)).unwrap();
        writes.write_all(&data).unwrap();
        drop(writes);
        let is_written = stored(&disks[1], WITHIN, data.len()) == data;
        assert!(!is_written, "it is written back");
        drop(held);
        Self {
            engine,
            disks,
            map,
            _target: target,
        }
    }

    /// Detaches the map.
    fn detach(&self, observer: StageObserver) -> Result<Detachment, DetachFailure> {
        let request = DetachRequest::new(DetachTarget::Device(self.map.node()));
        self.engine.detach(request.observe(observer), soon())
    }
}

#[track_caller]
fn require_lost(detached: Result<Detachment, DetachFailure>) {
    let safe = match &detached {
        Ok(detachment) => detachment.safe_to_unmap,
        Err(failure) => failure.receipt.safe_to_unmap,
    };
    assert!(!safe, "it is lost: {detached:?}");
    let failure = detached.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::Io, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
}

#[test]
fn what_was_written_to_a_path_beside_its_map_and_is_lost_is_not_safe_to_unmap() {
    let dirty = DirtyPath::new();
    fs::write(WRITE_PROTECT, "1").unwrap();
    let detached = dirty.detach(StageObserver::new(|_| {}));
    fs::write(WRITE_PROTECT, "0").unwrap();
    require_lost(detached);
}

#[test]
fn a_failed_write_beside_a_map_that_another_process_has_seen_first_is_not_safe_to_unmap() {
    let dirty = DirtyPath::new();
    fs::write(WRITE_PROTECT, "1").unwrap();
    let disk = dirty.disks[0].clone();
    let failed = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&failed);
    let removes = AtomicBool::new(false);
    let detached = dirty.detach(StageObserver::new(move |stage| {
        // A file that is opened after this one does not see the failure.
        if removes.swap(stage == Stage::RemoveMap, Ordering::Relaxed)
            && File::open(&disk).unwrap().sync_all().is_err()
        {
            seen.fetch_add(1, Ordering::Relaxed);
        }
    }));
    fs::write(WRITE_PROTECT, "0").unwrap();
    assert_eq!(failed.load(Ordering::Relaxed), 1);
    require_lost(detached);
}

#[test]
fn what_was_written_beside_its_map_to_a_path_that_is_dead_is_not_safe_to_unmap() {
    let dirty = DirtyPath::new();
    let name = dirty.disks[0].file_name().unwrap().to_str().unwrap();
    let state = format!("/sys/block/{name}/device/state");
    let detached = dirty.detach(StageObserver::new(move |stage| {
        if stage == Stage::RemoveMap {
            fs::write(&state, "offline\n").unwrap();
        }
    }));
    require_lost(detached);
}

#[test]
fn what_was_written_to_a_partition_of_a_path_that_is_dead_is_not_safe_to_unmap() {
    let engine = engine();
    let (target, disks) = attached_paths(&engine);
    partitioned::write_to(&disks[0]);
    udevd::settle();
    let name = disks[0].file_name().unwrap().to_str().unwrap();
    let partition = PathBuf::from(format!("{}1", disks[0].display()));
    let held = udevd::stopped();
    let map = QueueingMap::over(&disks);
    // No close writes it back while this file is open.
    let reader = Mutex::new(Some(File::open(&partition).unwrap()));
    let mut writes = writer(&partition);
    writes.seek(SeekFrom::Start(WITHIN as u64)).unwrap();
    writes.write_all(&vec![0xa5; 64 << 10]).unwrap();
    drop((writes, held));
    let state = format!("/sys/block/{name}/device/state");
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::RemoveMap {
            fs::write(&state, "offline\n").unwrap();
            drop(reader.lock().unwrap().take());
        }
    });
    let request = DetachRequest::new(DetachTarget::Device(map.node()));
    require_lost(engine.detach(request.observe(observer), soon()));
    drop((map, target));
}

#[test]
fn what_a_partition_map_cannot_write_back_is_not_safe_to_unmap_where_it_is_given_up() {
    let engine = engine();
    let (target, disks) = attached_paths(&engine);
    let held = udevd::stopped();
    let map = QueueingMap::over(&disks);
    let node = map.node();
    let name = node.file_name().unwrap().to_str().unwrap();
    let uuid = fs::read_to_string(format!("/sys/block/{name}/dm/uuid")).unwrap();
    let table = format!("0 2048 linear {} 2048", node.display());
    guest::create_map("part", Some(&format!("part1-{}", uuid.trim())), &table);
    let mut writes = writer(&guest::node_of_map("part"));
    writes.write_all(&vec![0xa5; 64 << 10]).unwrap();
    fs::write(WRITE_PROTECT, "1").unwrap();
    drop(writes);
    drop(held);
    let abandon = DetachRequest::new(DetachTarget::Device(map.node())).abandon_unwritten();
    let detached = engine.detach(abandon, soon());
    fs::write(WRITE_PROTECT, "0").unwrap();
    let detachment = detached.unwrap();
    assert!(!detachment.safe_to_unmap, "it is lost: {detachment:?}");
    let flush = detachment.receipt.unwrap().map.unwrap().flush;
    assert!(matches!(flush, Some(Flush::Abandoned(_))), "{flush:?}");
    drop((map, target));
}
