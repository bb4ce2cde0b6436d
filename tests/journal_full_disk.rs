//! A disk without room for the journal. This is a separate program, because the limit that
//! imitates the full disk is the whole process's.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

#[expect(dead_code, reason = "other tests use the rest")]
mod machine;

use std::fs;
use std::time::Duration;

use lunbd::engine::DetachVolume;
use lunbd::engine::journal::Record;
use lunbd::error::Stage;
use lunbd::{AttachRequest, Deadline, Engine, Source};
use machine::Machine;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};

/// Runs `act` while no file may grow (`RLIMIT_FSIZE`): a write fails with `EFBIG`, as it does
/// with `ENOSPC` on a full disk, once the signal that comes with it is blocked.
/// A file system that is full for real is in `vm-tests/`.
fn on_a_full_disk<T>(act: impl FnOnce() -> T) -> T {
    let mut signal = SigSet::empty();
    signal.add(Signal::SIGXFSZ);
    signal.thread_block().unwrap();
    let (soft, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, 64, hard).unwrap();
    let done = act();
    setrlimit(Resource::RLIMIT_FSIZE, soft, hard).unwrap();
    done
}

#[test]
fn an_attach_that_cannot_be_written_down_is_refused_before_the_scan() {
    let machine = Machine::new();
    machine.host(0);
    let engine = Engine::start(machine.roots()).unwrap();
    let deadline = || Deadline::after(Duration::from_secs(30));
    let journal = engine.open_journal(deadline()).unwrap();
    let source: Source = "scsi:0:0:0:1".parse().unwrap();
    let request = AttachRequest::new(source);
    let volume = "pvc-1".parse().unwrap();
    let scan = "sys/class/scsi_host/host0/scan";

    let attach = || engine.attach_volume(&journal, &volume, &request, deadline());
    let refused = on_a_full_disk(attach);
    let error = refused.unwrap_err();
    assert_eq!(error.stage(), Some(Stage::Journal), "{error}");
    assert_eq!(
        error.errno(),
        Some(nix::errno::Errno::EFBIG as i32),
        "{error}"
    );
    assert_eq!(machine.read(scan), "");
    assert_eq!(journal.records(), []);
    let files = fs::read_dir(journal.directory()).unwrap();
    assert_eq!(files.count(), 1, "the lock alone");

    assert_eq!(attach().unwrap_err().stage(), Some(Stage::Scan));
    assert_eq!(machine.read(scan), "0 0 1");

    // An existing record stays complete if there is no room for its successor.
    drop(journal);
    let below = "run/lunbd/journal/pvc-1.json";
    let body = r#"{"volume":"pvc-1","spec":{"sources":["scsi:0:0:0:1"],"expect":null,
        "min_paths":1,"multipath":"off","nbd":null},"intent":null,"outcome":null}"#;
    fs::write(machine.path(below), Record::seal(body.as_bytes())).unwrap();
    let journal = engine.open_journal(deadline()).unwrap();
    let before = (machine.read(below), journal.records());
    assert_eq!(before.1.len(), 1);
    let how = DetachVolume::default();
    let detach = || engine.detach_volume(&journal, &volume, &how, deadline());
    let refused = on_a_full_disk(detach).unwrap_err();
    assert_eq!(refused.stage(), Some(Stage::Journal), "{refused}");
    assert_eq!((machine.read(below), journal.records()), before);
    assert!(!detach().unwrap().changed);
    assert_eq!(journal.records(), []);
    assert!(detach().unwrap().detached_at.is_some());
    // A detach whose result has no room removes its record.
    journal.forget(&volume, deadline()).unwrap();
    assert!(!machine.path(below).exists());
}
