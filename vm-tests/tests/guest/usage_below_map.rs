//! Data of a map, and of a path beside its map, that a detach cannot write back.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lunbd::engine::{DetachFailure, Detachment, Flush, StageObserver};
use lunbd::error::Stage;
use lunbd::{Deadline, DetachRequest, DetachTarget, Engine, ErrorKind};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::dirty_path::{DirtyPath, WITHIN, attached_paths, protect_disks};
use vm_tests::guest::fault_table::EIO;
use vm_tests::guest::inject::{self, Fault};
use vm_tests::guest::queueing_map::QueueingMap;
use vm_tests::guest::{self, partitioned, udevd};

type Detached = Result<Detachment, DetachFailure>;

fn writer(node: &Path) -> File {
    OpenOptions::new().write(true).open(node).unwrap()
}

/// Detaches the map.
fn detach(engine: &Engine, map: &QueueingMap, observer: StageObserver) -> Detached {
    let request = DetachRequest::new(DetachTarget::Device(map.node()));
    engine.detach(request.observe(observer), soon())
}

#[track_caller]
fn require_lost(detached: Detached) {
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
    let engine = engine();
    let dirty = DirtyPath::new(&engine);
    protect_disks(true);
    let detached = detach(&engine, &dirty.map, StageObserver::new(|_| {}));
    protect_disks(false);
    require_lost(detached);
}

#[test]
fn pages_of_a_path_below_a_map_are_in_doubt_for_each_detach_if_no_path_flushes_the_units_cache() {
    let engine = engine();
    // The first `fsync` is that of the map.
    let of_path = |fault| Some(("fsync:2", fault));
    for (fault, timeout) in [
        (None, "300s"),
        (of_path(EIO), "300s"),
        (of_path(Fault::Hangs), "60s"),
    ] {
        let (target, disks) = attached_paths(&engine);
        let name = disks[1].file_name().unwrap().to_str().unwrap();
        fs::write(format!("/sys/block/{name}/device/delete"), "1").unwrap();
        let held = udevd::stopped();
        let map = QueueingMap::over(&disks[..1]);
        drop(held);
        udevd::settle();
        let node = map.node().display().to_string();
        let arguments = ["detach", &node, "--timeout", timeout].map(str::to_owned);
        let traced = inject::run(&arguments, fault);
        assert_eq!(traced.injected, fault.is_some(), "{traced:?}");
        assert_eq!(traced.code, Some(0), "{traced:?}");
        if fault == of_path(Fault::Hangs) {
            // No other path can flush the cache, so this one has half of the time.
            assert!(traced.took > Duration::from_secs(20), "{traced:?}");
        }
        let is_safe = fault.is_none();
        assert_eq!(traced.said["safe_to_unmap"], is_safe, "{traced:?}");
        assert_eq!(target.target.devices(), [] as [&str; 0]);
        let names = &traced.said["receipt"]["names"];
        let unit: DetachTarget = format!("unit:{}", names[0].as_str().unwrap())
            .parse()
            .unwrap();
        let again = |request: DetachRequest| engine.detach(request, soon()).unwrap().safe_to_unmap;
        assert_eq!(again(DetachRequest::new(unit.clone())), is_safe);
        assert_eq!(
            again(DetachRequest::new(unit.clone()).abandon_unwritten()),
            is_safe,
        );
        assert!(again(DetachRequest::new(unit)), "the loss is accepted");
    }
}

#[test]
fn a_failed_write_beside_a_map_that_another_process_has_seen_first_is_not_safe_to_unmap() {
    let engine = engine();
    let dirty = DirtyPath::new(&engine);
    protect_disks(true);
    let disk = dirty.disks[0].clone();
    let failed = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&failed);
    let removes = AtomicBool::new(false);
    let detached = detach(
        &engine,
        &dirty.map,
        StageObserver::new(move |stage| {
            // A file that is opened after this one does not see the failure.
            if removes.swap(stage == Stage::RemoveMap, Ordering::Relaxed)
                && File::open(&disk).unwrap().sync_all().is_err()
            {
                seen.fetch_add(1, Ordering::Relaxed);
            }
        }),
    );
    protect_disks(false);
    assert_eq!(failed.load(Ordering::Relaxed), 1);
    require_lost(detached);
}

#[test]
fn a_path_is_written_back_before_the_detach_waits_for_udev_to_handle_the_removal_of_its_map() {
    let engine = engine();
    let dirty = DirtyPath::new(&engine);
    let map = dirty.map.node();
    let held = udevd::stopped();
    // No file that is opened after the last close of this one sees the failure.
    let path = File::open(&dirty.disks[0]).unwrap();
    protect_disks(true);
    let request = DetachRequest::new(DetachTarget::Device(map.clone()));
    let first = engine.detach(request, Deadline::after(Duration::from_secs(20)));
    assert!(!map.exists(), "{first:?}");
    let seen = path.sync_all();
    protect_disks(false);
    drop((path, held));
    let [lost, whole] = [0, 1].map(|path: usize| DetachTarget::Device(dirty.disks[path].clone()));
    engine.detach(whole, soon()).unwrap();
    require_lost(engine.detach(lost, soon()));
    let failure = first.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Settle), "{failure}");
    seen.unwrap_err();
}

#[test]
fn what_was_written_beside_its_map_to_a_path_that_is_dead_is_not_safe_to_unmap() {
    let engine = engine();
    let dirty = DirtyPath::new(&engine);
    let name = dirty.disks[0].file_name().unwrap().to_str().unwrap();
    let state = format!("/sys/block/{name}/device/state");
    let detached = detach(
        &engine,
        &dirty.map,
        StageObserver::new(move |stage| {
            if stage == Stage::RemoveMap {
                fs::write(&state, "offline\n").unwrap();
            }
        }),
    );
    require_lost(detached);
}

#[test]
fn what_was_written_to_a_partition_of_a_path_that_is_dead_is_not_safe_to_unmap() {
    let engine = engine();
    let (target, disks) = attached_paths(&engine);
    partitioned::write_to(&disks[0]);
    guest::run(&["blockdev", "--rereadpt", disks[0].to_str().unwrap()]);
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
    require_lost(detach(&engine, &map, observer));
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
    protect_disks(true);
    drop(writes);
    drop(held);
    let abandon = DetachRequest::new(DetachTarget::Device(map.node())).abandon_unwritten();
    let detached = engine.detach(abandon, soon());
    protect_disks(false);
    let detachment = detached.unwrap();
    assert!(!detachment.safe_to_unmap, "it is lost: {detachment:?}");
    let flush = detachment.receipt.unwrap().map.unwrap().flush;
    assert!(matches!(flush, Some(Flush::Abandoned(_))), "{flush:?}");
    drop((map, target));
}
