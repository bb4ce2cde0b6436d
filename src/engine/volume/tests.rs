use std::fs;
use std::time::Duration;

use super::*;
use crate::engine::detach::Detachment;
use crate::engine::detach::receipt::DetachFailure;
use crate::engine::journal::Outcome;
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::timing::StageObserver;
use crate::engine::volume::detach::detach_guarded;
use crate::engine::volume::devices_at_sources::is_renumbered;
use crate::id::{Hctl, Source, Wwid};
use crate::kernel::Roots;

const ADDRESS: &str = "1:0:0:4";
const NAME: &str = "naa.5000c500a1b2c3d4";

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// A machine with nothing but the journal of one volume.
struct Node {
    engine: Engine,
    journal: Journal,
    volume: VolumeId,
    _root: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let journal = engine.open_journal(soon()).unwrap();
        Self {
            engine,
            journal,
            volume: "pvc-1".parse().unwrap(),
            _root: root,
        }
    }

    /// The record of an unfinished attach of the unit [`NAME`] at [`ADDRESS`].
    fn begun(&self) -> Record {
        let source: Source = format!("scsi:{ADDRESS}").parse().unwrap();
        Record {
            volume: self.volume.clone(),
            spec: VolumeSpec::of(&AttachRequest::new(source).expect(NAME.parse().unwrap())),
            intent: Some(Intent::now(Operation::Attach)),
            outcome: None,
            boot: None,
            detached: None,
        }
    }

    /// The same record after an earlier attach had finished.
    fn attached_before(&self) -> Record {
        let outcome = Outcome {
            node: "/dev/sdb".into(),
            devno: "8:16".parse().unwrap(),
            diskseq: None,
            size: 1 << 20,
            names: vec![NAME.parse().unwrap()],
            map: None,
            nbd_index: None,
            content: None,
            tls: None,
            at: Intent::now(Operation::Attach).begun_at,
        };
        Record {
            outcome: Some(outcome),
            ..self.begun()
        }
    }

    fn write(&self, record: &Record) {
        let guard = self.journal.guard(&self.volume, Some(&record.spec), soon());
        guard.unwrap().write(record.clone(), soon()).unwrap();
    }

    fn detach(&self, deadline: Deadline) -> Result<Detachment, DetachFailure> {
        let how = DetachVolume::default();
        self.engine
            .detach_volume(&self.journal, &self.volume, &how, deadline)
    }
}

#[test]
fn a_record_says_in_which_boot_it_was_begun_and_keeps_that_until_it_is_begun_anew() {
    let root = tempfile::tempdir().unwrap();
    let boot = root.path().join("proc/sys/kernel/random/boot_id");
    fs::create_dir_all(boot.parent().unwrap()).unwrap();
    let volume: VolumeId = "pvc-1".parse().unwrap();
    let record = Node::new().begun();
    for (now, written) in [("first\n", "first"), ("second\n", "first")] {
        fs::write(&boot, now).unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let journal = engine.open_journal(soon()).unwrap();
        let guard = journal.guard(&volume, None, soon()).unwrap();
        let again = guard.record().unwrap_or(record.clone());
        guard.write(again, soon()).unwrap();
        let read = journal.record(&volume).unwrap();
        assert_eq!(read.boot.as_deref(), Some(written));
        let place = &read.spec.sources[0];
        assert!(
            !is_renumbered(&engine, &read, place),
            "its unit has a unique name"
        );
        let mut nameless = read.clone();
        nameless.spec.expect = None;
        assert_eq!(is_renumbered(&engine, &nameless, place), now != "first\n");
    }
}

#[test]
fn a_resize_leaves_what_was_begun_before_it_to_its_end() {
    let node = Node::new();
    let record = node.begun();
    node.write(&record);
    let resized = node
        .engine
        .resize_volume(&node.journal, &node.volume, None, soon());
    let error = resized.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert_eq!(node.journal.record(&node.volume), Some(record));
}

#[test]
fn a_detach_waits_for_a_running_scan_that_may_add_its_device() {
    let node = Node::new();
    let hctl: Hctl = ADDRESS.parse().unwrap();
    // No device has the name yet, and the detach looks at the address too.
    for record in [node.begun(), node.attached_before()] {
        node.write(&record);
        let roots = node.engine.roots();
        let scan = DeviceLock::share(roots, &DeviceLock::of_scan(hctl), soon()).unwrap();
        let failure = node.detach(Deadline::after(Duration::from_secs(3)));
        let failure = failure.unwrap_err();
        assert_eq!(failure.stage(), Some(Stage::Lock), "{failure}");
        assert!(failure.to_string().contains("scan-1:0:0:4"), "{failure}");
        assert!(node.journal.record(&node.volume).is_some());
        drop(scan);
        node.detach(soon()).unwrap();
        assert_eq!(node.journal.records(), []);
    }
}

#[test]
fn a_record_that_cannot_be_removed_leaves_the_receipt_of_what_was_taken_down() {
    let node = Node::new();
    let record = node.begun();
    let guard = node.journal.guard(&node.volume, Some(&record.spec), soon());
    let directory = node.journal.directory().to_owned();
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Lock {
            for entry in fs::read_dir(&directory).unwrap() {
                let path = entry.unwrap().path();
                if path.to_string_lossy().contains("pvc-1") && path.is_file() {
                    fs::remove_file(&path).unwrap();
                    fs::create_dir(&path).unwrap();
                }
            }
        }
    });
    let how = DetachVolume::default().observe(observer);
    let detached = detach_guarded(&node.engine, &guard.unwrap(), record, &how, soon());
    let failure = detached.unwrap_err();
    assert_eq!(failure.stage(), Some(Stage::Journal), "{failure}");
    let name: Wwid = NAME.parse().unwrap();
    assert_eq!(failure.receipt.names, [name]);
}

/// A sync that fails, as on a broken disk.
fn no_sync(directory: &std::path::Path) -> Result<()> {
    let error = std::io::Error::from_raw_os_error(nix::libc::EIO);
    Err(Error::io("cannot write back", directory, &error))
}

#[test]
fn a_detach_or_attach_whose_beginning_is_not_on_the_disk_is_refused_and_never_finished() {
    let mut node = Node::new();
    let attached = Record {
        intent: None,
        ..node.attached_before()
    };
    node.write(&attached);
    let attached = node.journal.record(&node.volume).unwrap();
    node.journal = node.journal.with_sync(no_sync);
    let file = node.journal.directory().join("pvc-1.json");
    let on_disk = || Record::parse(&fs::read(&file).unwrap()).unwrap();
    let refused = node.detach(soon()).unwrap_err();
    assert_eq!(refused.stage(), Some(Stage::Journal), "{refused}");
    assert_eq!(node.journal.record(&node.volume).unwrap(), attached);
    assert_eq!(on_disk(), attached);

    let request = attached.spec.request().unwrap();
    let other: VolumeId = "pvc-2".parse().unwrap();
    let request =
        AttachRequest::new("scsi:1:0:0:5".parse::<Source>().unwrap()).multipath(request.multipath);
    let refused = node
        .engine
        .attach_volume(&node.journal, &other, &request, soon());
    let refused = refused.unwrap_err();
    assert_eq!(refused.stage(), Some(Stage::Journal), "{refused}");
    assert_eq!(node.journal.record(&other), None);
    assert!(!file.with_file_name("pvc-2.json").exists());
}

#[test]
fn a_removed_record_counts_as_gone_also_if_its_directory_was_not_synced() {
    let mut node = Node::new();
    node.write(&node.begun());
    node.journal = node.journal.with_sync(no_sync);
    let guard = node.journal.guard(&node.volume, None, soon()).unwrap();
    let failed = guard.remove(soon()).unwrap_err();
    assert_eq!(failed.stage(), Some(Stage::Journal), "{failed}");
    assert_eq!(node.journal.records(), []);
    assert!(!node.journal.directory().join("pvc-1.json").exists());
}

#[test]
fn a_restored_record_without_a_boot_does_not_belong_to_this_boot() {
    let root = tempfile::tempdir().unwrap();
    let boot = root.path().join("proc/sys/kernel/random/boot_id");
    fs::create_dir_all(boot.parent().unwrap()).unwrap();
    fs::write(boot, "this\n").unwrap();
    let engine = Engine::start(Roots::below(root.path())).unwrap();
    let journal = engine.open_journal(soon()).unwrap();
    let mut record = Node::new().begun();
    record.spec.expect = None;
    let aside = "pvc-1.json.set-aside-0";
    let bytes = Record::seal(&serde_json::to_vec(&record).unwrap());
    fs::write(journal.directory().join(aside), bytes).unwrap();
    let restored = journal.restore(aside.as_ref(), soon()).unwrap();
    assert_eq!(journal.record(&restored.volume).as_ref(), Some(&restored));
    assert!(is_renumbered(&engine, &restored, &restored.spec.sources[0]));
}

#[test]
fn a_unit_that_two_records_claim_is_detached_for_neither() {
    let node = Node::new();
    let record = node.attached_before();
    let other = Record {
        volume: "pvc-2".parse().unwrap(),
        ..record.clone()
    };
    for record in [record, other] {
        let guard = node.journal.guard(&record.volume, None, soon());
        guard.unwrap().write(record, soon()).unwrap();
    }
    let failure = node.detach(soon()).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse);
    let text = failure.to_string();
    assert!(text.contains("pvc-1") && text.contains("pvc-2"), "{text}");
}
