//! A multipath map that queues I/O and has no path.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use lunbd::engine::{DetachFailure, Detachment, Flush, StageObserver};
use lunbd::error::Stage;
use lunbd::{Deadline, DetachRequest, DetachTarget, Engine, ErrorKind};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::direct::stored;
use vm_tests::guest::dirty_path::{Target, WITHIN, attached_paths};
use vm_tests::guest::queueing_map::QueueingMap;
use vm_tests::guest::unwritten::{closed, closing};
use vm_tests::guest::{self, udevd};

const LENGTH: usize = 64 << 10;

/// Writes to the page cache of the map.
fn write_to(node: &Path) -> File {
    let mut file = OpenOptions::new().write(true).open(node).unwrap();
    file.seek(SeekFrom::Start(WITHIN as u64)).unwrap();
    file.write_all(&vec![0x5a; LENGTH]).unwrap();
    file
}

/// A unit with two paths below a map, while udevd is stopped.
fn queueing_map(engine: &Engine) -> (Target, Vec<PathBuf>, udevd::StoppedGuard, QueueingMap) {
    let (target, disks) = attached_paths(engine);
    let held = udevd::stopped();
    let map = QueueingMap::over(&disks);
    (target, disks, held, map)
}

/// A detach of the map that ends before a path is back.
fn time_out(engine: &Engine, request: DetachRequest) -> DetachFailure {
    let deadline = Deadline::after(Duration::from_secs(12));
    let failure = engine.detach(request, deadline).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    assert!(!failure.receipt.safe_to_unmap);
    let map = failure.receipt.map.as_ref();
    assert!(
        map.is_none_or(|map| !map.told_to_fail && !map.gone),
        "{failure:?}"
    );
    failure
}

#[test]
fn a_writer_of_a_queueing_map_without_a_path_prevents_the_detach_and_the_map_keeps_queueing() {
    let engine = engine();
    let (target, _, held, map) = queueing_map(&engine);
    let node = map.node();
    let writes = write_to(&node);
    let fails = map.fails_when_dropped();
    map.set_paths(false);
    let deadline = Deadline::after(Duration::from_secs(20));
    let refused = engine.detach(DetachTarget::Device(node.clone()), deadline);
    assert!(map.queues(), "it was told to fail: {refused:?}");
    let failure = refused.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    let us = format!("open for writing in process {}", std::process::id());
    assert!(failure.to_string().contains(&us), "{failure}");
    assert_eq!(target.target.devices().len(), 2);
    // This detach does not see the writer.
    let unseen = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "lunbd"])
        .args(["detach", node.to_str().unwrap(), "--timeout", "15s"])
        .output()
        .unwrap();
    let said = String::from_utf8(unseen.stderr).unwrap();
    assert!(map.queues(), "it was told to fail: {said}");
    assert_eq!(unseen.status.code(), Some(6), "{said}");
    assert!(said.contains("bring a path back"), "{said}");
    drop((fails, writes, map, held));
}

#[test]
fn a_detach_keeps_what_a_map_queues_and_writes_it_once_a_path_is_back() {
    let engine = engine();
    let (target, disks) = attached_paths(&engine);
    let held = udevd::stopped();
    let map = Arc::new(QueueingMap::over(&disks));
    let request = || DetachRequest::new(DetachTarget::Device(map.node()));
    let writes = write_to(&map.node());
    map.set_paths(false);
    // The close waits in the kernel, and no process has the file any more.
    let closer = closing(writes);
    let failure = time_out(&engine, request());
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    assert!(
        failure.to_string().contains("bring a path back"),
        "{failure}"
    );
    assert!(map.queues() && !closer.is_finished());
    assert_eq!(target.target.devices().len(), 2);
    // No flush of it is left in the kernel, so its claim is not either.
    let waiting = Mutex::new(Some((closer, held)));
    let (again, is_stored) = (Arc::clone(&map), Arc::new(AtomicBool::new(false)));
    let seen = Arc::clone(&is_stored);
    let observer = StageObserver::new(move |stage| match stage {
        Stage::Flush => {
            let first = waiting.lock().unwrap().take();
            if let Some((closer, held)) = first {
                again.set_paths(true);
                closed(closer);
                drop(held);
            }
        }
        Stage::RemoveMap => {
            let is_stored = stored(&disks[1], WITHIN, LENGTH) == vec![0x5a; LENGTH];
            seen.store(is_stored, Ordering::Relaxed);
        }
        _ => {}
    });
    let detachment = engine.detach(request().observe(observer), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(detachment.flush, Some(Flush::Done));
    assert!(is_stored.load(Ordering::Relaxed));
    assert_eq!(target.target.devices(), [] as [&str; 0]);
}

/// A map whose last path went during the flush of a detach: that flush waits in the kernel.
struct FlushThatWaits {
    map: Arc<QueueingMap>,
    closer: JoinHandle<()>,
    udevd: udevd::StoppedGuard,
    target: Target,
}

impl FlushThatWaits {
    fn begin(engine: &Engine) -> Self {
        let (target, disks) = attached_paths(engine);
        let udevd = udevd::stopped();
        let map = Arc::new(QueueingMap::over(&disks));
        let (lost, started) = (Arc::clone(&map), Arc::new(Mutex::new(None)));
        let to_start = Arc::clone(&started);
        let observer = StageObserver::new(move |stage| {
            if stage == Stage::Flush {
                let writes = write_to(&lost.node());
                lost.set_paths(false);
                to_start.lock().unwrap().get_or_insert(closing(writes));
            }
        });
        let request = DetachRequest::new(DetachTarget::Device(map.node()));
        let failure = time_out(engine, request.observe(observer));
        assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
        assert!(failure.to_string().contains("to write back"), "{failure}");
        let closer = started.lock().unwrap().take().unwrap();
        Self {
            map,
            closer,
            udevd,
            target,
        }
    }

    fn request(&self) -> DetachRequest {
        DetachRequest::new(DetachTarget::Device(self.map.node()))
    }
}

#[test]
fn a_detach_waits_for_the_flush_of_an_earlier_one_that_waits_for_a_path() {
    let engine = engine();
    let earlier = FlushThatWaits::begin(&engine);
    let failure = time_out(&engine, earlier.request());
    let us = format!("process {}", std::process::id());
    assert!(failure.to_string().contains(&us), "{failure}");
    assert!(earlier.map.queues());
    let request = earlier.request();
    let waiting = Mutex::new(Some((earlier.closer, earlier.udevd)));
    let map = Arc::clone(&earlier.map);
    let passes = AtomicUsize::new(0);
    let observer = StageObserver::new(move |stage| {
        // The second pass comes after the first has seen the flush.
        if stage == Stage::Resolve && passes.fetch_add(1, Ordering::Relaxed) == 1 {
            let (closer, udevd) = waiting.lock().unwrap().take().unwrap();
            map.set_paths(true);
            closed(closer);
            drop(udevd);
        }
    });
    let detachment = engine.detach(request.observe(observer), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    drop(earlier.target);
}

#[test]
fn a_caller_that_abandons_unwritten_data_ends_an_earlier_flush_that_waits_for_a_path() {
    let engine = engine();
    let earlier = FlushThatWaits::begin(&engine);
    let request = earlier.request().abandon_unwritten();
    let waiting = Mutex::new(Some(earlier.udevd));
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::RemoveMap {
            drop(waiting.lock().unwrap().take());
        }
    });
    let limit = Deadline::after(Duration::from_secs(60));
    let detachment = engine.detach(request.observe(observer), limit).unwrap();
    assert!(!detachment.safe_to_unmap, "{detachment:?}");
    let map = detachment.receipt.unwrap().map.unwrap();
    assert!(map.told_to_fail && map.gone, "{map:?}");
    assert!(matches!(map.flush, Some(Flush::Abandoned(_))), "{map:?}");
    closed(earlier.closer);
    drop((earlier.map, earlier.target));
}

#[test]
fn a_map_with_a_file_system_that_no_list_of_mounts_has_is_not_told_to_fail() {
    let engine = engine();
    let (target, _, held, map) = queueing_map(&engine);
    let node = map.node();
    let node = node.to_str().unwrap();
    guest::run(&["mkfs.ext4", "-q", "-F", node]);
    let place = "/tmp/lazy";
    fs::create_dir_all(place).unwrap();
    guest::run(&["mount", "-t", "ext4", node, place]);
    let open = File::create(format!("{place}/file")).unwrap();
    guest::run(&["umount", "--lazy", place]);
    map.set_paths(false);
    let abandon = DetachRequest::new(DetachTarget::Device(map.node())).abandon_unwritten();
    let deadline = Deadline::after(Duration::from_secs(20));
    let detached = engine.detach(abandon, deadline);
    let queues = map.queues();
    // The file system is unmounted by the close, which needs a path.
    map.set_paths(true);
    drop((open, held));
    fs::remove_dir(place).unwrap();
    let failure = detached.unwrap_err();
    assert!(queues, "it was told to fail: {failure}");
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    drop((map, target));
}

/// A map whose pages are written, and whose unit has a cache.
fn map_with_written_pages(engine: &Engine) -> (Target, Vec<PathBuf>, QueueingMap) {
    let (target, disks, held, map) = queueing_map(engine);
    // The last close writes the pages back, and flushes no cache.
    drop(write_to(&map.node()));
    assert_eq!(stored(&disks[1], WITHIN, LENGTH), vec![0x5a; LENGTH]);
    drop(held);
    udevd::settle();
    (target, disks, map)
}

fn refused_for_want_of_a_path(engine: &Engine, map: &QueueingMap) {
    let failure = engine.detach(DetachTarget::Device(map.node()), soon());
    let failure = failure.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::NotReady, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    assert!(!failure.receipt.safe_to_unmap && map.node().exists());
}

#[test]
fn a_detach_of_a_map_that_lost_its_paths_changes_nothing_until_a_path_is_back() {
    let engine = engine();
    let (target, _, map) = map_with_written_pages(&engine);
    map.set_table(false);
    refused_for_want_of_a_path(&engine, &map);
    assert_eq!(target.target.devices().len(), 2);
    map.set_table(true);
    let detachment = engine.detach(DetachTarget::Device(map.node()), soon());
    let detachment = detachment.unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(detachment.flush, Some(Flush::Done));
}

#[test]
fn a_caller_abandons_the_cache_of_a_unit_whose_map_lost_its_paths() {
    let engine = engine();
    let (target, _, map) = map_with_written_pages(&engine);
    map.set_table(false);
    for device in target.target.devices() {
        fs::write(format!("/sys/bus/scsi/devices/{device}/delete"), "1").unwrap();
    }
    refused_for_want_of_a_path(&engine, &map);
    let request = DetachRequest::new(DetachTarget::Device(map.node()));
    let abandoned = engine.detach(request.abandon_unwritten(), soon()).unwrap();
    assert!(!abandoned.safe_to_unmap, "{abandoned:?}");
    let receipt = abandoned.receipt.unwrap().map.unwrap();
    assert!(
        matches!(receipt.flush, Some(Flush::Abandoned(_))),
        "{receipt:?}"
    );
    assert!(receipt.gone);
}

#[test]
fn a_flush_of_a_map_that_has_just_lost_its_paths_has_failed_although_the_kernel_may_call_it_done() {
    let engine = engine();
    let (target, _, map) = map_with_written_pages(&engine);
    let map = Arc::new(map);
    let lost = Arc::clone(&map);
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Flush {
            lost.set_table(false);
        }
    });
    let request = DetachRequest::new(DetachTarget::Device(map.node()));
    let failure = engine.detach(request.observe(observer), soon());
    let failure = failure.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::Io, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    assert!(!failure.receipt.safe_to_unmap && map.node().exists());
    // A later flush cannot tell what was lost meanwhile.
    map.set_table(true);
    let again = engine.detach(DetachTarget::Device(map.node()), soon());
    let again = again.unwrap_err().to_string();
    assert!(again.contains("an earlier flush"), "{again}");
    let request = DetachRequest::new(DetachTarget::Device(map.node()));
    let abandoned = engine.detach(request.abandon_unwritten(), soon()).unwrap();
    assert!(!abandoned.safe_to_unmap, "{abandoned:?}");
    drop(target);
}

/// The kernel reports a failed write to the next flush of the map, and forgets it with the map.
fn assert_doubt(detached: &Detachment) {
    assert!(!detached.safe_to_unmap, "{detached:?}");
    let notes = &detached.receipt.as_ref().unwrap().notes;
    let said = "went away and may not have been flushed";
    assert!(notes.iter().any(|note| note.contains(said)), "{notes:?}");
}

#[test]
fn a_map_that_was_refused_for_want_of_a_path_leaves_a_doubt_if_another_process_removes_it() {
    let engine = engine();
    let (target, disks, held, map) = queueing_map(&engine);
    map.set_table(false);
    drop(write_to(&map.node()));
    assert_ne!(stored(&disks[1], WITHIN, LENGTH), vec![0x5a; LENGTH]);
    drop(held);
    udevd::settle();
    refused_for_want_of_a_path(&engine, &map);
    // This process removes the map as another one would.
    drop(map);
    let detached = engine.detach(DetachTarget::Device(disks[0].clone()), soon());
    assert_doubt(&detached.unwrap());
    drop(target);
}

#[test]
fn a_queueing_map_that_another_process_removes_during_the_wait_for_a_path_leaves_a_doubt() {
    let engine = engine();
    let (target, _, held, map) = queueing_map(&engine);
    let node = map.node();
    let writes = write_to(&node);
    map.set_paths(false);
    let waiting = Mutex::new(Some((map, closing(writes), held)));
    let observer = StageObserver::new(move |stage| {
        let first = waiting.lock().unwrap().take_if(|_| stage == Stage::Flush);
        if let Some((map, closer, held)) = first {
            drop(map);
            closed(closer);
            drop(held);
        }
    });
    let request = DetachRequest::new(DetachTarget::Device(node)).observe(observer);
    let detached = engine.detach(request, soon()).unwrap();
    assert_doubt(&detached);
    let name = detached.receipt.unwrap().names.remove(0);
    // Nothing is left of the unit.
    assert_doubt(&engine.detach(DetachTarget::Unit(name), soon()).unwrap());
    drop(target);
}
