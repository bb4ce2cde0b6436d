//! A detach that loses no data and leaves nothing: dead paths, late paths, and pages that no
//! process has synced.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lunbd::engine::{Flush, Multipath, StageObserver};
use lunbd::error::Stage;
use lunbd::{AttachRequest, Attachment, Deadline, DetachRequest, DetachTarget, Engine, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Session, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};
use vm_tests::guest::unwritten::{LazyWriteback, closing};

const IQN: &str = "iqn.2026-01.example:detach";
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// How long a session may be lost.
const RECOVERY: Duration = Duration::from_secs(120);

/// Timeouts without pings. No target is silent in these tests, and a guest that is busy writing
/// answers late.
fn without_pings(replacement: u32) -> Timeouts {
    Timeouts {
        replacement,
        noop_interval: 0,
        noop_timeout: 0,
    }
}

fn over(target: &IscsiTarget, portals: &[usize]) -> Source {
    target.uri(portals, 3).parse().unwrap()
}

fn two_paths(target: &IscsiTarget, engine: &Engine, multipath: Multipath) -> Attachment {
    let request = AttachRequest::new(over(target, &[0, 1]))
        .min_paths(2)
        .multipath(multipath);
    engine.attach(&request, soon()).unwrap()
}

fn scsi_devices() -> Vec<String> {
    let mut names = guest::entries("/sys/bus/scsi/devices");
    names.retain(|name| name.matches(':').count() == 3);
    names
}

fn nothing_is_left() {
    assert_eq!(multipathd::maps(), [] as [&str; 0]);
    assert_eq!(scsi_devices(), [] as [&str; 0]);
}

fn state_of(session: &Session) -> String {
    let state = fs::read_to_string(session.device_dir(3).join("state"));
    state.unwrap_or_default().trim().to_owned()
}

fn writer(node: &Path) -> File {
    OpenOptions::new().write(true).open(node).unwrap()
}

/// Keeps a value until the detach enters this stage, and reports how many bytes were dirty
/// then.
fn kept_until<T: Send + 'static>(last: Stage, kept: T) -> (StageObserver, Arc<AtomicU64>) {
    let (kept, left) = (Mutex::new(Some(kept)), Arc::new(AtomicU64::new(u64::MAX)));
    let seen = Arc::clone(&left);
    let observer = StageObserver::new(move |stage| {
        if stage == last
            && let Some(kept) = kept.lock().unwrap().take()
        {
            seen.store(dirty(), Ordering::Relaxed);
            drop(kept);
        }
    });
    (observer, left)
}

/// Starts to close the file when the detach looks for users of the map, because an open file
/// keeps the map. Reports how many bytes were dirty at the map's removal.
fn closed_at_claim(file: File) -> (StageObserver, Arc<AtomicU64>) {
    let (file, left) = (Mutex::new(Some(file)), Arc::new(AtomicU64::new(u64::MAX)));
    let seen = Arc::clone(&left);
    let observer = StageObserver::new(move |stage| match stage {
        Stage::Claim => {
            let _goes_on = file.lock().unwrap().take().map(closing);
        }
        Stage::RemoveMap => seen.store(dirty(), Ordering::Relaxed),
        _ => {}
    });
    (observer, left)
}

/// The same bytes each time: a mebibyte from a seed (splitmix64), repeated, with the number of
/// each sector in the sector's first bytes.
struct Pattern {
    chunk: Vec<u8>,
    sector: u64,
}

impl Pattern {
    fn new(mut seed: u64) -> Self {
        let mut chunk = vec![0; 1 << 20];
        for word in chunk.chunks_exact_mut(8) {
            seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = seed;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
        }
        Self { chunk, sector: 0 }
    }

    fn next(&mut self) -> &[u8] {
        for sector in self.chunk.chunks_exact_mut(512) {
            sector[..8].copy_from_slice(&self.sector.to_le_bytes());
            self.sector += 1;
        }
        &self.chunk
    }
}

fn write_pattern(disk: &mut File, seed: u64, bytes: u64) {
    let mut pattern = Pattern::new(seed);
    for _ in 0..bytes / MIB {
        disk.write_all(pattern.next()).unwrap();
    }
}

/// Compares the target's data with what was written, byte by byte.
fn holds_pattern(store: &Store, seed: u64, bytes: u64) {
    let mut file = File::open(store.path().unwrap()).unwrap();
    let (mut pattern, mut found) = (Pattern::new(seed), vec![0; 1 << 20]);
    for at in 0..bytes / MIB {
        file.read_exact(&mut found).unwrap();
        assert!(pattern.next() == found, "the data of mebibyte {at} is lost");
    }
}

/// Detaches a unit whose second path's session failed while pages of its map were unwritten.
/// The result depends on whether I/O to the path still waits (`blocked`) or fails
/// (`transport-offline`).
fn with_a_path_that_is(state: &str) {
    let engine = engine();
    let store = Store::file("a1", 16 * MIB);
    // With a write cache, a delete asks the path to write its cache back.
    store.set_write_cache(true);
    let mut target = IscsiTarget::new(IQN);
    target.map(3, &store);
    let iscsid = Iscsid::start();
    // This leaves time for the detach to begin while I/O waits.
    let fast_io_fail = if state == "blocked" { 15 } else { 5 };
    let multipathd = Multipathd::start_with(NoPath::Fail, fast_io_fail);
    let [_, second] = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, without_pings(120)));
    let attachment = two_paths(&target, &engine, Multipath::Require);
    let mut disk = writer(&attachment.node);
    write_pattern(&mut disk, 1, 8 * MIB);
    // The last close of the file would wait for the path before the detach does.
    let (close, _) = closed_at_claim(disk);
    let lost = Instant::now();
    target.portal_down(1);
    second.wait_until_lost(LIMIT);
    guest::wait_until(state, LIMIT, || (state_of(&second) == state).then_some(()));

    let deadline = Deadline::after(Duration::from_secs(110));
    assert_eq!(state_of(&second), state);
    let request = DetachRequest::new(over(&target, &[0, 1])).observe(close);
    let detachment = engine.detach(request, deadline).unwrap();
    // The session itself would have waited this long; multipathd has shortened that.
    assert!(lost.elapsed() < RECOVERY);
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    let receipt = detachment.receipt.unwrap();
    assert_eq!(receipt.map.unwrap().flush, Some(Flush::Done));
    assert_eq!(receipt.paths.len(), 2);
    for path in &receipt.paths {
        assert!(path.gone && path.forgotten == Some(true), "{path:?}");
        let name = path.node.as_ref().unwrap().file_name().unwrap();
        assert!(!multipathd.knows(name.to_str().unwrap()));
    }
    nothing_is_left();
    holds_pattern(&store, 1, 8 * MIB);
}

#[test]
fn a_detach_removes_a_path_whose_io_is_blocked_with_the_others() {
    with_a_path_that_is("blocked");
}

#[test]
fn a_detach_removes_a_path_whose_recovery_timeout_passed_with_the_others() {
    with_a_path_that_is("transport-offline");
}

#[test]
fn a_detach_removes_a_dead_disk_that_only_multipathd_has_open() {
    let engine = engine();
    let store = Store::file("a3", 16 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(3, &store);
    let iscsid = Iscsid::start();
    // It makes no map of a unit with one path, and checks that path all the same.
    let multipathd = Multipathd::start_as_packaged();
    let session = iscsid.login(PORTALS[0], IQN, without_pings(5));
    let request = AttachRequest::new(over(&target, &[0])).multipath(Multipath::Off);
    let attachment = engine.attach(&request, soon()).unwrap();
    let name = attachment.node.file_name().unwrap().to_str().unwrap();
    guest::wait_until("multipathd to know it", LIMIT, || {
        multipathd.knows(name).then_some(())
    });
    target.portal_down(0);
    session.wait_until_lost(LIMIT);
    let state = "transport-offline";
    guest::wait_until(state, LIMIT, || (state_of(&session) == state).then_some(()));

    let detachment = engine.detach(over(&target, &[0]), soon()).unwrap();
    assert!(!detachment.safe_to_unmap, "{detachment:?}");
    let [path] = &detachment.receipt.as_ref().unwrap().paths[..] else {
        panic!("{detachment:?}");
    };
    assert!(
        matches!(path.flush, Some(Flush::Unreachable(_))),
        "{path:?}"
    );
    assert!(path.gone && path.forgotten == Some(true), "{path:?}");
    nothing_is_left();
}

#[test]
fn a_lost_path_with_a_recovery_timeout_of_two_minutes_delays_the_detach_only_for_seconds() {
    let engine = engine();
    let store = Store::file("a2", 16 * MIB);
    store.set_write_cache(true);
    let mut target = IscsiTarget::new(IQN);
    target.map(3, &store);
    let iscsid = Iscsid::start();
    let mut multipathd = Multipathd::start(NoPath::Fail);
    let [_, second] = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, without_pings(120)));
    let attachment = two_paths(&target, &engine, Multipath::Require);
    let dead = attachment.paths()[1].clone();
    // No daemon shortens the wait for the path, and none takes it out of the map.
    multipathd.stop();
    let recovery = format!("/sys/class/iscsi_session/session{}/recovery_tmo", second.id);
    fs::write(recovery, RECOVERY.as_secs().to_string()).unwrap();
    let lost = Instant::now();
    target.portal_down(1);
    second.wait_for_state("FAILED", LIMIT);
    let map = fs::read_to_string(format!(
        "/sys/block/{}/dm/name",
        multipathd::maps().pop().unwrap()
    ));
    let message = format!("fail_path {}", dead.devno);
    guest::run(&["dmsetup", "message", map.unwrap().trim(), "0", &message]);
    let mut disk = writer(&attachment.node);
    write_pattern(&mut disk, 2, 4 * MIB);
    drop(disk);

    let deadline = Deadline::after(Duration::from_secs(110));
    let detachment = engine.detach(over(&target, &[0, 1]), deadline).unwrap();
    assert!(lost.elapsed() < RECOVERY);
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    let receipt = detachment.receipt.unwrap();
    assert_eq!(receipt.map.unwrap().flush, Some(Flush::Done));
    let [live, dead] = &receipt.paths[..] else {
        panic!("{:?}", receipt.paths);
    };
    assert_eq!(live.flush, Some(Flush::Done));
    let Some(Flush::ThroughMap(why)) = &dead.flush else {
        panic!("{dead:?}");
    };
    assert!(why.contains("blocked"), "{why}");
    nothing_is_left();
    holds_pattern(&store, 2, 4 * MIB);
}

/// Detaches a unit with one attached path while the second path appears: `scan` is called at
/// each stage. Returns how many devices came at the second path's address.
fn detach_while_a_path_comes(
    scan: impl Fn(&Session, Stage) + Send + Sync + 'static,
    watched: bool,
) -> usize {
    let engine = engine();
    let store = Store::file("b1", 16 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(3, &store);
    let iscsid = Iscsid::start();
    let multipathd = watched.then(|| Multipathd::start_mapping_every_disk(NoPath::Fail));
    let [_, second] = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, Timeouts::default()));
    let attachment = engine
        .attach(&AttachRequest::new(over(&target, &[0])), soon())
        .unwrap();
    assert_eq!(second.disk(3), None);
    let mut disk = writer(&attachment.node);
    write_pattern(&mut disk, 3, MIB);
    drop(disk);
    let late = format!("{}:0:0:3", second.host);
    let observer = StageObserver::new(move |stage| scan(&second, stage));
    // The detach names only the first path's source.
    let request = DetachRequest::new(over(&target, &[0])).observe(observer);
    let detachment = engine.detach(request, soon()).unwrap();
    nothing_is_left();
    let receipt = detachment.receipt.as_ref().unwrap();
    let mut entries = receipt.paths.clone();
    entries.retain(|path| path.hctl.to_string() == late);
    let came = entries.len();
    for entry in entries {
        assert!(entry.gone, "{receipt:?}");
        // multipathd does not know a path that went before it had a disk.
        let known = watched && entry.node.is_some();
        assert_eq!(entry.forgotten, known.then_some(true), "{receipt:?}");
    }
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    drop(multipathd);
    holds_pattern(&store, 3, MIB);
    came
}

/// Scans once when all existing paths are claimed, flushed and about to be deleted.
fn once_at_the_first_delete() -> impl Fn(&Session, Stage) + Send + Sync + 'static {
    let deletes = AtomicUsize::new(0);
    move |session, stage| {
        if stage == Stage::Delete && deletes.fetch_add(1, Ordering::Relaxed) == 0 {
            session.scan(3);
        }
    }
}

#[test]
fn a_path_that_comes_when_the_others_are_about_to_be_deleted_is_deleted_too() {
    let came = detach_while_a_path_comes(once_at_the_first_delete(), false);
    assert_eq!(came, 1);
}

#[test]
fn a_path_that_somebody_scans_again_and_again_is_deleted_as_often() {
    const SCANS: usize = 3;
    let (looks, scans) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let scan = move |session: &Session, stage| {
        // At the beginning of the call, and then before each look at the paths.
        let is_look = stage == Stage::Resolve && looks.fetch_add(1, Ordering::Relaxed) > 0;
        // A scan brings no other device while the last one stands.
        let is_free = is_look && !session.device_dir(3).exists();
        if is_free && scans.fetch_add(1, Ordering::Relaxed) < SCANS {
            session.scan(3);
        }
    };
    assert_eq!(detach_while_a_path_comes(scan, true), SCANS);
}

fn dirty() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("Dirty:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() * 1024
}

/// 256 MiB that no process synced. Without multipath a reader stays until the flush has ended:
/// the last close would write them back before, and so would udevd.
fn nothing_of_the_cache_is_lost(multipath: Multipath) {
    const BYTES: u64 = 256 * MIB;
    guest::time_limit(Duration::from_mins(20));
    let _lazy = LazyWriteback::start();
    let engine = engine();
    let store = Store::file("c1", BYTES);
    let mut target = IscsiTarget::new(IQN);
    target.map(3, &store);
    let iscsid = Iscsid::start();
    let mapped = multipath == Multipath::Require;
    let _multipathd = mapped.then(|| Multipathd::start(NoPath::Fail));
    let portals: &[usize] = if mapped { &[0, 1] } else { &[0] };
    for &at in portals {
        let _session = iscsid.login(PORTALS[at], IQN, without_pings(120));
    }
    let request = AttachRequest::new(over(&target, portals))
        .min_paths(portals.len())
        .multipath(multipath);
    let attachment = engine.attach(&request, soon()).unwrap();
    let before = dirty();
    let mut disk = writer(&attachment.node);
    write_pattern(&mut disk, 4, BYTES);
    let pages = dirty() - before;
    assert!(pages > BYTES - 8 * MIB, "{pages}");

    let (close, left) = if mapped {
        closed_at_claim(disk)
    } else {
        let reader = File::open(&attachment.node).unwrap();
        let held = (reader, guest::udevd::stopped());
        drop(disk);
        kept_until(Stage::Delete, held)
    };
    let request = DetachRequest::new(DetachTarget::Device(attachment.node)).observe(close);
    let detachment = engine
        .detach(request, Deadline::after(Duration::from_secs(900)))
        .unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    let left = left.load(Ordering::Relaxed);
    assert!(left < before + 8 * MIB, "{left} bytes were not flushed");
    nothing_is_left();
    holds_pattern(&store, 4, BYTES);
}

#[test]
fn a_quarter_of_a_gibibyte_of_dirty_pages_of_a_disk_is_on_the_target_after_the_detach() {
    nothing_of_the_cache_is_lost(Multipath::Off);
}

#[test]
fn a_quarter_of_a_gibibyte_of_dirty_pages_of_a_map_is_on_the_target_after_the_detach() {
    nothing_of_the_cache_is_lost(Multipath::Require);
}
