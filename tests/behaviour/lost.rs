//! Devices that another process removes or puts offline in the middle of a call.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lunbd::engine::{Flush, ReapRequest, StageObserver};
use lunbd::error::Stage;
use lunbd::kernel::OpenMode;
use lunbd::{AttachRequest, Deadline, DetachRequest, Engine, ErrorKind, Source};

use super::machine::{
    Machine, attach, delete, detach, device_dir, devices, disk_of, scan, unit, write_attribute,
};

/// Panics unless the target has stored the data of the last [`Machine::write`].
fn require_stored<M: Machine>(machine: &M, engine: &Engine, when: &str) {
    let other = unit(machine.hosts()[0], 0);
    let node = attach(engine, &other).node;
    assert!(machine.has_stored(&node), "the data is lost: {when}");
    detach(engine, &other).unwrap();
}

const NONE: [&str; 0] = [];

/// Half of a call's deadline; no call may come near it.
const LIMIT: Duration = Duration::from_secs(60);

/// All stages of an attach, in order.
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

/// Acts once, when the call enters a stage for the nth time. The number counts the acts.
fn at(
    (stage, nth): (Stage, usize),
    act: impl Fn() + Send + Sync + 'static,
) -> (Arc<AtomicUsize>, StageObserver) {
    let (entered, acted) = (AtomicUsize::new(0), Arc::<AtomicUsize>::default());
    let counted = Arc::clone(&acted);
    let observer = StageObserver::new(move |now| {
        if now == stage && entered.fetch_add(1, Ordering::Relaxed) + 1 == nth {
            counted.fetch_add(1, Ordering::Relaxed);
            act();
        }
    });
    (acted, observer)
}

/// Whether it acted exactly once. A stage that was never entered shows nothing.
fn once(acted: &AtomicUsize) -> bool {
    acted.load(Ordering::Relaxed) == 1
}

fn attach_with(
    engine: &Engine,
    source: &Source,
    observer: StageObserver,
) -> lunbd::Result<lunbd::Attachment> {
    let request = AttachRequest::new(source.clone()).observe(observer);
    let start = Instant::now();
    let result = engine.attach(&request, Deadline::after(2 * LIMIT));
    let took = start.elapsed();
    assert!(took < LIMIT, "{took:?}: {result:?}");
    result
}

pub(crate) fn a_device_deleted_at_any_stage_of_its_attach_ends_in_a_live_one_or_in_nothing<
    M: Machine,
>() {
    let machine = M::with(1, 32);
    let (engine, host) = (machine.engine(), machine.hosts()[0]);
    for (lun, there_before) in [(1, false), (2, true)] {
        let source = unit(host, lun);
        for stage in OF_ATTACH {
            if there_before {
                attach(&engine, &source);
            }
            let (its, other) = (Arc::clone(&engine), source.clone());
            let (acted, observer) = at(stage, move || delete(&its, &other));
            let result = attach_with(&engine, &source, observer);
            let when = format!("there before: {there_before}, deleted at {stage:?}");
            // An existing device is not scanned, unless it went before the scan.
            let may_not_act = there_before && stage.0 == Stage::Scan;
            assert!(once(&acted) || may_not_act, "{when}");
            match result {
                Ok(attachment) => {
                    let disk = disk_of(&engine, &source).expect("a live device");
                    assert_eq!(attachment.node.file_name(), disk.file_name(), "{when}");
                    let opened = engine
                        .roots()
                        .devices
                        .open(&attachment.node, OpenMode::Shared);
                    assert_eq!(opened.unwrap().1, Some(attachment.devno), "{when}");
                    detach(&engine, &source).unwrap();
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Vanished, "{when}: {error}");
                    assert!(error.stage().is_some(), "{when}: {error}");
                    assert!(error.to_string().contains("went away"), "{when}: {error}");
                }
            }
            assert_eq!(devices(&*machine, &engine), NONE, "{when}");
        }
    }
    require_no_device_locks(&engine);
}

/// Panics if a lock file or a mark for the devices is left after a reap, which removes the
/// records of devices that another process deleted.
fn require_no_device_locks(engine: &Engine) {
    engine
        .reap(&ReapRequest::default(), Deadline::after(LIMIT))
        .unwrap();
    let locks = engine.roots().run.join("lunbd");
    assert_eq!(fs::read_dir(locks).unwrap().count(), 0);
}

pub(crate) fn a_device_deleted_at_any_stage_of_its_detach_is_gone<M: Machine>() {
    let machine = M::with(1, 32);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 4));
    for dirty in [false, true] {
        for stage in OF_DETACH {
            let node = attach(&engine, &source).node;
            let written = Mutex::new(dirty.then(|| machine.write(&node)));
            let (its, other) = (Arc::clone(&engine), source.clone());
            let (acted, observer) = at(stage, move || {
                delete(&its, &other);
                // The detach refuses a disk that is dead and that a reader still has open.
                drop(written.lock().unwrap().take());
            });
            let request = DetachRequest::new(source.clone()).observe(observer);
            let start = Instant::now();
            let result = engine.detach(request, Deadline::after(2 * LIMIT));
            assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
            let when = format!("dirty: {dirty}, deleted at {stage:?}");
            assert!(once(&acted), "{when}");
            assert_eq!(devices(&*machine, &engine), NONE, "{when}");
            let (receipt, flush, changed) = match result {
                Ok(detachment) => {
                    let (flush, changed) = (detachment.flush, detachment.changed);
                    (detachment.receipt.unwrap(), flush, changed)
                }
                Err(failure) => {
                    // The flush of a device that is gone may fail, and then nothing more is
                    // known.
                    assert_eq!(failure.stage(), Some(Stage::Flush), "{when}: {failure}");
                    (*failure.receipt, None, true)
                }
            };
            assert!(
                receipt.paths.iter().all(|path| path.gone),
                "{when}: {receipt:?}"
            );
            // The receipt reports a flush exactly if it was done.
            let flushed = flush == Some(Flush::Done);
            assert_eq!(receipt.safe_to_unmap, flushed, "{when}: {receipt:?}");
            assert!(
                !flushed || matches!(stage.0, Stage::Flush | Stage::Delete),
                "{when}"
            );
            if dirty && flushed {
                require_stored(&*machine, &engine, &when);
            }
            assert!(flushed || !receipt.notes.is_empty(), "{when}: {receipt:?}");
            if matches!(stage.0, Stage::Claim | Stage::Flush) {
                // It depends on chance whether the claim or the flush comes before the delete.
                assert!(
                    changed || (flush.is_none() && !receipt.safe_to_unmap),
                    "{when}"
                );
            } else {
                let early = matches!(stage.0, Stage::Lock | Stage::Identify | Stage::Resolve);
                assert_eq!(changed, !early, "{when}");
            }
        }
    }
    require_no_device_locks(&engine);
}

pub(crate) fn a_device_put_offline_at_any_stage_of_its_attach_is_taken_away_again<M: Machine>() {
    let machine = M::with(1, 8);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 6));
    for stage in &OF_ATTACH[3..] {
        let state = device_dir(&engine, &source).join("state");
        let its = Arc::clone(&engine);
        let (acted, observer) = at(*stage, move || write_attribute(&its, &state, "offline\n"));
        let error = attach_with(&engine, &source, observer).unwrap_err();
        let when = format!("offline at {stage:?}: {error:#}");
        assert!(once(&acted), "{when}");
        assert_eq!(error.kind(), ErrorKind::NotReady, "{when}");
        assert!(error.to_string().contains("in state offline"), "{when}");
        assert_eq!(error.last_seen(), None, "{when}");
        assert_eq!(devices(&*machine, &engine), NONE, "{when}");
    }
}

/// Deletes the device and scans it again, so that another instance of it exists.
fn replace(engine: &Engine, source: &Source) {
    delete(engine, source);
    scan(engine, source);
}

pub(crate) fn a_device_replaced_at_any_stage_of_its_attach_is_not_taken_for_the_next_nor_the_next_taken_away<
    M: Machine,
>() {
    let machine = M::with(1, 32);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 3));
    for stage in &OF_ATTACH[3..] {
        let (its, other) = (Arc::clone(&engine), source.clone());
        let (acted, observer) = at(*stage, move || replace(&its, &other));
        let result = attach_with(&engine, &source, observer);
        let when = format!("replaced at {stage:?}: {result:?}");
        assert!(once(&acted), "{when}");
        // The new device belongs to another process, whatever the attach returned.
        let disk = disk_of(&engine, &source).expect("the next life stands");
        if let Ok(attachment) = result {
            let life = fs::read_to_string(disk.join("diskseq")).ok();
            let life = life.map(|life| life.trim().to_owned());
            assert_eq!(
                attachment.diskseq.map(|life| life.to_string()),
                life,
                "{when}"
            );
        }
        machine.settle();
        delete(&engine, &source);
    }
}

pub(crate) fn a_device_replaced_by_another_unit_at_any_stage_of_its_detach_is_not_taken_down_for_it<
    M: Machine,
>() {
    for stage in &OF_DETACH[3..] {
        let machine = M::with(2, 8);
        let (engine, source) = (machine.engine(), unit(machine.hosts()[1], 5));
        attach(&engine, &source);
        let (array, its, other) = (Arc::clone(&machine), Arc::clone(&engine), source.clone());
        let (acted, observer) = at(*stage, move || {
            delete(&its, &other);
            array.give_to_others();
            replace(&its, &other);
        });
        let request = DetachRequest::new(source.clone()).observe(observer);
        let start = Instant::now();
        let result = engine.detach(request, Deadline::after(2 * LIMIT));
        let when = format!("replaced at {stage:?}: {result:?}");
        assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
        assert!(once(&acted), "{when}");
        let stands = device_dir(&engine, &source).exists();
        assert!(stands, "another unit's device was deleted: {when}");
        let receipt = match result {
            Ok(detachment) => detachment.receipt.unwrap(),
            Err(failure) => *failure.receipt,
        };
        assert!(receipt.paths.iter().all(|path| path.gone), "{receipt:?}");
        machine.settle();
        delete(&engine, &source);
    }
}

pub(crate) fn a_device_put_offline_at_any_stage_of_its_detach_is_never_said_to_be_flushed<
    M: Machine,
>() {
    let machine = M::with(1, 8);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 7));
    for stage in OF_DETACH {
        let node = attach(&engine, &source).node;
        let written = Mutex::new(Some(machine.write(&node)));
        let state = device_dir(&engine, &source).join("state");
        let its = Arc::clone(&engine);
        let (acted, observer) = at(stage, move || {
            write_attribute(&its, &state, "offline\n");
            // The detach refuses a disk that is dead and that a reader still has open.
            drop(written.lock().unwrap().take());
        });
        let request = DetachRequest::new(source.clone()).observe(observer);
        let start = Instant::now();
        let result = engine.detach(request, Deadline::after(2 * LIMIT));
        let when = format!("offline at {stage:?}: {result:?}");
        assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
        assert!(once(&acted), "{when}");
        match result {
            Ok(detachment) => {
                let flushed = detachment.flush == Some(Flush::Done);
                assert!(!flushed || stage.0 == Stage::Delete, "{when}");
                assert_eq!(detachment.safe_to_unmap, flushed, "{when}");
                if flushed {
                    require_stored(&*machine, &engine, &when);
                }
            }
            Err(failure) => {
                assert_eq!(failure.stage(), Some(Stage::Flush), "{when}");
                assert!(failure.to_string().contains("offline"), "{when}");
                assert!(!failure.receipt.safe_to_unmap, "{when}");
                // A failed flush stops the delete.
                assert_eq!(devices(&*machine, &engine).len(), 1, "{when}");
                detach(&engine, &source).unwrap();
            }
        }
        assert_eq!(devices(&*machine, &engine), NONE, "{when}");
    }
}
