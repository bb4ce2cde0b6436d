//! The engine's writes and reads, on a machine that is a directory.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

#[allow(dead_code, reason = "each suite uses a part of it")]
mod machine;

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use lunbd::engine::{DetachFailure, StageObserver};
use lunbd::error::{Retry, Stage};
use lunbd::uevent::Mode;
use lunbd::{
    AttachRequest, Deadline, DetachRequest, DetachTarget, Engine, Error, ErrorKind, Source,
};
use machine::Machine;

fn attach(machine: &Machine, source: &str, limit: Duration) -> Error {
    let engine = Engine::start(machine.roots()).unwrap();
    let source: Source = source.parse().unwrap();
    let deadline = Deadline::after(limit);
    engine
        .attach(&AttachRequest::new(source), deadline)
        .unwrap_err()
}

fn detach(machine: &Machine, target: &str) -> Result<lunbd::Detachment, DetachFailure> {
    let engine = Engine::start(machine.roots()).unwrap();
    let target: DetachTarget = target.parse()?;
    engine.detach(target, Deadline::after(LIMIT))
}

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn a_directory_is_a_machine_without_events() {
    let machine = Machine::new();
    let engine = Engine::start(machine.roots()).unwrap();
    assert_eq!(engine.hub().mode(), Mode::SysfsPoll);
}

#[test]
fn one_line_in_plain_decimal_is_written_and_a_scan_that_says_nothing_is_not_found() {
    let machine = Machine::new();
    machine.host(3);
    let error = attach(&machine, "scsi:3:1:2:flat-300", LIMIT);
    assert_eq!(machine.read("sys/class/scsi_host/host3/scan"), "1 2 16684");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert_eq!(error.retry(), Retry::AfterChange);
}

#[test]
fn a_scan_in_which_the_kernel_may_have_waited_in_vain_is_no_word_of_the_target() {
    let machine = Machine::new();
    machine.host(3);
    // No scan takes less time.
    machine.write("sys/module/scsi_mod/parameters/inq_timeout", "0\n");
    let error = attach(&machine, "scsi:3:1:2:4", LIMIT);
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert!(error.to_string().contains("inq_timeout"), "{error}");
}

#[test]
fn a_lun_that_the_array_may_count_in_flat_addressing_is_explained() {
    let machine = Machine::new();
    machine.host(0);
    let error = attach(&machine, "scsi:0:0:0:300", LIMIT);
    assert!(
        error.to_string().contains("write the LUN as flat-300"),
        "{error}"
    );
    let error = attach(&machine, "scsi:0:0:0:30", LIMIT);
    assert!(!error.to_string().contains("flat"), "{error}");
}

#[test]
fn a_host_that_is_not_there_is_named_with_those_that_are() {
    let machine = Machine::new();
    machine.host(7);
    let error = attach(&machine, "scsi:3:0:0:1", LIMIT);
    assert_eq!(error.kind(), ErrorKind::NoSuchHost);
    assert!(
        error.to_string().contains("this machine has host7"),
        "{error}"
    );
}

#[test]
fn a_lun_that_the_scan_file_cannot_carry_is_refused_before_anything_is_written() {
    let machine = Machine::new();
    machine.host(0);
    let error = attach(&machine, "scsi:0:0:0:12345678901234567", LIMIT);
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert_eq!(machine.read("sys/class/scsi_host/host0/scan"), "");
}

#[test]
fn a_scan_that_hangs_times_out_at_its_stage_and_says_what_was_last_seen() {
    let machine = Machine::new();
    machine.host(0);
    let scan = machine.path("sys/class/scsi_host/host0/scan");
    fs::remove_file(&scan).unwrap();
    // No process reads the file: the open for writing blocks, as the kernel's scan would.
    nix::unistd::mkfifo(&scan, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let start = Instant::now();
    let error = attach(&machine, "scsi:0:0:0:1", Duration::from_secs(5));
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert_eq!(error.last_seen(), Some("host state=running"));
    assert!(start.elapsed() < Duration::from_secs(50));
    // Release the hung thread.
    drop(File::open(&scan).unwrap());
}

#[test]
fn a_detach_of_what_is_gone_is_a_success_that_changed_nothing() {
    let machine = Machine::new();
    let detachment = detach(&machine, "scsi:0:0:0:1").unwrap();
    assert!(!detachment.changed);
    assert_eq!(detachment.flush, None);
}

#[test]
fn a_path_that_leads_nowhere_proves_nothing() {
    let machine = Machine::new();
    let error = detach(&machine, "/dev/no-such-disk").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let error = detach(&machine, "/dev/null").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let error = detach(&machine, "sdb").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("expected scsi:"), "{error}");
}

#[test]
fn a_disk_without_a_node_is_not_deleted() {
    let machine = Machine::new();
    machine.disk("1:0:0:4", "sdb");
    machine.write("proc/self/mountinfo", "");
    let error = detach(&machine, "scsi:1:0:0:4").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady);
    assert_eq!(error.stage(), Some(Stage::Claim));
    assert!(error.to_string().contains("its node is missing"), "{error}");
    assert_eq!(machine.read("sys/devices/fake/1:0:0:4/delete"), "");
}

/// The identity page of every device here, and its name.
const PAGE_83: &[u8] = b"\0\x83\0\x0c\x01\x03\0\x08\x50\0\xc5\0\xa1\xb2\xc3\xd4";
const NAME: &str = "naa.5000c500a1b2c3d4";

#[test]
fn a_path_that_another_took_away_is_gone_in_the_receipt_of_a_detach_that_failed() {
    let machine = Machine::new();
    machine.write("proc/self/mountinfo", "");
    for (hctl, disk) in [("1:0:0:4", "sdb"), ("2:0:0:4", "sdc")] {
        machine.disk(hctl, disk);
        let page = format!("sys/devices/fake/{hctl}/vpd_pg83");
        fs::write(machine.path(&page), PAGE_83).unwrap();
    }
    // While this lock is held, the detach waits between its look at the first path and its own
    // first act.
    machine.write("run/lunbd/unit-naa-5000c500a1b2c3d4.lock", "");
    let lock = machine.path("run/lunbd/unit-naa-5000c500a1b2c3d4.lock");
    let lock = File::options().write(true).open(lock).unwrap();
    lock.lock().unwrap();
    let (entered, stages) = mpsc::channel();
    let observer = StageObserver::new(move |stage| entered.send(stage).unwrap());
    let engine = Engine::start(machine.roots()).unwrap();
    let failure = thread::scope(|scope| {
        let detach = scope.spawn(|| {
            let source: Source = "scsi:1:0:0:4".parse().unwrap();
            let request = DetachRequest::new(source).observe(observer);
            engine.detach(request, Deadline::after(Duration::from_secs(60)))
        });
        let mut locks = stages.iter().filter(|stage| *stage == Stage::Lock);
        // The first lock is of the address, and the second of the unit.
        locks.by_ref().take(2).for_each(drop);
        fs::remove_file(machine.path("sys/bus/scsi/devices/1:0:0:4")).unwrap();
        fs::remove_dir_all(machine.path("sys/devices/fake/1:0:0:4")).unwrap();
        drop(lock);
        detach.join().unwrap().unwrap_err()
    });
    assert!(failure.to_string().contains("2:0:0:4 remains"), "{failure}");
    let paths = failure.receipt.paths.iter();
    let gone: Vec<_> = paths
        .map(|path| (path.hctl.to_string(), path.gone))
        .collect();
    let expected = [("1:0:0:4", true), ("2:0:0:4", false)];
    assert_eq!(gone, expected.map(|(hctl, gone)| (hctl.to_owned(), gone)));
}

#[test]
fn a_delete_that_the_kernel_does_not_take_is_written_again_while_the_device_stands() {
    let machine = Machine::new();
    machine.write("proc/self/mountinfo", "");
    machine.disk("1:0:0:4", "sdb");
    let device = machine.path("sys/devices/fake/1:0:0:4");
    // Without a disk there is nothing to claim and to flush.
    fs::remove_dir_all(device.join("block")).unwrap();
    let (delete, state) = (device.join("delete"), device.join("state"));
    let engine = Engine::start(machine.roots()).unwrap();
    let (deleting, at_delete) = mpsc::channel();
    let observer = {
        let (delete, state) = (delete.clone(), state.clone());
        StageObserver::new(move |stage| {
            if stage == Stage::Delete {
                // An open of a socket fails with ENXIO.
                fs::remove_file(&delete).unwrap();
                drop(UnixListener::bind(&delete).unwrap());
                // The read of the state that follows blocks until this test writes.
                fs::remove_file(&state).unwrap();
                nix::unistd::mkfifo(&state, nix::sys::stat::Mode::S_IRWXU).unwrap();
                deleting.send(()).unwrap();
            }
        })
    };
    thread::scope(|scope| {
        let detach = scope.spawn(|| {
            let source: Source = "scsi:1:0:0:4".parse().unwrap();
            let request = DetachRequest::new(source).observe(observer);
            engine.detach(request, Deadline::after(LIMIT))
        });
        at_delete.recv().unwrap();
        let mut looked_at = File::options().write(true).open(&state).unwrap();
        for (attribute, text) in [(&delete, ""), (&state, "running\n")] {
            let new = device.join("new");
            fs::write(&new, text).unwrap();
            fs::rename(&new, attribute).unwrap();
        }
        looked_at.write_all(b"running\n").unwrap();
        drop(looked_at);
        while fs::read_to_string(&delete).unwrap() != "1" {
            assert!(!detach.is_finished(), "{:?}", detach.join());
            thread::yield_now();
        }
        fs::remove_file(machine.path("sys/bus/scsi/devices/1:0:0:4")).unwrap();
        fs::remove_dir_all(&device).unwrap();
        assert!(detach.join().unwrap().unwrap().changed);
    });
}

#[test]
fn a_disk_that_comes_at_the_last_moment_is_not_deleted_without_a_claim() {
    let machine = Machine::new();
    machine.write("proc/self/mountinfo", "");
    machine.disk("1:0:0:4", "sdb");
    let device = machine.path("sys/devices/fake/1:0:0:4");
    let (disk, aside) = (device.join("block"), machine.path("aside"));
    // The disk's driver is late.
    fs::rename(&disk, &aside).unwrap();
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Delete {
            fs::rename(&aside, &disk).unwrap();
        }
    });
    let engine = Engine::start(machine.roots()).unwrap();
    let source: Source = "scsi:1:0:0:4".parse().unwrap();
    let request = DetachRequest::new(source).observe(observer);
    let limit = Deadline::after(Duration::from_secs(5));
    let failure = engine.detach(request, limit).unwrap_err();
    // The next attempt found the disk and cannot claim it: it has no node here.
    assert_eq!(failure.stage(), Some(Stage::Claim), "{failure}");
    assert_eq!(machine.read("sys/devices/fake/1:0:0:4/delete"), "");
    let [path] = &failure.receipt.paths[..] else {
        panic!("{:?}", failure.receipt);
    };
    assert!(path.node.is_some() && !path.gone);
    assert_eq!(path.flush, None);
}

#[test]
fn a_detach_that_fails_when_all_is_gone_has_its_receipt() {
    let machine = Machine::new();
    // The engine cannot read whether devices of it are being removed.
    machine.write("sys/bus/scsi/devices/target9:0:0", "");
    let engine = Engine::start(machine.roots()).unwrap();
    let source: Source = "scsi:1:0:0:4".parse().unwrap();
    let request = DetachRequest::new(source).expect(NAME.parse().unwrap());
    let failure = engine.detach(request, Deadline::after(LIMIT)).unwrap_err();
    assert_eq!(failure.receipt.names, [NAME.parse().unwrap()]);
}

#[test]
fn the_loss_of_an_earlier_flush_is_reported_until_the_data_is_abandoned() {
    let machine = Machine::new();
    let mark = "run/lunbd/lost-sdq-7";
    machine.write(mark, &format!("the write failed\n{NAME}\n"));
    machine.write("run/lunbd/lost-sdr-8", "another's\nnaa.5000c500a1b2c3d5\n");
    // The names of this unit and of ours cannot be compared.
    machine.write("run/lunbd/lost-sds-9", "a third's\nt10.VENDOR_x\n");
    let engine = Engine::start(machine.roots()).unwrap();
    let source: Source = "scsi:1:0:0:4".parse().unwrap();
    let request = || DetachRequest::new(source.clone()).expect(NAME.parse().unwrap());
    let detach = |request| engine.detach(request, Deadline::after(LIMIT)).unwrap();
    let note = "an earlier flush failed: the write failed";
    for request in [request(), request().abandon_unwritten()] {
        let detached = detach(request);
        assert!(!detached.safe_to_unmap);
        assert_eq!(detached.receipt.unwrap().notes, [note]);
    }
    assert!(detach(request()).safe_to_unmap);
    assert!(!machine.path(mark).exists());
    assert!(machine.path("run/lunbd/lost-sdr-8").exists());
    assert!(machine.path("run/lunbd/lost-sds-9").exists());
}
