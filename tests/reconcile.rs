//! The reconciler on a machine that is a directory. Nothing can be attached there, so the tests
//! see what it decides, and when.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test panics to fail, and looks again and again"
)]

#[allow(dead_code, reason = "other tests use the rest of it")]
mod machine;

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use lunbd::engine::journal::{Failing, Record};
use lunbd::error::Stage;
use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Event, Events, Options, Reconciler, StepKind};
use lunbd::uevent::Message;
use lunbd::{AttachRequest, Deadline, Engine, ErrorKind, Source};
use machine::san::San;
use serde_json::json;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

fn id(text: &str) -> VolumeId {
    text.parse().unwrap()
}

fn request(source: &str) -> AttachRequest {
    AttachRequest::new(source.parse::<Source>().unwrap())
}

/// A machine with a host whose scan finds nothing, attached disks of our own on it, and their
/// journal.
struct Node {
    san: San,
    engine: Arc<Engine>,
}

impl Node {
    fn with_disks(disks: u32) -> Self {
        let mut san = San::new();
        san.machine.host(0);
        san.machine.write("run/lunbd/journal/journal.lock", "");
        for lun in 0..disks {
            let name = san.disk(0, lun, Some(lun));
            let record = json!({
                "volume": format!("pvc-{lun}"),
                "spec": {
                    "sources": [format!("scsi:0:0:0:{lun}")], "expect": null, "min_paths": 1,
                    "multipath": "prefer", "nbd": null,
                },
                "intent": null,
                "outcome": {
                    "node": format!("/dev/{name}"), "devno": format!("8:{}", lun * 16),
                    "diskseq": (lun + 1).to_string(), "size": 1_048_576,
                    "names": [format!("naa.60014051{:016x}{lun:08x}", 0)], "map": null,
                    "nbd_index": null, "at": "2026-11-21T03:00:00Z",
                },
            });
            let sealed = Record::seal(&serde_json::to_vec(&record).unwrap());
            let file = format!("run/lunbd/journal/pvc-{lun}.json");
            fs::write(san.machine.path(&file), sealed).unwrap();
        }
        let engine = Arc::new(Engine::start(san.machine.roots()).unwrap());
        Self { san, engine }
    }

    fn reconciler(&self, options: Options) -> Reconciler {
        let journal = self.engine.open_journal(soon()).unwrap();
        Reconciler::new(Arc::clone(&self.engine), journal, options.trust())
    }

    /// Removes the disk without the reconciler, as the end of a session does.
    fn lose(&self, lun: u32) {
        let link = format!("sys/bus/scsi/devices/0:0:0:{lun}");
        fs::remove_file(self.san.machine.path(&link)).unwrap();
        let name = format!("8:{}", lun * 16);
        fs::remove_file(self.san.machine.path(&format!("sys/dev/block/{name}"))).unwrap();
    }

    fn announce(&self, lun: u32) {
        let path = format!("/devices/x/host0/target0:0:0/0:0:0:{lun}/block/sda");
        let text =
            format!("remove@{path}\0ACTION=remove\0DEVPATH={path}\0SUBSYSTEM=block\0SEQNUM=1\0");
        let message = Message::parse(text.as_bytes()).unwrap();
        self.engine.hub().feed(&message);
    }
}

fn wanted(luns: std::ops::Range<u32>) -> Desired {
    let mut desired = Desired::default();
    for lun in luns {
        let request = request(&format!("scsi:0:0:0:{lun}"));
        desired.insert(id(&format!("pvc-{lun}")), &request).unwrap();
    }
    desired
}

/// Runs the reconciler during `test`, and stops it also if `test` panics.
fn while_running(reconciler: &Reconciler, test: impl FnOnce()) {
    struct Stop<'a>(&'a Reconciler);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    std::thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let stop = Stop(reconciler);
        test();
        drop(stop);
        running.join().unwrap().unwrap();
    });
}

fn next(events: &mut Events, what: impl Fn(&Event) -> bool) -> Event {
    loop {
        let event = events.next(soon()).expect("the event in time").event;
        if what(&event) {
            return event;
        }
    }
}

#[test]
fn a_disk_that_vanishes_during_a_refresh_does_not_hide_another() {
    let node = Node::with_disks(2);
    let disk = format!("sys/{}/block/sda", San::device_dir(0, 0));
    fs::remove_file(node.san.machine.path(&disk).join("size")).unwrap();
    let journal = node.engine.open_journal(soon()).unwrap();
    let found = node.engine.survey(&journal).unwrap();
    let sizes: Vec<Option<u64>> = found.iter().map(|there| there.size).collect();
    assert_eq!(sizes, [None, Some(1 << 20)]);
}

#[test]
fn a_volume_that_is_attached_as_wanted_gets_no_step() {
    let node = Node::with_disks(5);
    let reconciler = node.reconciler(Options::default());
    reconciler.set(wanted(0..5));
    let left = reconciler.apply(soon()).unwrap();
    assert!(left.is_empty(), "{left}");
    assert_eq!(reconciler.counters().steps, 0);
    let there = reconciler.wait_attached(&id("pvc-3"), soon()).unwrap();
    assert!(there.node.is_some(), "{there:?}");
}

#[test]
fn the_next_full_refresh_finds_a_device_that_vanished_without_an_event() {
    let node = Node::with_disks(2);
    let reconciler = node.reconciler(Options::default().resync(Duration::from_millis(50)));
    reconciler.set(wanted(0..2));
    let mut events = reconciler.subscribe();
    while_running(&reconciler, || {
        reconciler.wait_attached(&id("pvc-1"), soon()).unwrap();
        node.lose(1);
        let lost = next(&mut events, |event| matches!(event, Event::Lost { .. }));
        assert!(lost.to_string().contains("pvc-1"), "{lost}");
    });
}

#[test]
fn the_period_of_full_refreshes_may_be_endless() {
    let node = Node::with_disks(1);
    let reconciler = node.reconciler(Options::default().resync(Duration::MAX));
    reconciler.set(wanted(0..1));
    while_running(&reconciler, || {
        reconciler.wait_attached(&id("pvc-0"), soon()).unwrap();
    });
    assert_eq!(reconciler.counters().full_refreshes, 1);
}

#[test]
fn a_volume_that_is_no_longer_wanted_is_in_use_until_its_detach_is_proven() {
    let node = Node::with_disks(2);
    node.lose(1);
    let reconciler = node.reconciler(Options::default());
    reconciler.set(wanted(0..1));
    assert_eq!(reconciler.in_use().len(), 2);
    let left = reconciler.apply(soon()).unwrap();
    assert!(left.is_empty(), "{left}");
    assert_eq!(reconciler.in_use(), [id("pvc-0")].into());
    let mut desired = wanted(0..1);
    desired
        .insert(id("new"), &request("scsi:0:0:0:99"))
        .unwrap();
    reconciler.set(desired);
    assert!(reconciler.in_use().contains(&id("new")));
}

#[test]
fn a_volume_that_fails_delays_no_other_and_is_tried_again() {
    let node = Node::with_disks(60);
    for lun in 1..60 {
        node.lose(lun);
    }
    let retry = Duration::from_millis(20);
    let reconciler = node.reconciler(Options::default().retry(retry, retry));
    let mut desired = wanted(0..1);
    // The host's scan finds nothing.
    for lun in 200..210 {
        let volume = id(&format!("none-{lun}"));
        desired
            .insert(volume, &request(&format!("scsi:0:0:0:{lun}")))
            .unwrap();
    }
    reconciler.set(desired);
    let mut events = reconciler.subscribe();
    while_running(&reconciler, || {
        let mut detached = 0;
        while detached < 59 {
            let event = next(&mut events, |_| true);
            detached += usize::from(matches!(event, Event::Detached { .. }));
        }
        for _ in 0..30 {
            let failed = next(&mut events, |event| matches!(event, Event::Failed { .. }));
            let Event::Failed { step, next_try, .. } = &failed else {
                panic!("{failed}");
            };
            assert_eq!(*step, StepKind::Attach);
            assert!(next_try.is_some());
        }
        let volume = id("none-205");
        let limit = Deadline::after(Duration::from_millis(200));
        let error = reconciler.wait_attached(&volume, limit).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(error.stage(), Some(Stage::Converge));
        assert!(error.last_seen().is_some(), "{error}");
        let unwanted = reconciler.wait_attached(&id("pvc-7"), soon()).unwrap_err();
        assert_eq!(unwanted.kind(), ErrorKind::NotFound);
    });
}

#[test]
fn an_event_of_a_volume_causes_a_refresh_of_that_volume_alone() {
    let node = Node::with_disks(50);
    let resync = Duration::from_secs(3600);
    let reconciler = node.reconciler(Options::default().resync(resync));
    reconciler.set(wanted(0..50));
    let mut events = reconciler.subscribe();
    while_running(&reconciler, || {
        reconciler.wait_attached(&id("pvc-7"), soon()).unwrap();
        node.lose(7);
        let began = Instant::now();
        node.announce(7);
        let lost = next(&mut events, |_| true);
        println!("{lost} after {:?}", began.elapsed());
        assert!(
            matches!(lost, Event::Lost { ref volume, .. } if *volume == id("pvc-7")),
            "{lost}"
        );
        let counters = reconciler.counters();
        assert_eq!(counters.full_refreshes, 1, "{counters:?}");
        assert!(counters.partial_refreshes >= 1, "{counters:?}");
        next(
            &mut events,
            |event| matches!(event, Event::Failed { volume, .. } if *volume == id("pvc-7")),
        );
    });
}

#[test]
fn an_event_of_an_unwanted_device_does_not_wake_the_reconciler() {
    let node = Node::with_disks(3);
    let reconciler = node.reconciler(Options::default());
    reconciler.set(wanted(0..3));
    while_running(&reconciler, || {
        reconciler.wait_attached(&id("pvc-2"), soon()).unwrap();
        let before = reconciler.counters();
        for _ in 0..100 {
            node.announce(77);
        }
        // The last event is of a volume: when it has woken the loop, all events have been read.
        node.announce(1);
        while reconciler.counters().partial_refreshes == before.partial_refreshes {
            std::thread::yield_now();
        }
        let woken = reconciler.counters().wakeups - before.wakeups;
        assert!(woken <= 3, "{woken}");
    });
}

#[test]
fn only_one_thread_runs_a_reconciler() {
    let node = Node::with_disks(1);
    let reconciler = node.reconciler(Options::default());
    reconciler.set(wanted(0..1));
    while_running(&reconciler, || {
        reconciler.wait_attached(&id("pvc-0"), soon()).unwrap();
        let second = reconciler.apply(soon()).unwrap_err();
        assert_eq!(second.kind(), ErrorKind::InUse);
    });
}

#[test]
fn a_volume_that_wants_the_unit_of_another_is_refused_with_both_names_and_nothing_is_scanned() {
    let node = Node::with_disks(2);
    let reconciler = node.reconciler(Options::default());
    let mut desired = wanted(0..2);
    let unit = format!("naa.60014051{:016x}{:08x}", 0, 1);
    let request = request("scsi:0:0:0:99").expect(unit.parse().unwrap());
    desired.insert(id("second"), &request).unwrap();
    reconciler.set(desired);
    let mut events = reconciler.subscribe();
    let left = reconciler.apply(soon()).unwrap();
    let [step] = left.steps.as_slice() else {
        panic!("{left}");
    };
    assert_eq!(step.kind, StepKind::Refused);
    let refused = next(&mut events, |event| matches!(event, Event::Failed { .. }));
    for text in [left.to_string(), refused.to_string()] {
        for word in ["second", "pvc-1", &*unit] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
    assert_eq!(node.san.machine.read("sys/class/scsi_host/host0/scan"), "");
}

#[test]
fn another_process_reads_the_failing_volumes_and_their_next_try_only_while_they_fail() {
    let node = Node::with_disks(1);
    let hour = Duration::from_secs(3600);
    let reconciler = node.reconciler(Options::default().retry(hour, hour));
    let place = node.san.machine.path("run/lunbd/journal");
    let beside = || node.engine.read_journal_at(&place, soon()).unwrap().failing;
    let mut desired = wanted(0..1);
    desired
        .insert(id("none"), &request("scsi:0:0:0:99"))
        .unwrap();
    reconciler.set(desired.clone());
    let deadline = soon();
    let until = |is: &dyn Fn(&[Failing]) -> bool| loop {
        let failing = beside();
        if is(&failing) {
            return failing;
        }
        assert!(!deadline.has_passed(), "{failing:?}");
        std::thread::sleep(Duration::from_millis(5));
    };
    while_running(&reconciler, || {
        let failing = until(&|failing| !failing.is_empty());
        let [failing] = failing.as_slice() else {
            panic!("{failing:?}");
        };
        assert_eq!(
            (failing.volume.as_str(), &*failing.step),
            ("none", "attach")
        );
        assert_eq!(failing.tries, 1);
        assert!(failing.error.contains("0:0:0:99"), "{failing:?}");
        let wait = failing
            .next_try
            .unwrap()
            .duration_since(SystemTime::now())
            .unwrap();
        assert!(wait <= hour && wait > hour / 4, "{wait:?}");
        // The journal is held by another process, which is no reason to set a file aside.
        assert!(
            node.engine
                .read_journal_at(&place, soon())
                .unwrap()
                .problems
                .is_empty()
        );
        desired.remove(&id("none"));
        reconciler.set(desired.clone());
        until(&<[Failing]>::is_empty);
        desired
            .insert(id("none"), &request("scsi:0:0:0:98"))
            .unwrap();
        reconciler.set(desired);
        until(&|failing| !failing.is_empty());
    });
    assert_eq!(beside(), [], "nobody tries it any more");
    assert!(!place.join("journal.failing").exists());
}

#[test]
fn failures_that_could_not_be_published_are_published_later() {
    let node = Node::with_disks(0);
    let hour = Duration::from_secs(3600);
    let reconciler = node.reconciler(Options::default().retry(hour, hour));
    let place = node.san.machine.path("run/lunbd/journal");
    // The file cannot be written while a directory is at its place.
    let in_the_way = place.join("journal.failing.new");
    fs::create_dir(&in_the_way).unwrap();
    let mut desired = Desired::default();
    desired
        .insert(id("none"), &request("scsi:0:0:0:99"))
        .unwrap();
    reconciler.set(desired);
    let mut events = reconciler.subscribe();
    while_running(&reconciler, || {
        next(&mut events, |event| matches!(event, Event::Failed { .. }));
        // The first publication comes at once.
        std::thread::sleep(Duration::from_millis(300));
        fs::remove_dir(&in_the_way).unwrap();
        let deadline = soon();
        let failing = || node.engine.read_journal_at(&place, soon()).unwrap().failing;
        while failing().is_empty() {
            assert!(!deadline.has_passed(), "the failure was not published");
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    assert!(!place.join("journal.failing").exists());
}

#[test]
fn failures_published_by_a_dead_process_are_ignored_and_removed() {
    let node = Node::with_disks(1);
    let place = node.san.machine.path("run/lunbd/journal");
    let file = place.join("journal.failing");
    let one = json!({
        "volume": "pvc-0", "step": "attach", "error": "no", "tries": 1,
        "next_try": "2026-11-21T03:00:00Z",
    });
    let said = json!({ "version": 1, "failing": [one] }).to_string();
    let newer = said.replace("\"version\":1", "\"version\":2");
    let beside = || node.engine.read_journal_at(&place, soon()).unwrap();
    for (text, is_locked, count) in [
        (&*said, true, 1),
        (&said, false, 0),
        (&newer, true, 0),
        (&said[..said.len() / 2], true, 0),
        ("", true, 0),
    ] {
        fs::write(&file, text).unwrap();
        let opened = fs::File::open(&file).unwrap();
        if is_locked {
            opened.lock().unwrap();
        }
        let seen = beside();
        assert_eq!(seen.failing.len(), count, "{text}");
        assert!(seen.problems.is_empty() && seen.records.len() == 1);
    }
    fs::write(place.join("journal.failing.new"), "").unwrap();
    let journal = node.engine.open_journal(soon()).unwrap();
    assert!(journal.problems().is_empty());
    let left: Vec<_> = fs::read_dir(&place).unwrap().collect();
    assert_eq!(left.len(), 2, "the lock and the record: {left:?}");
}

#[test]
fn a_volume_whose_certificates_are_not_there_yet_is_tried_again() {
    let node = Node::with_disks(0);
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let directory = node.san.machine.path("etc/pki");
    fs::create_dir_all(&directory).unwrap();
    let source = format!(
        "nbds://{}/disk?tls-certificates={}",
        server.local_addr().unwrap(),
        directory.display()
    );
    let reconciler = node.reconciler(Options::default());
    let mut events = reconciler.subscribe();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let mut desired = Desired::default();
        desired.insert(id("pvc-1"), &request(&source)).unwrap();
        reconciler.set(desired);
        let (error, next_try) = loop {
            let event = events.next(soon()).expect("an event").event;
            if let Event::Failed {
                error, next_try, ..
            } = event
            {
                break (error, next_try);
            }
        };
        reconciler.stop();
        running.join().unwrap().unwrap();
        assert!(error.to_string().contains("ca-cert.pem"), "{error}");
        assert!(next_try.is_some(), "not tried again: {error}");
    });
}
