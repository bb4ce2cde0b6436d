//! Detaches, and rollbacks of attaches, that meet other processes, on the kernel of
//! `tests/fake_kernel`.

use std::fs::{self, File};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::fake_kernel::{Address, FakeKernel, Unit, access};
use lunbd::deadline::Cancel;
use lunbd::engine::{Flush, StageObserver};
use lunbd::error::Stage;
use lunbd::kernel::OpenMode;
use lunbd::{AttachRequest, Deadline, DetachRequest, Engine, ErrorKind, Source};

const NONE: [&str; 0] = [];

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn source() -> Source {
    "scsi:0:0:0:1".parse().unwrap()
}

/// A machine that presents one unit, as LUN 1.
fn machine() -> (FakeKernel, Arc<Engine>) {
    let fake = FakeKernel::with_hosts(1);
    present(&fake, Unit::disk(1));
    let engine = access::engine(fake.root());
    (fake, engine)
}

fn present(fake: &FakeKernel, unit: Unit) {
    fake.kernel()
        .change(|state| state.units.insert(Address::of(0, 1), unit));
}

fn attach(fake: &FakeKernel, engine: &Engine) -> lunbd::Attachment {
    let attached = engine.attach(&AttachRequest::new(source()), soon());
    fake.kernel().settle();
    attached.unwrap()
}

fn put_offline(engine: &Engine) {
    let bus = engine.roots().sysfs.join("bus/scsi/devices");
    let (devices, state) = (&engine.roots().devices, bus.join("0:0:0:1/state"));
    devices
        .write_attribute(&state, "offline\n", &|| true)
        .unwrap();
}

#[test]
fn a_detach_waits_for_another_call_on_the_unit_and_touches_nothing_meanwhile() {
    let (fake, engine) = machine();
    attach(&fake, &engine);
    let lock = fake.root().join("run/lunbd/unit-naa-5000c50000000001.lock");
    let lock = File::create(lock).unwrap();
    lock.lock().unwrap();
    let short = Deadline::after(Duration::from_secs(5));
    let failure = engine.detach(source(), short).unwrap_err();
    assert_eq!(failure.stage(), Some(Stage::Lock), "{failure}");
    assert_eq!(fake.kernel().devices(), ["0:0:0:1"]);
    drop(lock);
    assert!(engine.detach(source(), soon()).unwrap().safe_to_unmap);
}

#[test]
fn a_disk_of_another_unit_stays_while_a_process_has_it_open_only_to_read() {
    let (fake, engine) = machine();
    let disk = attach(&fake, &engine);
    let reader = fake.kernel().enter_opener(&disk.node, false);
    present(&fake, Unit::disk(2));
    let failure = engine.detach(source(), soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    let error = engine.attach(&AttachRequest::new(source()), soon());
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InUse);
    assert_eq!(fake.kernel().devices(), ["0:0:0:1"]);
    fake.kernel().leave_opener(reader);
    let flush = engine.detach(source(), soon()).unwrap().flush;
    assert!(matches!(flush, Some(Flush::Replaced(_))), "{flush:?}");
}

#[test]
fn a_path_at_which_another_unit_answered_stays_replaced_when_it_is_silent_later() {
    let (fake, engine) = machine();
    let disk = attach(&fake, &engine);
    present(&fake, Unit::disk(2));
    let devices = &engine.roots().devices;
    let (claim, _) = devices.open(&disk.node, OpenMode::Exclusive).unwrap();
    // The claim is refused once. Before the next look the disk is free, and offline.
    let claim = Mutex::new((Some(claim), false));
    let other = Arc::clone(&engine);
    let observer = StageObserver::new(move |stage| {
        let mut claim = claim.lock().unwrap();
        claim.1 |= stage == Stage::Claim;
        if stage == Stage::Resolve && claim.1 && claim.0.take().is_some() {
            put_offline(&other);
        }
    });
    let request = DetachRequest::new(source()).observe(observer);
    let detached = engine.detach(request, soon()).unwrap();
    let flush = &detached.flush;
    assert!(matches!(flush, Some(Flush::Replaced(_))), "{detached:?}");
    assert!(!detached.safe_to_unmap);
    assert_eq!(fake.kernel().devices(), NONE);
}

#[test]
fn a_failed_flush_is_reported_also_after_another_process_deleted_the_disk() {
    let (fake, engine) = machine();
    let disk = attach(&fake, &engine);
    fake.kernel().write_to(&disk.node);
    let fail = |fails| {
        let unit = Unit {
            fails_writes: fails,
            is_dirty: fails,
            ..Unit::disk(1)
        };
        present(&fake, unit);
    };
    fail(true);
    let failure = engine.detach(source(), soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::Io, "{failure}");
    fail(false);
    let delete = engine.roots().sysfs.join("bus/scsi/devices/0:0:0:1/delete");
    let devices = &engine.roots().devices;
    devices.write_attribute(&delete, "1", &|| true).unwrap();
    assert_eq!(fake.kernel().devices(), NONE);
    let name = disk.identity().unwrap().wwid().unwrap().clone();
    let request = DetachRequest::new(source()).expect(name);
    let detached = engine.detach(request, soon()).unwrap();
    assert!(!detached.safe_to_unmap, "{detached:?}");
    let notes = detached.receipt.unwrap().notes;
    assert!(notes[0].contains("an earlier flush failed"), "{notes:?}");
}

#[test]
fn a_detach_is_not_safe_while_another_process_still_removes_what_may_be_a_path_of_the_unit() {
    let (fake, engine) = machine();
    let other = Unit::disk(2);
    fake.kernel()
        .change(|state| state.units.insert(Address::of(0, 2), other));
    let other: Source = "scsi:0:0:0:2".parse().unwrap();
    engine.attach(&AttachRequest::new(other), soon()).unwrap();
    attach(&fake, &engine);
    // A device leaves the bus before its directory goes.
    let device = engine.roots().sysfs.join("bus/scsi/devices/0:0:0:2");
    let target = fs::canonicalize(device).unwrap();
    let leaving = target.parent().unwrap().join("0:0:0:5");
    fs::create_dir(&leaving).unwrap();
    let detached = engine.detach(source(), soon()).unwrap();
    assert!(!detached.safe_to_unmap, "{detached:?}");
    let notes = detached.receipt.unwrap().notes;
    assert!(notes[0].starts_with("0:0:0:5, which may be"), "{notes:?}");
    fs::remove_dir(leaving).unwrap();
    attach(&fake, &engine);
    assert!(engine.detach(source(), soon()).unwrap().safe_to_unmap);
}

/// Cancels an attach when it waits for udev, and runs `act` at this stage of its rollback.
fn roll_back(fake: &FakeKernel, engine: &Engine, at: Stage, act: fn(&FakeKernel, &Path)) {
    let cancel = Cancel::new();
    let limit = soon().cancelled_by(&cancel);
    let node = fake.root().join("dev/sda");
    let error = thread::scope(|scope| {
        let (told, stages) = std::sync::mpsc::channel();
        let (go_on, waits) = std::sync::mpsc::channel();
        let waits = Mutex::new(waits);
        let observer = StageObserver::new(move |stage| {
            told.send(stage).unwrap();
            waits.lock().unwrap().recv().unwrap();
        });
        let request = AttachRequest::new(source()).observe(observer);
        let attach = scope.spawn(move || engine.attach(&request, limit));
        let mut is_rolled_back = false;
        for stage in stages {
            if stage == Stage::Settle && !is_rolled_back {
                is_rolled_back = true;
                cancel.cancel();
            }
            if is_rolled_back && stage == at {
                act(fake, &node);
            }
            go_on.send(()).unwrap();
        }
        attach.join().unwrap().unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    let rest = error.last_seen().unwrap();
    assert!(rest.contains("open for writing in process"), "{rest}");
    assert_eq!(fake.kernel().devices(), ["0:0:0:1"]);
}

#[test]
fn a_rollback_leaves_a_disk_that_a_process_writes_to() {
    let (fake, engine) = machine();
    fake.kernel().stop_udevd(true);
    roll_back(&fake, &engine, Stage::Claim, |fake, node| {
        fake.kernel().enter_opener(node, true);
    });
}

#[test]
fn a_rollback_leaves_a_disk_to_which_a_process_begins_to_write_during_a_long_flush() {
    let (fake, engine) = machine();
    fake.kernel().stop_udevd(true);
    roll_back(&fake, &engine, Stage::Flush, |fake, node| {
        fake.kernel().enter_opener(node, true);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(200) {
            thread::park_timeout(Duration::from_millis(50));
        }
    });
}

#[cfg(feature = "journal")]
#[test]
fn a_volume_is_not_gone_while_its_disk_stands_without_a_record_of_its_first_names() {
    use lunbd::engine::DetachVolume;
    use lunbd::id::VolumeId;

    let (fake, engine) = machine();
    let journal = engine.open_journal_at(&fake.root().join("journal"), soon());
    let journal = journal.unwrap();
    let volume: VolumeId = "pvc-1".parse().unwrap();
    let request = AttachRequest::new(source());
    let attached = engine.attach_volume(&journal, &volume, &request, soon());
    let node = attached.unwrap().node;
    fake.kernel().settle();
    present(&fake, Unit::disk(2));
    let device = engine.roots().sysfs.join("bus/scsi/devices/0:0:0:1");
    let write = |file: &str| {
        let devices = &engine.roots().devices;
        devices
            .write_attribute(&device.join(file), "1", &|| true)
            .unwrap();
    };
    write("rescan");
    for file in fs::read_dir(fake.root().join("run/lunbd")).unwrap() {
        fs::remove_file(file.unwrap().path()).unwrap();
    }
    let detach = || engine.detach_volume(&journal, &volume, &DetachVolume::default(), soon());
    let failure = detach().unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::IdentityMismatch, "{failure}");
    let said = failure.to_string();
    assert!(said.contains(node.to_str().unwrap()), "{said}");
    assert_eq!(journal.records().len(), 1);
    write("delete");
    fake.kernel().settle();
    assert!(detach().unwrap().safe_to_unmap);
    assert_eq!(journal.records(), []);
}
