//! Units behind Fibre Channel ports, with links that go down during use.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lunbd::engine::{Flush, StageObserver, Unit};
use lunbd::error::Stage;
use lunbd::{
    AttachRequest, Deadline, DetachRequest, DetachTarget, Engine, Error, ErrorKind, Source,
};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::fcoe::FcFabric;
use vm_tests::guest::lio::Store;
use vm_tests::guest::unwritten::keep_unwritten;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// The deadline of a call that cannot succeed.
const SHORT: Duration = Duration::from_secs(4);
/// The time for the caller's own work on a busy machine.
const TOLERANCE: Duration = Duration::from_secs(10);
/// A name that no port has.
const NOBODY: &str = "0x50014380000000ff";

fn at(fabric: &FcFabric, lun: u64) -> Source {
    let uri = format!("fc://{}/{lun}", fabric.target_wwpn());
    uri.parse().unwrap()
}

fn by_name(store: &Store) -> DetachTarget {
    format!("unit:{}", store.wwid()).parse().unwrap()
}

/// The LUNs of the initiator's host.
fn luns(fabric: &FcFabric) -> Vec<u64> {
    let host = format!("{}:", fabric.host());
    let names = guest::entries("/sys/bus/scsi/devices");
    let ours = names.iter().filter(|name| name.starts_with(&host));
    ours.filter_map(|name| name.rsplit(':').next()?.parse().ok())
        .collect()
}

fn wait_for_state(fabric: &FcFabric, lun: u64, state: &str) {
    let path = fabric.device_dir(lun).join("state");
    guest::wait_until(&format!("the device to be {state}"), LIMIT, || {
        let found = fs::read_to_string(&path).unwrap_or_default();
        (found.trim() == state).then_some(())
    });
}

/// Sets timeouts so that nothing ends by itself while the link is down.
fn let_io_wait(fabric: &FcFabric) {
    fabric.set_rport("fast_io_fail_tmo", "off");
    fabric.set_rport("dev_loss_tmo", "600");
}

/// Requires that a call fails within its deadline.
fn soon_fails<T: std::fmt::Debug, E: std::fmt::Display>(
    call: impl FnOnce(Deadline) -> Result<T, E>,
) -> E {
    fails_within(SHORT, call)
}

fn fails_within<T: std::fmt::Debug, E: std::fmt::Display>(
    limit: Duration,
    call: impl FnOnce(Deadline) -> Result<T, E>,
) -> E {
    let deadline = Deadline::after(limit);
    let failure = call(deadline).unwrap_err();
    let took = deadline.elapsed();
    assert!(took < limit + TOLERANCE, "{took:?}: {failure}");
    failure
}

fn attach_fails(engine: &Engine, source: impl Into<Source>) -> Error {
    let request = AttachRequest::new(source);
    soon_fails(|deadline| engine.attach(&request, deadline))
}

/// Requires that the attach reports the path as missing, and its port in `state`.
fn assert_port_is(error: &Error, fabric: &FcFabric, state: &str) {
    assert_eq!(error.kind(), ErrorKind::TooFewPaths, "{error}");
    let (rport, port) = (fabric.rport().unwrap(), fabric.target_wwpn());
    let why = format!("{rport} to {port} is {state}");
    assert!(error.to_string().contains(&why), "{error}");
}

fn until_nothing_is_stuck(engine: &Engine) {
    guest::wait_until("the call to return", LIMIT, || {
        engine.stuck_calls().is_empty().then_some(())
    });
}

#[test]
fn an_attach_adds_only_the_requested_lun_and_a_detach_leaves_nothing() {
    let engine = engine();
    let stores = ["a0", "b1", "c2"].map(|serial| Store::file(serial, 8 * MIB));
    let mut fabric = FcFabric::up();
    for (lun, store) in (0..).zip(&stores) {
        fabric.map(lun, store);
    }
    let store = &stores[1];
    let request = AttachRequest::new(at(&fabric, 1)).expect(store.wwid().parse().unwrap());
    let attachment = engine.attach(&request, soon()).unwrap();
    assert_eq!(luns(&fabric), [1]);
    assert!(attachment.changed);
    assert_eq!(attachment.size, 8 * MIB);
    let Unit::Scsi {
        identity, paths, ..
    } = &attachment.unit
    else {
        panic!("{attachment:?}");
    };
    assert_eq!(identity.wwid().unwrap().to_string(), store.wwid());
    assert_eq!(paths[0].via.to_string(), fabric.rport().unwrap());
    let mut disk = OpenOptions::new()
        .write(true)
        .open(&attachment.node)
        .unwrap();
    disk.write_all(&[0x5a; 4096]).unwrap();
    drop(disk);

    let detachment = engine.detach(at(&fabric, 1), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    let receipt = detachment.receipt.unwrap();
    assert_eq!(receipt.paths.len(), 1);
    assert_eq!(receipt.paths[0].flush, Some(Flush::Done));
    assert_eq!(luns(&fabric), [0; 0]);
    assert!(!attachment.node.exists());
    for link in &attachment.links {
        assert!(link.symlink_metadata().is_err(), "{}", link.display());
    }
    let data = fs::read(store.path().unwrap()).unwrap();
    assert!(data[..4096].iter().all(|&byte| byte == 0x5a));
}

#[test]
fn a_lun_that_is_not_mapped_is_not_found_and_a_port_that_no_host_sees_is_a_missing_path() {
    let engine = engine();
    let store = Store::ramdisk("d1", 8 * MIB);
    let mut fabric = FcFabric::up();
    fabric.map(1, &store);
    let error = engine
        .attach(&AttachRequest::new(at(&fabric, 5)), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert!(error.to_string().contains("LUN 5"), "{error}");
    assert_eq!(luns(&fabric), [0; 0]);

    let nobody: Source = format!("fc://{NOBODY}/1").parse().unwrap();
    let error = attach_fails(&engine, nobody);
    assert_eq!(error.kind(), ErrorKind::TooFewPaths, "{error}");
    let text = error.to_string();
    let port = format!("host{} is Online", fabric.host());
    assert!(text.contains(NOBODY) && text.contains(&port), "{text}");

    // Beside a visible port it is one path less.
    let both: Source = format!("fc://{NOBODY},{}/1", fabric.target_wwpn())
        .parse()
        .unwrap();
    let request = AttachRequest::new(both.clone());
    let attachment = engine.attach(&request, soon()).unwrap();
    let Unit::Scsi { paths, missing, .. } = &attachment.unit else {
        panic!("{attachment:?}");
    };
    assert_eq!((paths.len(), missing.len()), (1, 1));
    assert!(missing[0].why.contains(&port), "{}", missing[0]);
    assert!(engine.detach(both, soon()).unwrap().safe_to_unmap);
}

#[test]
fn each_state_of_a_lost_port_is_said_until_the_device_is_gone_and_a_new_attach_works() {
    let engine = engine();
    let store = Store::file("e1", 8 * MIB);
    // With a write cache a flush is a command, which needs the link.
    store.set_write_cache(true);
    let mut fabric = FcFabric::up();
    fabric.map(3, &store);
    let attachment = engine
        .attach(&AttachRequest::new(at(&fabric, 3)), soon())
        .unwrap();
    let hctl = attachment.hctl().unwrap();
    let disk = File::open(&attachment.node).unwrap();
    fabric.set_rport("dev_loss_tmo", "26");
    fabric.set_rport("fast_io_fail_tmo", "16");

    fabric.link_down();
    let reader = disk.try_clone().unwrap();
    let reader = thread::spawn(move || reader.read_at(&mut [0; 4096], 4 * MIB));
    assert_port_is(&attach_fails(&engine, at(&fabric, 3)), &fabric, "Blocked");
    let error = attach_fails(&engine, hctl);
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert!(error.to_string().contains("state blocked"), "{error}");
    let failure = soon_fails(|deadline| engine.detach(at(&fabric, 3), deadline));
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush));
    let seen = failure.last_seen().unwrap();
    assert!(seen.contains("state=blocked"), "{seen}");
    assert!(!failure.receipt.safe_to_unmap && !failure.receipt.paths[0].gone);
    assert!(!reader.is_finished());

    wait_for_state(&fabric, 3, "transport-offline");
    let failed = reader.join().unwrap().unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(nix::libc::EIO), "{failed}");
    until_nothing_is_stuck(&engine);
    assert_port_is(&attach_fails(&engine, at(&fabric, 3)), &fabric, "Blocked");
    let error = attach_fails(&engine, hctl);
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert!(error.to_string().contains("transport-offline"), "{error}");
    let failure = soon_fails(|deadline| engine.detach(at(&fabric, 3), deadline));
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    let us = format!("process {}", std::process::id());
    assert!(failure.to_string().contains(&us), "{failure}");

    fabric.wait_for_rport("Not Present");
    // The device's link in sysfs goes before its disk.
    let name = attachment.node.file_name().unwrap();
    let block = Path::new("/sys/block").join(name);
    guest::wait_until("the device to go", LIMIT, || {
        (luns(&fabric).is_empty() && !block.exists()).then_some(())
    });
    assert_port_is(
        &attach_fails(&engine, at(&fabric, 3)),
        &fabric,
        "Not Present",
    );
    let gone = engine.detach(at(&fabric, 3), soon()).unwrap();
    assert!(!gone.changed && !gone.safe_to_unmap, "{gone:?}");
    // No device is left, but the flush of the removed disk has failed. Each detach reports that
    // until a caller accepts the loss.
    for _ in 0..2 {
        let gone = engine.detach(by_name(&store), soon()).unwrap();
        assert!(!gone.changed && !gone.safe_to_unmap, "{gone:?}");
        let notes = gone.receipt.unwrap().notes.join("; ");
        assert!(notes.contains("an earlier flush failed"), "{notes}");
    }

    drop(disk);
    fabric.link_up();
    let again = engine
        .attach(&AttachRequest::new(at(&fabric, 3)), soon())
        .unwrap();
    assert!(again.changed);
    // The mark of the failed flush is gone.
    let names = format!("names-{}", again.hctl().unwrap());
    let left = guest::entries("/run/lunbd");
    assert!(left.contains(&names), "{left:?}");
    assert!(left.iter().all(|it| it.starts_with(&names)), "{left:?}");
    assert!(again.identity().unwrap().is(&store.wwid().parse().unwrap()));
    let mut byte = [1];
    let disk = File::open(&again.node).unwrap();
    disk.read_exact_at(&mut byte, 4 * MIB).unwrap();
    drop(disk);
    let detachment = engine.detach(at(&fabric, 3), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
}

#[test]
fn a_link_that_fails_before_the_scan_is_a_missing_path_and_no_missing_lun() {
    let engine = engine();
    let store = Store::ramdisk("f1", 8 * MIB);
    let mut fabric = FcFabric::up();
    fabric.map(2, &store);
    let_io_wait(&fabric);
    let fabric = Arc::new(fabric);
    let request = AttachRequest::new(at(&fabric, 2)).observe(StageObserver::new({
        let fabric = Arc::clone(&fabric);
        move |stage| {
            if stage == Stage::Scan {
                fabric.link_down();
            }
        }
    }));
    let patient = Deadline::after(3 * LIMIT);
    let error = engine.attach(&request, patient).unwrap_err();
    assert_port_is(&error, &fabric, "Blocked");
    assert_eq!(error.stage(), Some(Stage::Scan));

    // The kernel's own answer does not show the cause.
    fabric.scan(2);
    assert_eq!(luns(&fabric), [0; 0]);
    let error = attach_fails(&engine, at(&fabric, 2));
    assert_port_is(&error, &fabric, "Blocked");
    assert_eq!(error.stage(), Some(Stage::Resolve));

    fabric.link_up();
    engine
        .attach(&AttachRequest::new(at(&fabric, 2)), soon())
        .unwrap();
    let detachment = engine.detach(at(&fabric, 2), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
}

#[test]
fn an_attach_that_finds_the_device_and_loses_the_link_ends_at_its_deadline_and_says_blocked() {
    let engine = engine();
    let store = Store::ramdisk("a5", 8 * MIB);
    let mut fabric = FcFabric::up();
    fabric.map(2, &store);
    let_io_wait(&fabric);
    let source = at(&fabric, 2);
    let request = AttachRequest::new(source.clone());
    engine.attach(&request, soon()).unwrap();
    let fabric = Arc::new(fabric);
    let lossy = request.clone().observe(StageObserver::new({
        let fabric = Arc::clone(&fabric);
        move |stage| {
            if stage == Stage::Identify {
                fabric.link_down();
            }
        }
    }));
    // The link goes down within the call.
    let limit = Duration::from_secs(20);
    let error = fails_within(limit, |deadline| engine.attach(&lossy, deadline));
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Identify));
    let seen = error.last_seen().unwrap();
    assert!(seen.contains("state=blocked"), "{seen}");

    fabric.link_up();
    until_nothing_is_stuck(&engine);
    let again = engine.attach(&request, soon()).unwrap();
    assert!(!again.changed);
    assert!(engine.detach(source, soon()).unwrap().safe_to_unmap);
}

#[test]
fn a_detach_whose_flush_waits_for_the_link_ends_at_its_deadline_and_the_next_loses_nothing() {
    let engine = engine();
    let store = Store::file("b6", 8 * MIB);
    let mut fabric = FcFabric::up();
    fabric.map(4, &store);
    let_io_wait(&fabric);
    let attachment = engine
        .attach(&AttachRequest::new(at(&fabric, 4)), soon())
        .unwrap();
    let reader = keep_unwritten(&attachment.node);
    let mut disk = OpenOptions::new()
        .write(true)
        .open(&attachment.node)
        .unwrap();
    fabric.link_down();
    disk.write_all(&[0x77; 4096]).unwrap();
    drop(disk);

    let failure = soon_fails(|deadline| engine.detach(at(&fabric, 4), deadline));
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Flush));
    let seen = failure.last_seen().unwrap();
    assert!(seen.contains("state=blocked"), "{seen}");
    assert_eq!(luns(&fabric), [4]);
    // The detach fails at once, while the first one's call hangs.
    let failure = soon_fails(|deadline| engine.detach(at(&fabric, 4), deadline));
    assert_eq!(failure.kind(), ErrorKind::Quarantined, "{failure}");

    fabric.link_up();
    until_nothing_is_stuck(&engine);
    drop(reader);
    let detachment = engine.detach(at(&fabric, 4), soon()).unwrap();
    assert!(
        detachment.changed && detachment.safe_to_unmap,
        "{detachment:?}"
    );
    let data = fs::read(store.path().unwrap()).unwrap();
    assert!(data[..4096].iter().all(|&byte| byte == 0x77));
}

#[test]
fn a_flush_that_fails_after_its_detach_has_ended_is_remembered_and_a_dead_disk_is_never_safe() {
    let engine = engine();
    let store = Store::file("d8", 8 * MIB);
    let mut fabric = FcFabric::up();
    fabric.map(4, &store);
    let source = at(&fabric, 4);
    let attachment = engine
        .attach(&AttachRequest::new(source.clone()), soon())
        .unwrap();
    fabric.set_rport("dev_loss_tmo", "600");
    fabric.set_rport("fast_io_fail_tmo", "12");
    let reader = keep_unwritten(&attachment.node);
    let mut disk = OpenOptions::new()
        .write(true)
        .open(&attachment.node)
        .unwrap();
    fabric.link_down();
    disk.write_all(&[0x88; 4096]).unwrap();
    drop(disk);
    let failure = soon_fails(|deadline| engine.detach(source.clone(), deadline));
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    wait_for_state(&fabric, 4, "transport-offline");
    until_nothing_is_stuck(&engine);
    drop(reader);

    fabric.link_up();
    let failure = engine.detach(source.clone(), soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::Io, "{failure}");
    assert!(
        failure.to_string().contains("an earlier flush"),
        "{failure}"
    );
    assert_eq!(luns(&fabric), [4]);

    fabric.set_rport("fast_io_fail_tmo", "1");
    fabric.link_down();
    wait_for_state(&fabric, 4, "transport-offline");
    let detachment = engine.detach(source, soon()).unwrap();
    assert!(
        matches!(detachment.flush, Some(Flush::Unreachable(_))),
        "{detachment:?}"
    );
    assert!(detachment.changed && !detachment.safe_to_unmap);
    assert_eq!(luns(&fabric), [0; 0]);
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
    fabric.link_up();
}

#[test]
fn a_blocked_disk_with_nothing_to_write_is_detached_while_the_link_is_down() {
    let engine = engine();
    let store = Store::ramdisk("c7", 8 * MIB);
    let mut fabric = FcFabric::up();
    fabric.map(6, &store);
    let_io_wait(&fabric);
    engine
        .attach(&AttachRequest::new(at(&fabric, 6)), soon())
        .unwrap();
    fabric.link_down();
    let detachment = engine.detach(at(&fabric, 6), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(luns(&fabric), [0; 0]);
    fabric.link_up();
}

#[test]
fn an_attach_reads_the_size_again_that_the_kernel_cleared_while_the_path_was_lost() {
    let engine = engine();
    let store = Store::file("d9", 8 * MIB);
    let mut fabric = FcFabric::up();
    fabric.map(4, &store);
    let source = at(&fabric, 4);
    let request = AttachRequest::new(source.clone());
    let attachment = engine.attach(&request, soon()).unwrap();
    fabric.set_rport("dev_loss_tmo", "600");
    fabric.set_rport("fast_io_fail_tmo", "20");
    let mut disk = OpenOptions::new()
        .write(true)
        .open(&attachment.node)
        .unwrap();
    fabric.link_down();
    // The kernel opens the disk to read its partitions, and asks it for its size again. An
    // older udevd requests this when a writer closes the disk, a newer one does not.
    let mut reread = Command::new("blockdev")
        .arg("--rereadpt")
        .arg(&attachment.node)
        .spawn()
        .unwrap();
    guest::wait_until("the kernel to look at the disk", LIMIT, || {
        let looks = |process: &String| {
            let stack = fs::read_to_string(format!("/proc/{process}/stack"));
            stack.is_ok_and(|stack| stack.contains("sd_open"))
        };
        guest::entries("/proc").iter().any(looks).then_some(())
    });
    disk.write_all(&[0x99; 4096]).unwrap();
    // The write is in flight from here on, and fails when the port's timeout is over.
    posix_fadvise(&disk, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    // The close waits for the open.
    let closer = thread::spawn(move || drop(disk));
    let failure = soon_fails(|deadline| engine.detach(source.clone(), deadline));
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    closer.join().unwrap();
    until_nothing_is_stuck(&engine);
    reread.wait().unwrap();
    // udevd's work must fail now: on the returned path it would succeed.
    guest::udevd::settle();
    let name = attachment.node.file_name().unwrap().to_str().unwrap();
    let size = fs::read_to_string(format!("/sys/block/{name}/size")).unwrap();
    assert_eq!(size.trim(), "0", "else this shows nothing");
    fabric.link_up();

    let again = engine.attach(&request, soon()).unwrap();
    assert_eq!((again.size, again.changed), (8 * MIB, false));
    // The data that could not be written is lost, and no call has reported that so far.
    let failure = engine.detach(source.clone(), soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::Io, "{failure}");
    let abandon = DetachRequest::new(source).abandon_unwritten();
    let detachment = engine.detach(abandon, soon()).unwrap();
    assert!(detachment.changed && !detachment.safe_to_unmap);
}
