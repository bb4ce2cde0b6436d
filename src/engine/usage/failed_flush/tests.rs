use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::note::FILE_SIZE;
use super::*;

#[test]
fn a_reason_that_is_longer_than_the_room_is_cut_between_two_characters() {
    let note = Note {
        why: format!("a{}", "é".repeat(FILE_SIZE)),
        connection: Some("7 id".to_owned()),
        names: Vec::new(),
    };
    let text = String::from_utf8(note.padded()).unwrap();
    assert_eq!(text.len(), FILE_SIZE);
    assert!(text.starts_with("aé"), "{text}");
    let read = Note::parse(&text);
    assert_eq!(read.connection.as_deref(), Some("7 id"));
}

#[test]
fn a_loss_of_one_connection_of_an_nbd_device_is_none_of_the_next_one() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let dir = roots.sysfs.join("block/nbd0");
    fs::create_dir_all(&dir).unwrap();
    let show = |attribute: &str, text: &str| fs::write(dir.join(attribute), text).unwrap();
    let connect = |pid: &str, backend: &str| {
        show("pid", pid);
        show("backend", backend);
    };
    show("dev", "43:0\n");
    show("diskseq", "7\n");
    connect("1\n", "ours\n");
    let disk = BlockDevice::at(&dir).unwrap().unwrap();
    let mark = FailedFlush::of(&roots, &disk).unwrap();
    let loss = || mark.read().unwrap();
    mark.set(&Error::new(ErrorKind::Io, "no"));
    assert_eq!(loss().as_deref(), Some("no"));
    // Another tool disconnects it, and connects another server.
    for (pid, backend) in [("2\n", "ours\n"), ("1\n", "another\n"), ("1\n", "\n")] {
        connect(pid, backend);
        assert_eq!(loss(), None, "{pid}{backend}");
        assert!(!FailedFlush::is_under_way(&roots, &disk).unwrap());
    }
    fs::remove_file(dir.join("backend")).unwrap();
    assert_eq!(loss(), None, "an ioctl connected it");
    connect("1\n", "ours\n");
    assert_eq!(loss().as_deref(), Some("no"));
    // The process of a flush of an earlier connection was killed.
    let flush = mark.clone().begin().unwrap();
    assert!(!flush.removes_mark);
    drop(flush);
    connect("2\n", "another\n");
    let flush = mark.clone().begin().unwrap();
    flush.mark_as_unseen().unwrap();
    std::mem::forget(flush);
    assert!(mark.clone().begin().unwrap().unseen().is_some());
    // A client may give no id.
    connect("3\n", "\n");
    let flush = mark.clone().begin().unwrap();
    assert_eq!(flush.unseen(), None);
    flush.run(|_| true, |_| Ok(())).unwrap();
    assert!(!mark.path.exists());
    mark.set(&Error::new(ErrorKind::Io, "no"));
    assert_eq!(loss().as_deref(), Some("no"));
}

#[test]
fn a_mark_of_an_nbd_device_that_names_no_connection_counts_for_each() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let dir = roots.sysfs.join("block/nbd0");
    fs::create_dir_all(&dir).unwrap();
    for (attribute, text) in [("dev", "43:0\n"), ("diskseq", "7\n"), ("pid", "1\n")] {
        fs::write(dir.join(attribute), text).unwrap();
    }
    let disk = BlockDevice::at(&dir).unwrap().unwrap();
    let mark = FailedFlush::of(&roots, &disk).unwrap();
    // Linux before 5.14 shows no backend id, and may show another thread after its end.
    mark.set(&Error::new(ErrorKind::Io, "no"));
    fs::write(dir.join("pid"), "2\n").unwrap();
    assert_eq!(mark.read().unwrap().as_deref(), Some("no"));
    // An earlier version has written this.
    fs::write(dir.join("backend"), "ours\n").unwrap();
    fs::write(&mark.path, "no\n\n\n").unwrap();
    assert_eq!(mark.read().unwrap().as_deref(), Some("no"));
}

fn disk(roots: &Roots) -> BlockDevice {
    let dir = roots.sysfs.join("block/sda");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("dev"), "8:0\n").unwrap();
    fs::write(dir.join("diskseq"), "7\n").unwrap();
    BlockDevice::at(&dir).unwrap().unwrap()
}

#[test]
fn the_end_of_another_flush_takes_no_mark_of_a_flush_that_begins() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let mark = FailedFlush::of(&roots, &disk(&roots)).unwrap();
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                purge_stale(&roots, &[], LossMarks::Remove);
            }
        });
        let begun: Vec<Result<bool>> = (0..2000)
            .map(|_| mark.clone().begin().map(|flush| flush.removes_mark))
            .collect();
        has_ended.store(true, Ordering::Relaxed);
        assert!(begun.into_iter().all(Result::unwrap));
    });
}

#[test]
fn an_empty_mark_is_that_of_a_flush_that_has_not_begun() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let mark = FailedFlush::of(&roots, &disk(&roots)).unwrap();
    fs::create_dir_all(mark.path.parent().unwrap()).unwrap();
    fs::write(&mark.path, "").unwrap();
    assert_eq!(mark.read().unwrap(), None);
    let flush = mark.clone().begin().unwrap();
    assert!(flush.removes_mark);
    assert_eq!(fs::metadata(&mark.path).unwrap().len(), 4096);
    assert_eq!(mark.read().unwrap(), None);
    drop(flush);
    assert!(!mark.path.exists());
}

#[test]
fn a_flush_whose_thread_panics_may_have_failed() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let mark = FailedFlush::of(&roots, &disk(&roots)).unwrap();
    let flush = mark.clone().begin().unwrap();
    let run = || flush.run(|_| false, |_| -> Result<()> { panic!("on purpose") });
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_err();
    assert!(mark.path.exists());
}

#[test]
fn a_flush_of_a_server_whose_process_ends_in_it_leaves_the_next_ones_without_proof() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let mark = FailedFlush::of(&roots, &disk(&roots)).unwrap();
    let first = mark.clone().begin().unwrap();
    first.mark_as_unseen().unwrap();
    // The process is killed.
    std::mem::forget(first);
    for _ in 0..2 {
        let flush = mark.clone().begin().unwrap();
        flush.mark_as_unseen().unwrap();
        assert!(flush.unseen().is_some());
        flush.run(|_| true, |_| Ok(())).unwrap();
        assert_eq!(mark.read().unwrap(), None);
    }
    mark.clear();
    let flush = mark.clone().begin().unwrap();
    assert_eq!(flush.unseen(), None);
    flush.mark_as_unseen().unwrap();
    flush.run(|_| true, |_| Ok(())).unwrap();
    assert!(!mark.path.exists());
}

#[test]
fn a_failure_is_remembered_for_one_life_of_the_disk() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let (disk, dir) = (disk(&roots), roots.sysfs.join("block/sda"));
    let mark = || FailedFlush::of(&roots, &disk).unwrap();
    assert_eq!(mark().read().unwrap(), None);
    mark().set(&Error::new(ErrorKind::Io, "no"));
    assert_eq!(mark().read().unwrap().as_deref(), Some("no"));
    fs::write(dir.join("diskseq"), "8\n").unwrap();
    assert_eq!(mark().read().unwrap(), None);
    fs::write(dir.join("diskseq"), "7\n").unwrap();
    mark().clear();
    assert_eq!(mark().read().unwrap(), None);
    mark().set(&Error::new(ErrorKind::Io, "no"));
    purge_stale(&roots, &[], LossMarks::Keep);
    assert_eq!(mark().read().unwrap().as_deref(), Some("no"));
    let seventh = mark();
    fs::write(dir.join("diskseq"), "8\n").unwrap();
    purge_stale(&roots, &[], LossMarks::Keep);
    assert_eq!(seventh.read().unwrap(), None);
    seventh.set(&Error::new(ErrorKind::Io, "no"));
    fs::remove_dir_all(&dir).unwrap();
    purge_stale(&roots, &[], LossMarks::Keep);
    assert_eq!(seventh.read().unwrap(), None);
    // A process that dies during its flush cannot report a loss: the commands that
    // failed since then show it.
    let device = roots.sysfs.join("devices/2:0:0:1");
    fs::create_dir_all(&device).unwrap();
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("dev"), "8:0\n").unwrap();
    fs::write(dir.join("diskseq"), "9\n").unwrap();
    std::os::unix::fs::symlink(&device, dir.join("device")).unwrap();
    fs::write(device.join("ioerr_cnt"), "0x1f\n").unwrap();
    // The process is killed.
    std::mem::forget(mark().begin().unwrap());
    assert_eq!(mark().read().unwrap(), None);
    fs::write(device.join("ioerr_cnt"), "0x20\n").unwrap();
    assert!(mark().read().unwrap().unwrap().contains("31 commands"));
    drop(mark().begin().unwrap());
    assert!(
        mark().read().unwrap().is_some(),
        "what may be lost is not forgotten"
    );
    mark().clear();
    fs::remove_dir_all(&dir).unwrap();
    let gone = FailedFlush {
        path: roots.run.join("lunbd/lost-sda-7"),
        disk,
    };
    gone.set(&Error::new(ErrorKind::Io, "no"));
    assert_eq!(gone.read().unwrap(), None);
}

/// The map, or the map of a partition, with this uuid.
fn map(roots: &Roots, uuid: &str) -> BlockDevice {
    let dir = roots.sysfs.join("block/dm-0");
    fs::create_dir_all(dir.join("dm")).unwrap();
    for (file, text) in [
        ("dev", "253:0"),
        ("diskseq", "7"),
        ("dm/uuid", uuid),
        ("dm/name", "m"),
    ] {
        fs::write(dir.join(file), format!("{text}\n")).unwrap();
    }
    BlockDevice::at(&dir).unwrap().unwrap()
}

const MAP: &str = "mpath-35000c500a1b2c3d4";

#[test]
fn a_map_that_could_not_be_flushed_is_so_until_a_flush_succeeds_or_fails() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let mark = FailedFlush::of(&roots, &map(&roots, MAP)).unwrap();
    mark.set_unflushed();
    assert_eq!(mark.read().unwrap(), None, "a later flush is a proof");
    assert!(!FailedFlush::is_under_way(&roots, &mark.disk).unwrap());
    let flush = |ended: Result<()>| {
        let flush = mark.clone().begin().unwrap();
        let _ended = flush.run(|error| error.kind() == ErrorKind::Io, |_| ended);
        mark.note().unwrap().map(|note| note.why)
    };
    let error = |kind| Err(Error::new(kind, "no"));
    let still = flush(error(ErrorKind::NotPermitted));
    assert_eq!(still.as_deref(), Some(UNFLUSHED));
    assert_eq!(flush(Ok(())), None);
    mark.set_unflushed();
    assert_eq!(flush(error(ErrorKind::Io)).as_deref(), Some("no"));
    mark.set_unflushed();
    assert_eq!(mark.read().unwrap().as_deref(), Some("no"));
}

#[test]
fn a_path_that_goes_before_a_flush_of_the_units_cache_may_have_lost_data() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let mark = FailedFlush::of(&roots, &disk(&roots)).unwrap();
    mark.set_cache_unflushed();
    assert_eq!(mark.read().unwrap(), None, "a later flush is a proof");
    assert!(!FailedFlush::is_under_way(&roots, &mark.disk).unwrap());
    let flush = mark.clone().begin().unwrap();
    flush.run(|_| true, |_| Ok(())).unwrap();
    assert!(mark.path.exists(), "the caller may have written pages only");
    mark.clear_cache_unflushed();
    assert!(!mark.path.exists());
    // The caller has given up a flush, which ends later.
    let late = mark.clone().begin().unwrap();
    mark.set_cache_unflushed();
    late.run(|_| true, |_| Ok(())).unwrap();
    assert!(mark.path.exists());
    mark.clear_unless_cache_unflushed();
    assert!(mark.path.exists());
    let why = mark.note().unwrap().unwrap();
    let said = "sda went away and may not have been flushed: no path flushed";
    assert!(why.loss("sda").starts_with(said), "{}", why.loss("sda"));
    mark.clear();
    mark.set(&Error::new(ErrorKind::Io, "no"));
    mark.set_cache_unflushed();
    assert_eq!(mark.read().unwrap().as_deref(), Some("no"));
    mark.clear_unless_cache_unflushed();
    assert!(
        !mark.path.exists(),
        "the detach that removed it reported it"
    );
}

#[test]
fn a_flush_of_the_units_cache_ends_only_the_doubt_about_data_that_was_in_it() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let mark = FailedFlush::of(&roots, &map(&roots, MAP)).unwrap();
    let is_kept_after_a_flush_of = |unit: &str| {
        let unit = Identity::of([unit.parse().unwrap()]);
        clear_cache_marks(&roots, &unit);
        mark.path.exists()
    };
    let (unit, other) = ("naa.5000c500a1b2c3d4", "naa.5000c500a1b2c3d5");
    mark.set_unflushed();
    assert!(is_kept_after_a_flush_of(unit));
    mark.set_cache_unflushed();
    assert!(is_kept_after_a_flush_of(other));
    assert!(!is_kept_after_a_flush_of(unit));
}

#[test]
fn a_map_that_goes_before_it_could_be_flushed_may_have_lost_data() {
    for uuid in [MAP, "part1-mpath-35000c500a1b2c3d4"] {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let mark = FailedFlush::of(&roots, &map(&roots, uuid)).unwrap();
        mark.set_unflushed();
        let unit = ["naa.5000c500a1b2c3d4".parse().unwrap()];
        let other = ["naa.5000c500a1b2c3d5".parse().unwrap()];
        assert_eq!(purge_stale(&roots, &unit, LossMarks::Keep), [""; 0]);
        fs::remove_dir_all(mark.disk.dir()).unwrap();
        assert_eq!(purge_stale(&roots, &other, LossMarks::Keep), [""; 0]);
        for marks in [LossMarks::Keep, LossMarks::Remove] {
            let losses = purge_stale(&roots, &unit, marks);
            let [loss] = &*losses else {
                panic!("{uuid}: {losses:?}");
            };
            let said = "dm-0 went away and may not have been flushed";
            assert!(loss.starts_with(said), "{uuid}: {loss}");
        }
        assert!(!mark.path.exists(), "{uuid}");
    }
}
