//! A device that somebody else deletes, replaces or puts offline while an attach
//! or a detach is at each of its stages.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test panics to fail, and prints what it saw"
)]

use std::fs;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lunbd::engine::{Flush, StageObserver};
use lunbd::error::Stage;
use lunbd::{AttachRequest, Deadline, DetachRequest, Engine, ErrorKind};
use vm_tests::guest::agent::{attach, detach, engine, soon, unit};
use vm_tests::guest::{self, ScsiDebug};

/// Half of what a call is given: none may come near it.
const LIMIT: Duration = Duration::from_secs(60);

/// Acts once, as the call enters `stage` for the `nth` time.
fn at(stage: Stage, nth: usize, act: impl Fn() + Send + Sync + 'static) -> StageObserver {
    let entered = AtomicUsize::new(0);
    StageObserver::new(move |now| {
        if now == stage && entered.fetch_add(1, Ordering::Relaxed) + 1 == nth {
            act();
        }
    })
}

/// Deletes it, if it is there, and returns when it is gone.
fn delete(device: &Path) {
    // The link of the bus goes before the disk does.
    let dir = fs::canonicalize(device);
    let _not_there = fs::write(device.join("delete"), "1");
    guest::wait_until("the device to be gone", LIMIT, || {
        let stands = device.exists() || dir.as_ref().is_ok_and(|dir| dir.exists());
        (!stands).then_some(())
    });
}

/// Deletes it and scans it again, so that another life of it is there.
fn replace(device: &Path, host: u32, lun: u64) {
    delete(device);
    ScsiDebug::scan_on(host, &format!("0 0 {lun}"));
    guest::wait_until("the next life's disk", LIMIT, || {
        ScsiDebug::disk_on(host, lun)
    });
}

/// All that an engine goes through, in the order in which an attach enters it.
const OF_ATTACH: [(Stage, usize); 8] = [
    (Stage::Resolve, 1),
    (Stage::Lock, 1),
    (Stage::Scan, 1),
    (Stage::Probe, 1),
    (Stage::Identify, 1),
    (Stage::Lock, 2),
    (Stage::Settle, 1),
    (Stage::Map, 1),
];

const OF_DETACH: [(Stage, usize); 7] = [
    (Stage::Lock, 1),
    (Stage::Identify, 1),
    (Stage::Lock, 2),
    (Stage::Resolve, 2),
    (Stage::Claim, 1),
    (Stage::Flush, 1),
    (Stage::Delete, 1),
];

struct Acted(Arc<AtomicUsize>);

impl Acted {
    fn counting(act: impl Fn() + Send + Sync + 'static) -> (Self, impl Fn() + Send + Sync) {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let act = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            act();
        };
        (Self(count), act)
    }

    /// Or the stage was never entered and the test has shown nothing.
    fn once(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 1
    }
}

fn attach_with(engine: &Engine, target: &ScsiDebug, lun: u64, observer: StageObserver) -> Outcome {
    let request = AttachRequest::new(unit(target, lun)).observe(observer);
    let start = Instant::now();
    let result = engine.attach(&request, Deadline::after(2 * LIMIT));
    let took = start.elapsed();
    assert!(took < LIMIT, "{took:?}: {result:?}");
    result
}

type Outcome = lunbd::error::Result<lunbd::Attachment>;

#[test]
fn a_device_deleted_at_any_stage_of_its_attach_ends_in_a_live_one_or_in_an_error_and_nothing() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(32));
    for (lun, there_before) in [(1, false), (2, true)] {
        for (stage, nth) in OF_ATTACH {
            if there_before {
                attach(&engine, &target, lun);
            }
            let device = target.device_dir(lun);
            let (acted, act) = Acted::counting(move || delete(&device));
            let result = attach_with(&engine, &target, lun, at(stage, nth, act));
            println!("there before: {there_before}, deleted at {stage} {nth}: {result:?}");
            // What was there already is not scanned, unless it went in time.
            assert!(acted.once() || (there_before && stage == Stage::Scan));
            match result {
                Ok(attachment) => {
                    let name = target.disk(lun).expect("a live device");
                    assert_eq!(attachment.node, PathBuf::from(format!("/dev/{name}")));
                    fs::read(&attachment.node).expect("its data");
                    detach(&engine, &target, lun).unwrap();
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Vanished, "{error}");
                    assert!(error.stage().is_some(), "{error}");
                    assert!(error.to_string().contains("went away"), "{error}");
                }
            }
            assert_eq!(target.devices(), [] as [&str; 0]);
        }
    }
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
}

#[test]
fn a_device_replaced_at_any_stage_of_its_attach_is_not_taken_for_the_next_nor_the_next_taken_away()
{
    let (engine, target) = (engine(), ScsiDebug::with_luns(32));
    for (stage, nth) in &OF_ATTACH[3..] {
        let (device, host) = (target.device_dir(3), target.host());
        let (acted, act) = Acted::counting(move || replace(&device, host, 3));
        let result = attach_with(&engine, &target, 3, at(*stage, *nth, act));
        println!("replaced at {stage} {nth}: {result:?}");
        assert!(acted.once());
        // Somebody else's, whatever became of the attach.
        let name = target.disk(3).expect("the next life stands");
        if let Ok(attachment) = result {
            let seq = fs::read_to_string(format!("/sys/block/{name}/diskseq")).ok();
            let seq = seq.map(|seq| seq.trim().to_owned());
            assert_eq!(attachment.diskseq.map(|seq| seq.to_string()), seq);
        }
        guest::udevd::settle();
        delete(&target.device_dir(3));
    }
}

#[test]
fn a_device_deleted_at_any_stage_of_its_detach_is_gone_and_the_receipt_says_what_was_not_flushed() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(32));
    for dirty in [false, true] {
        for (stage, nth) in OF_DETACH {
            let node = attach(&engine, &target, 4).node;
            if dirty {
                let mut disk = OpenOptions::new().write(true).open(&node).unwrap();
                disk.write_all(&vec![0x5a; 64 << 10]).unwrap();
                drop(disk);
                guest::udevd::settle();
            }
            let device = target.device_dir(4);
            let (acted, act) = Acted::counting(move || delete(&device));
            let request = DetachRequest::new(unit(&target, 4)).observe(at(stage, nth, act));
            let start = Instant::now();
            let result = engine.detach(request, Deadline::after(2 * LIMIT));
            let took = start.elapsed();
            assert!(took < LIMIT, "{took:?}");
            assert!(acted.once());
            assert_eq!(target.devices(), [] as [&str; 0]);
            let (receipt, flush, changed) = match result {
                Ok(detachment) => {
                    let (flush, changed) = (detachment.flush, detachment.changed);
                    (detachment.receipt.unwrap(), flush, changed)
                }
                Err(failure) => {
                    // The flush of a device that is gone may fail, and then no
                    // more can be said.
                    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
                    (*failure.receipt, None, true)
                }
            };
            assert!(receipt.paths.iter().all(|path| path.gone), "{receipt:?}");
            // We flushed, or do not say so.
            let flushed = flush == Some(Flush::Done);
            assert_eq!(receipt.safe_to_unmap, flushed, "{receipt:?}");
            assert!(!flushed || matches!(stage, Stage::Flush | Stage::Delete));
            assert!(flushed || !receipt.notes.is_empty());
            println!("dirty: {dirty}, deleted at {stage} {nth}: {changed}, {flush:?}");
            let early = matches!(stage, Stage::Lock | Stage::Identify | Stage::Resolve);
            if matches!(stage, Stage::Claim | Stage::Flush) {
                // Before we had it, before our flush had begun, or under it: whether
                // we come to an end with it or find it gone is chance.
                assert!(changed || (flush.is_none() && !receipt.safe_to_unmap));
            } else {
                assert_eq!(changed, !early);
            }
        }
    }
    assert_eq!(guest::entries("/run/lunbd"), [] as [&str; 0]);
}

#[test]
fn a_device_replaced_by_another_unit_at_any_stage_of_its_detach_is_not_taken_down_for_it() {
    let engine = engine();
    let target = ScsiDebug::options().luns(8).hosts(2).load();
    let host = target.hosts()[1];
    let device = PathBuf::from(format!("/sys/bus/scsi/devices/{host}:0:0:5"));
    let source: lunbd::Source = format!("scsi:{host}:0:0:5").parse().unwrap();
    let switch = "/sys/bus/pseudo/drivers/scsi_debug/vpd_use_hostno";
    for (stage, nth) in &OF_DETACH[3..] {
        fs::write(switch, "1").unwrap();
        engine
            .attach(&AttachRequest::new(source.clone()), soon())
            .unwrap();
        let its = device.clone();
        let (acted, act) = Acted::counting(move || {
            delete(&its);
            fs::write(switch, "0").unwrap();
            replace(&its, host, 5);
        });
        let request = DetachRequest::new(source.clone()).observe(at(*stage, *nth, act));
        let start = Instant::now();
        let result = engine.detach(request, Deadline::after(2 * LIMIT));
        println!("replaced at {stage} {nth}: {result:?}");
        assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
        assert!(acted.once());
        assert!(device.exists(), "another unit's device was deleted");
        let receipt = match result {
            Ok(detachment) => detachment.receipt.unwrap(),
            Err(failure) => *failure.receipt,
        };
        assert!(receipt.paths.iter().all(|path| path.gone), "{receipt:?}");
        guest::udevd::settle();
        delete(&device);
    }
}

#[test]
fn a_device_put_offline_at_any_stage_of_its_attach_is_said_to_be_and_taken_away_again() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(8));
    for (stage, nth) in &OF_ATTACH[3..] {
        let state = target.device_dir(6).join("state");
        let (acted, act) = Acted::counting(move || fs::write(&state, "offline\n").unwrap());
        let error = attach_with(&engine, &target, 6, at(*stage, *nth, act)).unwrap_err();
        println!("offline at {stage} {nth}: {error:#}");
        assert!(acted.once());
        assert_eq!(error.kind(), ErrorKind::NotReady, "{error:#}");
        assert!(error.to_string().contains("in state offline"), "{error}");
        assert_eq!(error.last_seen(), None, "{error}");
        assert_eq!(target.devices(), [] as [&str; 0]);
    }
}

#[test]
fn a_device_put_offline_at_any_stage_of_its_detach_is_never_said_to_be_flushed() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(8));
    for (stage, nth) in OF_DETACH {
        let node = attach(&engine, &target, 7).node;
        let mut disk = OpenOptions::new().write(true).open(&node).unwrap();
        disk.write_all(&vec![0x5a; 64 << 10]).unwrap();
        drop(disk);
        guest::udevd::settle();
        let state = target.device_dir(7).join("state");
        let (acted, act) = Acted::counting(move || fs::write(&state, "offline\n").unwrap());
        let request = DetachRequest::new(unit(&target, 7)).observe(at(stage, nth, act));
        let start = Instant::now();
        let result = engine.detach(request, Deadline::after(2 * LIMIT));
        assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
        println!("offline at {stage} {nth}: {result:?}");
        assert!(acted.once());
        match result {
            Ok(detachment) => {
                let flushed = detachment.flush == Some(Flush::Done);
                assert!(!flushed || stage == Stage::Delete, "{detachment:?}");
                assert_eq!(detachment.safe_to_unmap, flushed);
            }
            Err(failure) => {
                assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
                assert!(failure.to_string().contains("offline"), "{failure}");
                assert!(!failure.receipt.safe_to_unmap);
                // A flush that failed stops the delete.
                assert_eq!(target.devices().len(), 1);
                detach(&engine, &target, 7).unwrap();
            }
        }
        assert_eq!(target.devices(), [] as [&str; 0]);
    }
}
