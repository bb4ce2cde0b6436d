//! Units behind iSCSI sessions: many paths, and addresses that move to other units.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use lunbd::engine::{Flush, Multipath, ResizeRequest, StageObserver};
use lunbd::error::Stage;
use lunbd::{AttachRequest, Attachment, Deadline, DetachRequest, DetachTarget, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};
use vm_tests::guest::unwritten::{LazyWriteback, keep_unwritten};

const IQN: &str = "iqn.2026-01.example:paths";
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn over(portals: &[usize], lun: u64) -> Source {
    let portals: Vec<&str> = portals.iter().map(|&at| PORTALS[at]).collect();
    let uri = format!("iscsi://{}/{IQN}/{lun}", portals.join(","));
    uri.parse().unwrap()
}

fn fill(node: &Path, byte: u8, length: usize) {
    let mut disk = OpenOptions::new().write(true).open(node).unwrap();
    disk.write_all(&vec![byte; length]).unwrap();
    disk.sync_all().unwrap();
}

fn first_byte(node: &Path) -> u8 {
    let mut byte = [0];
    File::open(node).unwrap().read_exact(&mut byte).unwrap();
    byte[0]
}

fn scsi_disks() -> Vec<String> {
    let names = guest::entries("/sys/bus/scsi/devices");
    names
        .into_iter()
        .filter(|name| name.matches(':').count() == 3)
        .collect()
}

#[test]
fn two_sessions_are_two_paths_of_one_map_and_all_is_gone_after_the_detach() {
    let engine = engine();
    let store = Store::file("a1", 16 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(3, &store);
    let iscsid = Iscsid::start();
    let multipathd = Multipathd::start(NoPath::Fail);
    let _sessions = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, Timeouts::default()));

    let request = AttachRequest::new(over(&[0, 1], 3))
        .expect(store.wwid().parse().unwrap())
        .min_paths(2)
        .multipath(Multipath::Require);
    let attachment = engine.attach(&request, soon()).unwrap();
    assert_eq!(attachment.paths().len(), 2);
    assert!(
        attachment.node.to_str().unwrap().starts_with("/dev/dm-"),
        "{attachment:?}"
    );
    assert_eq!(attachment.size, 16 * MIB);
    assert!(attachment.changed);
    assert!(!attachment.links.is_empty());
    for link in &attachment.links {
        assert_eq!(fs::canonicalize(link).unwrap(), attachment.node);
    }
    let again = engine.attach(&request, soon()).unwrap();
    assert!(!again.changed);
    assert_eq!(again.node, attachment.node);

    let mut disk = OpenOptions::new()
        .write(true)
        .open(&attachment.node)
        .unwrap();
    disk.write_all(&vec![0x5a; 1 << 20]).unwrap();
    drop(disk);
    let detachment = engine.detach(over(&[0, 1], 3), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    let receipt = detachment.receipt.unwrap();
    let map = receipt.map.unwrap();
    assert!(map.gone && map.flush == Some(Flush::Done) && !map.told_to_fail);
    assert_eq!(receipt.paths.len(), 2);
    for path in &receipt.paths {
        assert!(path.gone && path.forgotten == Some(true), "{path:?}");
    }
    assert_eq!(multipathd::maps(), [] as [&str; 0]);
    assert_eq!(scsi_disks(), [] as [&str; 0]);
    for path in attachment.paths() {
        let name = path.node.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(!multipathd.knows(&name));
    }
    let data = fs::read(store.path().unwrap()).unwrap();
    assert!(data[..1 << 20].iter().all(|&byte| byte == 0x5a));
}

#[test]
fn a_detach_finds_a_path_that_came_later_and_was_never_attached_by_us() {
    let engine = engine();
    let store = Store::ramdisk("a2", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let iscsid = Iscsid::start();
    let [_first, second] = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, Timeouts::default()));
    let attachment = engine
        .attach(&AttachRequest::new(over(&[0], 1)), soon())
        .unwrap();
    second.scanned_disk(1);
    let detachment = engine
        .detach(DetachTarget::Device(attachment.node.clone()), soon())
        .unwrap();
    assert_eq!(detachment.receipt.as_ref().unwrap().paths.len(), 2);
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(scsi_disks(), [] as [&str; 0]);

    // Nothing of the unit is left, and its name proves that.
    let name = format!("unit:{}", store.wwid());
    let again = engine
        .detach(name.parse::<DetachTarget>().unwrap(), soon())
        .unwrap();
    assert!(!again.changed);
    assert!(again.safe_to_unmap, "{again:?}");
    // Without a name "it is gone" applies only to the address.
    let again = engine.detach(over(&[0], 1), soon()).unwrap();
    assert!(!again.changed && !again.safe_to_unmap);
}

#[test]
fn a_portal_without_a_session_is_a_missing_path_and_the_caller_says_how_many_must_be_there() {
    let engine = engine();
    let store = Store::ramdisk("a3", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(0, &store);
    let iscsid = Iscsid::start();
    let _session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let request = AttachRequest::new(over(&[0, 1], 0));
    let error = engine
        .attach(&request.clone().min_paths(2), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooFewPaths);
    assert!(error.to_string().contains("127.0.0.2:3260"), "{error}");
    assert_eq!(scsi_disks(), [] as [&str; 0]);
    let attachment = engine.attach(&request, soon()).unwrap();
    let lunbd::engine::Unit::Scsi { paths, missing, .. } = &attachment.unit else {
        panic!("{attachment:?}");
    };
    assert_eq!((paths.len(), missing.len()), (1, 1));
    engine.detach(over(&[0, 1], 0), soon()).unwrap();
}

#[test]
fn a_session_that_fails_before_the_scan_is_a_missing_path_and_no_missing_lun() {
    let engine = engine();
    let store = Store::ramdisk("a4", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(2, &store);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let target = Arc::new(target);
    let request = AttachRequest::new(over(&[0], 2)).observe(StageObserver::new({
        let (target, session) = (Arc::clone(&target), session.clone());
        move |stage| {
            if stage == Stage::Scan {
                target.portal_down(0);
                session.wait_for_state("FAILED", LIMIT);
            }
        }
    }));
    let patient = Deadline::after(3 * LIMIT);
    let error = engine.attach(&request, patient).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooFewPaths, "{error}");
    assert_eq!(error.stage(), Some(Stage::Scan));
    let why = format!("session {} to {} is FAILED", session.id, PORTALS[0]);
    assert!(error.to_string().contains(&why), "{error}");
    target.portal_up(0);
    session.wait_for_state("LOGGED_IN", LIMIT);
    engine
        .attach(&AttachRequest::new(over(&[0], 2)), soon())
        .unwrap();
    engine.detach(over(&[0], 2), soon()).unwrap();
}

/// A LUN number that another volume received while the kernel still has the old volume's
/// device.
fn reused(rescan: bool, expect: bool) -> (Attachment, String) {
    if rescan && guest::kernel() < (5, 15) {
        guest::skip("nothing says what a disk was born as before diskseq");
    }
    let engine = engine();
    let (old, new) = (Store::file("b1", 8 * MIB), Store::file("c2", 8 * MIB));
    let mut target = IscsiTarget::new(IQN);
    target.map(5, &old);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let first = engine
        .attach(&AttachRequest::new(over(&[0], 5)), soon())
        .unwrap();
    fill(&first.node, 0xaa, 4096);
    guest::udevd::settle();
    target.remap(5, &new);
    if rescan {
        fs::write(session.device_dir(5).join("rescan"), "1").unwrap();
    }
    let mut request = AttachRequest::new(over(&[0], 5));
    if expect {
        request = request.expect(new.wwid().parse().unwrap());
    }
    let second = engine.attach(&request, soon()).unwrap();
    assert!(second.changed, "{second:?}");
    assert!(second.identity().unwrap().is(&new.wwid().parse().unwrap()));
    if guest::kernel() >= (5, 15) {
        assert_ne!(second.diskseq, first.diskseq);
    }
    assert_eq!(first_byte(&second.node), 0, "the old volume's data");
    fill(&second.node, 0xbb, 4096);
    for link in &second.links {
        assert_eq!(fs::canonicalize(link).unwrap(), second.node);
    }
    let links = format!("{:?}", second.links);
    assert!(!links.contains(&old.wwid()["naa.".len()..]), "{links}");
    let detachment = engine.detach(over(&[0], 5), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    let data = fs::read(old.path().unwrap()).unwrap();
    assert!(data[..4096].iter().all(|&byte| byte == 0xaa));
    let data = fs::read(new.path().unwrap()).unwrap();
    assert!(data[..4096].iter().all(|&byte| byte == 0xbb));
    (second, new.wwid())
}

#[test]
fn a_lun_that_was_given_to_another_volume_is_scanned_anew() {
    reused(false, false);
}

#[test]
fn a_lun_that_was_given_to_another_volume_is_scanned_anew_and_is_the_expected_one() {
    reused(false, true);
}

#[test]
fn a_lun_that_was_given_to_another_volume_and_rescanned_since_is_scanned_anew() {
    reused(true, false);
}

#[test]
fn a_lun_that_was_given_to_another_volume_and_rescanned_since_is_the_expected_one() {
    reused(true, true);
}

#[test]
fn a_lun_that_a_larger_volume_received_is_not_returned_while_the_old_volume_is_mounted() {
    let engine = engine();
    let (old, new) = (Store::file("f1", 16 * MIB), Store::file("a2", 24 * MIB));
    let mut target = IscsiTarget::new(IQN);
    target.map(5, &old);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let source = || over(&[0], 5);
    let first = engine
        .attach(&AttachRequest::new(source()), soon())
        .unwrap();
    let node = first.node.to_str().unwrap();
    guest::run(&["mkfs.ext4", "-q", node]);
    fs::create_dir_all("/tmp/old").unwrap();
    guest::run(&["mount", "-t", "ext4", node, "/tmp/old"]);
    guest::udevd::settle();
    target.remap(5, &new);
    fs::write(session.device_dir(5).join("rescan"), "1").unwrap();
    guest::udevd::settle();
    // Neither the kernel nor udev knows the old volume any more.
    let link = format!("/dev/disk/by-id/wwn-0x{}", &new.wwid()["naa.".len()..]);
    assert_eq!(fs::canonicalize(link).unwrap(), first.node);
    let again = engine.attach(&AttachRequest::new(source()), soon());
    let was = DetachTarget::Unit(old.wwid().parse().unwrap());
    let is = DetachTarget::Unit(new.wwid().parse().unwrap());
    let [by_source, by_name, of_new] =
        [source().into(), was, is].map(|target: DetachTarget| engine.detach(target, soon()));
    let resized = engine.resize(&ResizeRequest::new(source()), soon());
    let stands = session.device_dir(5).exists();
    target.remap(5, &old);
    guest::run(&["umount", "/tmp/old"]);
    fs::remove_dir("/tmp/old").unwrap();
    assert!(stands, "{by_source:?} {by_name:?}");
    for detached in [by_source, by_name] {
        let failure = detached.expect_err("it is mounted as the old volume");
        assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    }
    let of_new = of_new.unwrap();
    assert!(!of_new.changed && !of_new.safe_to_unmap, "{of_new:?}");
    let error = resized.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    let error = again.expect_err("it is mounted as the old volume");
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(error.to_string().contains(&old.wwid()), "{error}");
    target.remap(5, &new);
    let second = engine
        .attach(&AttachRequest::new(source()), soon())
        .unwrap();
    assert!(second.changed, "{second:?}");
    assert!(second.identity().unwrap().is(&new.wwid().parse().unwrap()));
    let detachment = engine.detach(source(), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
}

#[test]
fn a_stale_disk_that_a_process_has_open_is_not_returned_not_removed_and_not_written_to() {
    // Only the engine could write the old volume's pages back.
    let _lazy = LazyWriteback::start();
    let engine = engine();
    let (old, new) = (Store::file("d1", 8 * MIB), Store::file("e2", 8 * MIB));
    let mut target = IscsiTarget::new(IQN);
    target.map(2, &old);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let first = engine
        .attach(&AttachRequest::new(over(&[0], 2)), soon())
        .unwrap();
    let _reader = keep_unwritten(&first.node);
    let mut holder = OpenOptions::new().write(true).open(&first.node).unwrap();
    // Dirty pages of the old volume, which must never reach the new volume.
    holder.write_all(&vec![0xdd; 4096]).unwrap();
    target.remap(2, &new);

    let error = engine
        .attach(&AttachRequest::new(over(&[0], 2)), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    let text = error.to_string();
    assert!(
        text.contains(&old.wwid()) && text.contains(&new.wwid()),
        "{text}"
    );
    assert!(
        text.contains(&format!("process {}", std::process::id())),
        "{text}"
    );
    let failure = engine.detach(over(&[0], 2), soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse);
    assert!(session.disk(2).is_some());
    let data = fs::read(new.path().unwrap()).unwrap();
    assert!(data[..4096].iter().all(|&byte| byte == 0), "it is written");
    drop(holder);
}

#[test]
fn a_detach_that_expects_another_unit_leaves_the_one_that_is_there() {
    let engine = engine();
    let store = Store::ramdisk("f1", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    engine
        .attach(&AttachRequest::new(over(&[0], 1)), soon())
        .unwrap();
    let other = "naa.60014050000000000000000000000000".parse().unwrap();
    let request = DetachRequest::new(over(&[0], 1)).expect(other);
    let failure = engine.detach(request, soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::IdentityMismatch);
    assert!(session.disk(1).is_some());
    engine.detach(over(&[0], 1), soon()).unwrap();
}

fn has_open(pid: u32, node: &Path) -> bool {
    let folder = format!("/proc/{pid}/fd");
    let open = guest::entries(&folder).into_iter();
    let mut open = open.map(|fd| fs::read_link(Path::new(&folder).join(fd)));
    open.any(|file| file.is_ok_and(|file| file == node))
}

/// Both paths go down while written data is in the page cache. A process reads the map and waits.
fn abandon_a_map_that_queues_for_ever(multipathd_hangs: bool) {
    let engine = engine();
    let store = Store::file("a7", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(4, &store);
    let iscsid = Iscsid::start();
    let multipathd = Multipathd::start(NoPath::Queue);
    let sessions = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, Timeouts::default()));
    let request = AttachRequest::new(over(&[0, 1], 4)).multipath(Multipath::Require);
    let attachment = engine.attach(&request, soon()).unwrap();
    let mut disk = OpenOptions::new()
        .write(true)
        .open(&attachment.node)
        .unwrap();
    target.portal_down(0);
    target.portal_down(1);
    for session in &sessions {
        session.wait_until_lost(LIMIT);
    }
    disk.write_all(&vec![0x77; 4096]).unwrap();
    // The close writes back and waits for a path, on a thread that ends with the test.
    let closer = guest::unwritten::closing(disk);
    let failure = engine.detach(over(&[0, 1], 4), Deadline::after(Duration::from_secs(8)));
    let failure = failure.unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    // The kernel may not know yet that the paths are dead: then this flush waits in the map too.
    assert!(!failure.receipt.safe_to_unmap);
    let map = failure.receipt.map.as_ref().unwrap();
    assert!(!map.told_to_fail && !map.gone, "{failure:?}");
    assert!(multipathd::queues(&map.name));
    assert!(!closer.is_finished());
    assert!(
        failure.receipt.paths.iter().all(|path| !path.gone),
        "{failure:?}"
    );

    // Like udev, this process reads the map for as long as the map queues.
    let mut blkid = Command::new("blkid");
    let mut reader = blkid.arg("-p").arg(&attachment.node).spawn().unwrap();
    guest::wait_until("blkid to wait in its read", LIMIT, || {
        has_open(reader.id(), &attachment.node.canonicalize().unwrap()).then_some(())
    });
    if multipathd_hangs {
        multipathd.hold();
    }
    let abandon = DetachRequest::new(over(&[0, 1], 4)).abandon_unwritten();
    let limit = Duration::from_secs(80);
    let deadline = Deadline::after(limit);
    let abandoned = engine.detach(abandon.clone(), deadline);
    assert!(deadline.elapsed() < limit + Duration::from_secs(10));
    guest::unwritten::closed(closer);
    assert!(!reader.wait().unwrap().success());
    // A multipathd that hangs cannot say that it has forgotten the paths.
    assert_eq!(abandoned.is_err(), multipathd_hangs, "{abandoned:?}");
    let receipt = match abandoned {
        Ok(detachment) => detachment.receipt.unwrap(),
        Err(failure) => {
            assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
            *failure.receipt
        }
    };
    assert!(!receipt.safe_to_unmap, "{receipt:?}");
    let map = receipt.map.as_ref().unwrap();
    assert!(map.told_to_fail && map.gone, "{receipt:?}");
    assert!(matches!(map.flush, Some(Flush::Abandoned(_))), "{map:?}");
    if multipathd_hangs {
        multipathd.go_on();
        engine.detach(abandon, soon()).unwrap();
    }
    assert_eq!(multipathd::maps(), [] as [&str; 0]);
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
    drop(multipathd);
}

#[test]
fn a_queueing_map_without_a_path_is_told_to_fail_only_where_the_caller_abandons_its_data() {
    abandon_a_map_that_queues_for_ever(false);
}

#[test]
fn a_queueing_map_is_set_to_fail_by_ioctl_if_multipathd_hangs() {
    abandon_a_map_that_queues_for_ever(true);
}
