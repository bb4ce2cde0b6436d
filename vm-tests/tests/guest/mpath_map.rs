//! Multipath maps on a real kernel, with and without multipathd: two hosts of `scsi_debug`
//! present the same unit.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use lunbd::error::Stage;
use lunbd::id::Wwid;
use lunbd::kernel::blockdev::BlockDevice;
use lunbd::multipath::{self, Answer, Daemon, Map};
use lunbd::{Deadline, Engine, ErrorKind, Result, Roots};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::multipathd::{Multipathd, NoPath};
use vm_tests::guest::{self, ScsiDebug, udevd};

const LIMIT: Duration = Duration::from_secs(60);

fn roots() -> Roots {
    Roots::default()
}

/// One unit, LUN 1, on two hosts that serve it and on one that may not. Nothing is scanned.
fn two_hosts() -> ScsiDebug {
    ScsiDebug::options().paths(3).luns(2).load()
}

/// If hosts present the same unit, `scsi_debug` gives each the ALUA state of its number modulo
/// 3. In the third state, standby, I/O fails.
fn serves(host: u32) -> bool {
    host % 3 != 2
}

/// The unit's disks, one per host, after udev has finished with them.
fn scan(target: &ScsiDebug) -> Vec<BlockDevice> {
    let hosts = target.hosts().iter().copied();
    let hosts: Vec<u32> = hosts.filter(|host| serves(*host)).collect();
    for host in &hosts {
        ScsiDebug::scan_on(*host, "0 0 1");
    }
    let disk_of = |host: &u32| {
        guest::wait_until("a disk of the unit", LIMIT, || {
            let link = PathBuf::from("/sys/block").join(ScsiDebug::disk_on(*host, 1)?);
            BlockDevice::at(&link.canonicalize().ok()?).unwrap()
        })
    };
    let disks = hosts.iter().map(disk_of).collect();
    udevd::settle();
    disks
}

/// The map that multipathd makes of the unit, with both paths in it. udev's probe of a new map
/// makes paths of `scsi_debug` fail; multipathd reinstates them, and each time udev probes
/// again. So this waits until nothing has happened while udev finished.
fn map_of(paths: &[BlockDevice]) -> Map {
    let find = || {
        let map = Map::of_path(&paths[0]).unwrap()?;
        let status = map.status(&roots(), soon()).ok()?;
        (status.active() == paths.len()).then_some(map)
    };
    let events = || fs::read_to_string("/sys/kernel/uevent_seqnum").unwrap();
    guest::wait_until("a map of two active paths, in peace", LIMIT, || {
        let before = events();
        find()?;
        udevd::settle();
        find().filter(|_| events() == before)
    })
}

/// Repeats a command while multipathd is too busy for it.
fn answer(tell: impl Fn() -> Result<Answer>) -> Result<Answer> {
    guest::wait_until("multipathd to have time", LIMIT, || {
        Some(tell()).filter(|said| !is_busy(said))
    })
}

fn is_busy(said: &Result<Answer>) -> bool {
    matches!(said, Err(error) if error.kind() == ErrorKind::NotReady)
}

/// multipathd answers `delayed` for a map so new that it has had no udev event of it. So the
/// command is repeated until it is done.
fn until_done(what: &str, tell: impl Fn() -> Result<Answer>) {
    guest::wait_until(what, LIMIT, || {
        let said = answer(&tell).unwrap();
        assert!(matches!(said, Answer::Done | Answer::Delayed), "{said:?}");
        (said == Answer::Done).then_some(())
    });
}

fn daemon() -> Daemon {
    Daemon::find(&roots()).unwrap().expect("multipathd runs")
}

fn remove(engine: &Engine, map: &Map) -> Result<()> {
    let mut watch = engine.hub().watch(map.disk().name());
    multipath::remove(&roots(), map, &mut watch, soon())
}

/// A map that no multipathd manages, as after a crash of multipathd or on a machine without it.
/// The caller must have stopped udevd: its probe of a new map makes paths of `scsi_debug` fail,
/// and no multipathd reinstates them.
fn bare_map(paths: &[BlockDevice], features: &str) -> Map {
    guest::modprobe("dm_multipath", &[]);
    guest::modprobe("dm_round_robin", &[]);
    let sectors = paths[0].size().unwrap() / 512;
    let members: Vec<_> = paths
        .iter()
        .map(|path| format!("{} 1000", path.devno()))
        .collect();
    let members = members.join(" ");
    let table = format!("0 {sectors} multipath {features} 0 1 1 round-robin 0 2 1 {members}");
    guest::run(&[
        "dmsetup",
        "create",
        "bare",
        "--noudevsync",
        "--uuid",
        "mpath-bare",
        "--table",
        &table,
    ]);
    Map::of_path(&paths[0]).unwrap().expect("a map")
}

/// Removes the map when the test panics.
struct Cleaned(Map);

impl Drop for Cleaned {
    fn drop(&mut self) {
        if self.0.is_there() {
            for arguments in [
                ["message", "bare", "0", "fail_if_no_path"].as_slice(),
                &["remove", "--noudevsync", "bare"],
            ] {
                let _as_far_as_it_goes = Command::new("dmsetup").args(arguments).output();
            }
        }
    }
}

fn fail_path(map: &Map, path: &BlockDevice) {
    let message = format!("fail_path {}", path.devno());
    guest::run(&["dmsetup", "message", map.name(), "0", &message]);
}

#[test]
fn a_map_of_two_paths_is_found_by_its_paths_and_by_the_units_name_and_both_are_active() {
    let multipathd = Multipathd::start_mapping_every_disk(NoPath::Fail);
    let target = two_hosts();
    let paths = scan(&target);
    let map = map_of(&paths);
    assert_eq!(Map::of_path(&paths[1]).unwrap().as_ref(), Some(&map));
    assert_eq!(Map::of_disk(map.disk()).unwrap().as_ref(), Some(&map));
    assert_eq!(Map::of_disk(&paths[0]).unwrap(), None);
    let wwid: Wwid = fs::read_to_string(paths[0].dir().join("device/wwid"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    assert_eq!(map.wwid().as_ref(), Some(&wwid));
    assert_eq!(Map::find(&roots(), &wwid).unwrap().as_ref(), Some(&map));
    assert_eq!(Map::all(&roots()).unwrap(), std::slice::from_ref(&map));
    assert_eq!(map.uuid(), format!("mpath-{}", map.name()));
    let mut found = map.paths().unwrap();
    found.sort_by_key(BlockDevice::devno);
    let mut expected = paths.clone();
    expected.sort_by_key(BlockDevice::devno);
    assert_eq!(found, expected);

    let status = map.status(&roots(), soon()).unwrap();
    assert!(!status.queues);
    assert_eq!((status.active(), status.failed()), (2, 0));
    // multipathd would reinstate the path, and udev's read of the map would then fail the other
    // path.
    multipathd.hold();
    let held = udevd::stopped();
    fail_path(&map, &paths[1]);
    let status = map.status(&roots(), soon()).unwrap();
    drop(held);
    multipathd.go_on();
    let failed: Vec<_> = status.paths.iter().filter(|path| !path.active).collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].devno, paths[1].devno());
}

#[test]
fn multipathd_forgets_a_deleted_path_takes_it_again_and_deletes_the_map() {
    let _multipathd = Multipathd::start_mapping_every_disk(NoPath::Fail);
    let target = two_hosts();
    let paths = scan(&target);
    let map = map_of(&paths);
    let daemon = daemon();
    let [first, second] = [paths[0].name(), paths[1].name()];
    assert!(daemon.knows_path(second, soon()).unwrap());
    until_done("the path to be deleted", || {
        daemon.delete_path(second, soon())
    });
    assert!(!daemon.knows_path(second, soon()).unwrap());
    assert!(daemon.knows_path(first, soon()).unwrap());
    assert_eq!(map.paths().unwrap(), [paths[0].clone()]);
    // The path is deleted already, or never existed.
    for path in [second, "sdzz"] {
        let said = answer(|| daemon.delete_path(path, soon()));
        assert_eq!(said.unwrap(), Answer::Done);
    }

    until_done("the path to be added", || daemon.add_path(second, soon()));
    let said = answer(|| daemon.add_path(second, soon()));
    assert_eq!(said.unwrap(), Answer::Done);
    assert!(daemon.knows_path(second, soon()).unwrap());
    assert_eq!(map.paths().unwrap().len(), 2);
    let said = answer(|| daemon.add_path("nbd0", soon()));
    assert_eq!(said.unwrap(), Answer::Excluded);

    // A map in use stays. udev no longer looks at the map.
    assert_eq!(map_of(&paths), map);
    let node = map.disk().node(&roots());
    let held = File::open(&node).unwrap();
    let delete_map = || daemon.delete_map(map.name(), soon());
    let error = answer(delete_map).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(map.is_there());
    drop(held);
    let mut was_busy = false;
    let said = guest::wait_until("multipathd to have time", LIMIT, || {
        let said = delete_map();
        was_busy |= is_busy(&said);
        Some(said).filter(|said| !is_busy(said))
    });
    // multipathd may have done what it was too busy to confirm, and then refuses to do it again.
    match said {
        Err(error) if was_busy => assert_eq!(error.kind(), ErrorKind::Refused, "{error}"),
        said => assert_eq!(said.unwrap(), Answer::Done),
    }
    assert!(!map.is_there());
    assert_eq!(Map::all(&roots()).unwrap(), []);
    // Without a map multipathd still has them as paths.
    for path in [first, second] {
        let said = answer(|| daemon.delete_path(path, soon()));
        assert_eq!(said.unwrap(), Answer::Done);
        assert!(!daemon.knows_path(path, soon()).unwrap());
    }
}

#[test]
fn a_daemon_is_found_only_while_it_runs_and_one_that_hangs_times_out() {
    assert_eq!(Daemon::find(&roots()).unwrap(), None);
    let mut multipathd = Multipathd::start(NoPath::Fail);
    let daemon = daemon();
    assert!(!daemon.knows_path("sda", soon()).unwrap());
    multipathd.hold();
    let error = daemon
        .add_path("sda", Deadline::after(Duration::from_millis(300)))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Map));
    multipathd.go_on();
    assert!(!daemon.knows_path("sda", soon()).unwrap());
    multipathd.stop();
    assert_eq!(Daemon::find(&roots()).unwrap(), None);
    let error = daemon.delete_path("sda", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
}

#[test]
fn io_that_waits_for_a_path_fails_once_the_map_is_set_not_to_queue() {
    let target = two_hosts();
    let paths = scan(&target);
    let _held = udevd::stopped();
    let map = Cleaned(bare_map(&paths, "1 queue_if_no_path"));
    let map = &map.0;
    for path in &paths {
        fail_path(map, path);
    }
    let status = map.status(&roots(), soon()).unwrap();
    assert!(status.queues);
    assert_eq!((status.active(), status.failed()), (0, 2));

    let node = map.disk().node(&roots());
    let (done, written) = mpsc::channel();
    let writer = std::thread::spawn(move || {
        let mut disk = OpenOptions::new()
            .write(true)
            .custom_flags(nix::libc::O_DIRECT)
            .open(node)
            .unwrap();
        let page = memmap2::MmapMut::map_anon(4096).unwrap();
        done.send(disk.write(&page)).unwrap();
    });
    let waits = written.recv_timeout(Duration::from_millis(500));
    assert!(waits.is_err(), "it does not wait: {waits:?}");
    multipath::fail_if_no_path(&roots(), map, soon()).unwrap();
    let error = written.recv_timeout(LIMIT).unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    writer.join().unwrap();
    assert!(!map.status(&roots(), soon()).unwrap().queues);
    // A second message changes nothing.
    multipath::fail_if_no_path(&roots(), map, soon()).unwrap();
    remove(&engine(), map).unwrap();
}

#[test]
fn multipathd_turns_queueing_off() {
    let _multipathd = Multipathd::start_mapping_every_disk(NoPath::Queue);
    let target = two_hosts();
    let map = map_of(&scan(&target));
    assert!(map.status(&roots(), soon()).unwrap().queues);
    let daemon = daemon();
    let answer = daemon.disable_queueing(map.disk().name(), soon()).unwrap();
    assert_eq!(answer, Answer::Done);
    assert!(!map.status(&roots(), soon()).unwrap().queues);
    let error = daemon.disable_queueing("nosuch", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
}

#[test]
fn a_map_that_is_open_is_in_use_and_stays_and_a_closed_one_is_removed() {
    let (engine, target) = (engine(), two_hosts());
    let paths = scan(&target);
    let _held = udevd::stopped();
    let map = Cleaned(bare_map(&paths, "0"));
    let map = &map.0;
    let held = File::open(map.disk().node(&roots())).unwrap();
    let error = remove(&engine, map).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(error.stage(), Some(Stage::RemoveMap));
    assert!(error.to_string().contains("open 1 times"), "{error}");
    assert!(map.is_there());
    assert_eq!(map.status(&roots(), soon()).unwrap().active(), 2);
    drop(held);
    remove(&engine, map).unwrap();
    assert!(!map.is_there());
    assert_eq!(Map::of_path(&paths[0]).unwrap(), None);
    assert_eq!(target.devices().len(), 2, "its disks stay");
    // To remove a map that is gone is a success; other calls report that it vanished.
    remove(&engine, map).unwrap();
    let error = map.status(&roots(), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Vanished);
    let error = multipath::fail_if_no_path(&roots(), map, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Vanished);
}

/// The kernel answers `EINVAL` to a reader of a map that is being removed.
#[test]
fn a_read_during_a_maps_removal_finds_the_map_or_none_and_never_fails() {
    let (engine, target) = (engine(), two_hosts());
    let paths = scan(&target);
    let _held = udevd::stopped();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let (mut seen, mut missing) = (0, 0);
            while !over.load(Ordering::Relaxed) {
                match Map::of_path(&paths[0]).unwrap() {
                    Some(_) => seen += 1,
                    None => missing += 1,
                }
            }
            (seen, missing)
        });
        for _ in 0..30 {
            let map = Cleaned(bare_map(&paths, "0"));
            remove(&engine, &map.0).unwrap();
        }
        over.store(true, Ordering::Relaxed);
        let (seen, missing) = looks.join().unwrap();
        assert!(seen > 0 && missing > 0, "{seen} {missing}");
    });
}

#[test]
fn the_removal_of_a_map_that_is_gone_leaves_another_map_with_the_same_uuid() {
    let (engine, target) = (engine(), two_hosts());
    let paths = scan(&target);
    let _held = udevd::stopped();
    let first = Cleaned(bare_map(&paths, "0"));
    remove(&engine, &first.0).unwrap();
    let second = Cleaned(bare_map(&paths, "0"));
    assert_eq!(first.0.uuid(), second.0.uuid());
    assert_eq!(
        first.0.disk().name(),
        second.0.disk().name(),
        "dm-N is used again"
    );
    assert_ne!(first.0, second.0);
    remove(&engine, &first.0).unwrap();
    assert!(second.0.is_there());
    remove(&engine, &second.0).unwrap();
}

/// Makes the driver report a larger size, and the kernel read it.
fn show_a_gibibyte(target: &ScsiDebug) {
    target.set("virtual_gb", 1);
    for device in target.devices() {
        fs::write(format!("/sys/bus/scsi/devices/{device}/rescan"), "1").unwrap();
    }
}

#[test]
fn a_map_grows_with_its_paths_while_it_is_read_and_with_io_that_waits() {
    let (engine, target) = (engine(), two_hosts());
    let paths = scan(&target);
    let _held = udevd::stopped();
    let map = Cleaned(bare_map(&paths, "1 queue_if_no_path"));
    let map = &map.0;
    let size = map.disk().size().unwrap();
    let grow = |bytes| multipath::grow(&roots(), map, bytes, soon());
    // Its present size changes nothing; a smaller size is refused, and so is more than a path
    // has.
    grow(size).unwrap();
    assert_eq!(
        grow(size - 512).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    let error = grow(1 << 30).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady);
    assert_eq!(error.stage(), Some(Stage::Resize));
    // The disks of two hosts may get their names in either order.
    let names_a_path = |path: &BlockDevice| error.to_string().contains(path.name());
    assert!(paths.iter().any(names_a_path), "{error}");
    assert_eq!(map.disk().size().unwrap(), size);

    let mut disk = File::open(map.disk().node(&roots())).unwrap();
    for path in &paths {
        fail_path(map, path);
    }
    let node = map.disk().node(&roots());
    let (done, read) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut waits = OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_DIRECT)
            .open(node)
            .unwrap();
        let mut page = memmap2::MmapMut::map_anon(4096).unwrap();
        done.send(waits.read_exact(&mut page)).unwrap();
    });
    let waits = read.recv_timeout(Duration::from_millis(500));
    assert!(waits.is_err(), "it does not wait: {waits:?}");

    show_a_gibibyte(&target);
    let bytes = paths[0].size().unwrap();
    assert_eq!(bytes, 1 << 30);
    grow(bytes).unwrap();
    assert_eq!(map.disk().size().unwrap(), bytes);
    // The paths in the new table are active, and the waiting read completed.
    read.recv_timeout(LIMIT).unwrap().unwrap();
    reader.join().unwrap();
    let status = map.status(&roots(), soon()).unwrap();
    assert!(status.queues);
    assert_eq!(status.active(), 2);
    disk.read_exact(&mut [0; 512]).unwrap();
    drop(disk);
    remove(&engine, map).unwrap();
}

#[test]
fn multipathd_grows_a_map_with_its_paths() {
    let _multipathd = Multipathd::start_mapping_every_disk(NoPath::Fail);
    let target = two_hosts();
    let map = map_of(&scan(&target));
    let daemon = daemon();
    let name = map.disk().name();
    // multipathd refuses until it has udev's event of the new map.
    guest::wait_until("multipathd to take the map for whole", LIMIT, || {
        daemon
            .resize_map(name, soon())
            .ok()
            .filter(|answer| *answer == Answer::Done)
    });
    show_a_gibibyte(&target);
    assert_eq!(daemon.resize_map(name, soon()).unwrap(), Answer::Done);
    guest::wait_until("the map's new size", LIMIT, || {
        (map.disk().size().unwrap() == 1 << 30).then_some(())
    });
    assert!(map.is_there());
    let error = daemon.resize_map("nosuch", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
}
