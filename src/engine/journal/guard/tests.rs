use std::fs;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::*;
use crate::engine::{AttachRequest, Engine};
use crate::id::Source;
use crate::kernel::Roots;

fn record(volume: &str) -> Record {
    let source: Source = "scsi:1:0:0:1".parse().unwrap();
    Record {
        volume: volume.parse().unwrap(),
        spec: VolumeSpec::of(&AttachRequest::new(source)),
        intent: None,
        outcome: None,
        boot: None,
        detached: None,
    }
}

fn detached(sequence: u64) -> Detached {
    Detached {
        safe_to_unmap: true,
        not_looked_at: Vec::new(),
        at: String::new(),
        sequence,
    }
}

#[test]
fn a_detach_beyond_the_kept_1024_removes_the_oldest_record_and_the_journal_still_works() {
    let root = tempfile::tempdir().unwrap();
    let engine = Engine::start(Roots::below(root.path())).unwrap();
    let deadline = Deadline::after(Duration::from_secs(30));
    let journal = engine.open_journal(deadline).unwrap();
    for number in 1..=1024 {
        let detached = Some(detached(number));
        let record = record(&format!("old-{number}"));
        let record = Record { detached, ..record };
        journal.shared.table().insert(record);
    }
    let oldest: VolumeId = "old-1".parse().unwrap();
    let file = journal.directory().join(file::name_of(&oldest));
    fs::write(&file, "").unwrap();
    let alone = journal.shared.removal.lock();
    journal.shared.remove_oldest_detached().unwrap();
    assert!(file.exists(), "another caller removes it");
    drop(alone);
    let (sender, kept) = mpsc::channel();
    let finish = move || {
        let record = record("new");
        let guard = journal.guard(&record.volume, None, deadline).unwrap();
        guard.record_detach(record, detached(0), deadline).unwrap();
        let kept = journal.detached();
        drop(journal.guard(&oldest, None, deadline).unwrap());
        sender.send(kept).unwrap();
    };
    // A journal that is locked for ever must not hold the test.
    thread::spawn(finish);
    let kept = kept.recv_timeout(Duration::from_secs(20)).expect("an end");
    assert_eq!(kept.len(), 1024);
    assert!(kept.iter().all(|record| record.volume.as_str() != "old-1"));
    assert!(!file.exists());
}

#[test]
fn each_proven_detach_has_a_higher_sequence_number_than_those_before_it() {
    let root = tempfile::tempdir().unwrap();
    let engine = Engine::start(Roots::below(root.path())).unwrap();
    let deadline = Deadline::after(Duration::from_secs(30));
    let journal = engine.open_journal(deadline).unwrap();
    let sequences = ["pvc-2", "pvc-1", "pvc-2"].map(|volume| {
        let record = record(volume);
        let volume = record.volume.clone();
        let guard = journal.guard(&volume, None, deadline).unwrap();
        guard.record_detach(record, detached(0), deadline).unwrap();
        journal.detached_as(&volume).unwrap().sequence
    });
    assert_eq!(sequences, [1, 2, 3]);
}

#[test]
fn a_unit_is_claimed_once_also_by_callers_that_continue_what_their_records_say() {
    let root = tempfile::tempdir().unwrap();
    let engine = Engine::start(Roots::below(root.path())).unwrap();
    let deadline = Deadline::after(Duration::from_secs(30));
    let journal = engine.open_journal(deadline).unwrap();
    let turns = [1, 2].map(|lun| {
        let volume: VolumeId = format!("pvc-{lun}").parse().unwrap();
        let source: Source = format!("scsi:{lun}:0:0:1").parse().unwrap();
        let record = Record {
            volume: volume.clone(),
            spec: VolumeSpec::of(&AttachRequest::new(source)),
            intent: None,
            outcome: None,
            boot: None,
            detached: None,
        };
        let guard = journal.guard(&volume, None, deadline).unwrap();
        guard.write(record, deadline).unwrap();
        guard
    });
    let identity = Identity {
        names: vec!["naa.5000c500a1b2c3d4".parse().unwrap()],
        ..Identity::default()
    };
    turns[0].claim_unit(&identity, &[]).unwrap();
    let error = turns[1].claim_unit(&identity, &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(error.to_string().contains("pvc-1"), "{error}");
}
