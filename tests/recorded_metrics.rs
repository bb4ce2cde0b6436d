//! The values that a recorder of the `metrics` facade receives.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test panics to fail")]

#[allow(dead_code, reason = "other tests use the rest of it")]
mod machine;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::sync::Arc;
use std::time::Duration;

use lunbd::engine::journal::Record;
use lunbd::engine::{HealReport, ReapRequest, ResizeRequest};
use lunbd::reconcile::{Desired, Options, Reconciler};
use lunbd::uevent::Message;
use lunbd::{AttachRequest, Deadline, DetachTarget, Engine, ErrorKind, Source};
use machine::Machine;
use machine::san::San;
use metrics_util::debugging::DebugValue::Counter;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshot};
use serde_json::json;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// All recorded values: `NAME{label=value,...}` and the value.
fn read(snapshot: Snapshot) -> Vec<(String, DebugValue)> {
    let keys = snapshot.into_vec().into_iter();
    keys.map(|(key, _, _, value)| {
        let labels = key.key().labels();
        let labels: Vec<String> = labels
            .map(|label| format!("{}={}", label.key(), label.value()))
            .collect();
        (
            format!("{}{{{}}}", key.key().name(), labels.join(",")),
            value,
        )
    })
    .collect()
}

fn value<'a>(found: &'a [(String, DebugValue)], name: &str) -> &'a DebugValue {
    let at = found.iter().position(|(found, _)| found == name);
    let Some((_, value)) = at.and_then(|at| found.get(at)) else {
        panic!("{name} of {found:?}");
    };
    value
}

/// Panics unless the table in this source documents each name.
fn require_documented(found: &[(String, DebugValue)], at_least: usize, source: &str) {
    let names = found.iter().filter_map(|(name, _)| name.split_once('{'));
    let names: BTreeSet<&str> = names.map(|(name, _)| name).collect();
    assert!(names.len() >= at_least, "{names:?}");
    for name in names {
        assert!(
            source.contains(&format!("/// | `{name}` |")),
            "{name} is not in the table"
        );
    }
}

/// The values of a publication now.
fn publish(publish: impl FnOnce()) -> Vec<(String, DebugValue)> {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, publish);
    read(snapshotter.snapshot())
}

/// Panics with all differences.
#[track_caller]
fn require(found: &[(String, DebugValue)], expected: &[(&str, DebugValue)]) {
    let of = |(name, _): &(&str, DebugValue)| format!("{name} {:?}", value(found, name));
    let found: Vec<String> = expected.iter().map(of).collect();
    let expected = expected
        .iter()
        .map(|(name, value)| format!("{name} {value:?}"));
    assert_eq!(found, expected.collect::<Vec<_>>());
}

fn gauge(value: f64) -> DebugValue {
    DebugValue::Gauge(value.into())
}

#[test]
fn calls_and_their_stages_are_measured_also_those_that_fail_and_each_metric_is_documented() {
    let machine = Machine::new();
    let engine = Engine::start(machine.roots()).unwrap();
    let source: Source = "scsi:7:0:0:1".parse().unwrap();
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let request = AttachRequest::new(source);
        engine.attach(&request, soon()).unwrap_err();
        engine.attach(&request, soon()).unwrap_err();
        let name = "naa.5000c500a1b2c3d4".parse().unwrap();
        let unit = DetachTarget::Unit(name);
        let resize = ResizeRequest::new(unit.clone());
        engine.resize(&resize, soon()).unwrap_err();
        engine.detach(unit, soon()).unwrap();
        engine.reap(&ReapRequest::default(), soon()).unwrap();
        let journal = tempfile::tempdir().unwrap();
        let journal = engine.open_journal_at(journal.path(), soon()).unwrap();
        engine.recover(&journal, soon()).unwrap();
        engine.publish_metrics();
    });
    let found = read(snapshotter.snapshot());
    let value = |name| value(&found, name);
    require(
        &found,
        &[
            (
                "lunbd_calls_total{call=attach,outcome=no_such_host}",
                Counter(2),
            ),
            ("lunbd_calls_total{call=detach,outcome=ok}", Counter(1)),
            ("lunbd_calls_total{call=reap,outcome=ok}", Counter(1)),
            ("lunbd_calls_total{call=recover,outcome=ok}", Counter(1)),
            (
                "lunbd_calls_total{call=resize,outcome=not_found}",
                Counter(1),
            ),
        ],
    );
    for (name, count) in [
        ("lunbd_call_seconds{call=attach}", 2),
        ("lunbd_stage_seconds{call=attach,stage=resolve}", 2),
        ("lunbd_stage_seconds{call=detach,stage=identify}", 1),
        ("lunbd_stage_seconds{call=reap,stage=resolve}", 1),
    ] {
        let DebugValue::Histogram(times) = value(name) else {
            panic!("{name}");
        };
        assert_eq!(times.len(), count, "{name}");
        assert!(
            times.iter().all(|time| (0.0..30.0).contains(&time.0)),
            "{times:?}"
        );
    }
    require_documented(&found, 11, include_str!("../src/engine/telemetry.rs"));
}

/// A kernel event, with `more` after its common pairs.
fn datagram(devpath: &str, more: &str) -> Vec<u8> {
    format!("change@{devpath}\0ACTION=change\0DEVPATH={devpath}\0SEQNUM=1\0{more}").into_bytes()
}

#[test]
fn what_the_hub_reads_cuts_passes_over_and_loses_is_counted_and_so_is_each_wait() {
    /// How many events a watch may leave unread.
    const QUEUE: u64 = 255;
    let machine = Machine::new();
    let engine = Engine::start(machine.roots()).unwrap();
    let hub = engine.hub();
    let feed = |devpath: &str, more: &str| {
        let datagram = datagram(devpath, more);
        hub.feed(&Message::parse(&datagram).unwrap());
    };
    let (mut watch, mut other) = (hub.watch("nbd5"), hub.watch("nbd6"));
    let third = hub.watch("nbd7");
    // No watch wants two of these, and the third is longer than the kernel's longest event.
    feed("/devices/virtual/block/nbd8", "");
    feed("/devices/virtual/block/nbd9", "");
    feed(&format!("/devices/{}", "x".repeat(2048)), "");
    // Three waits end with a notice.
    for more in ["", "", &format!("SUBSYSTEM={}\0", "x".repeat(4096))] {
        feed("/devices/virtual/block/nbd5", more);
        assert!(watch.next(soon()).is_some());
    }
    // Two waits end with their deadline.
    for _ in 0..2 {
        let now = Deadline::after(Duration::ZERO);
        assert!(watch.next(now).is_none());
    }
    // The second watch reads nothing: the events that exceed its queue become one resync.
    for _ in 0..QUEUE + 40 {
        feed("/devices/virtual/block/nbd6", "");
    }
    // Two losses occur. The first is reported to two watches, because the third has an unread
    // resync; the second is reported to none.
    hub.feed_overrun();
    hub.feed_overrun();
    drop(third);
    let found = publish(|| engine.publish_metrics());
    require(
        &found,
        &[
            ("lunbd_uevents_total{}", Counter(2 + 3 + QUEUE + 40)),
            ("lunbd_uevent_foreign_messages_total{}", Counter(1)),
            ("lunbd_uevents_cut_total{}", Counter(1)),
            ("lunbd_uevent_overruns_total{}", Counter(2)),
            ("lunbd_uevent_resyncs_total{}", Counter(1 + 2)),
            ("lunbd_watch_waits_total{outcome=notice}", Counter(3)),
            ("lunbd_watch_waits_total{outcome=deadline}", Counter(2)),
            ("lunbd_watches{}", gauge(2.0)),
        ],
    );
    // The longest wait is one of those three, and the next is longer than any of them.
    let longest = || {
        let found = publish(|| engine.publish_metrics());
        let DebugValue::Gauge(longest) = value(&found, "lunbd_watch_longest_wait_seconds{}") else {
            panic!("{found:?}");
        };
        longest.0
    };
    let before = longest();
    while other.next(Deadline::after(Duration::ZERO)).is_some() {}
    let began = std::time::Instant::now();
    // Without events each wait ends with a look at sysfs, after at most 50 ms.
    while other.next(soon()).is_some() && began.elapsed() < Duration::from_millis(200) {}
    let (after, took) = (longest(), began.elapsed().as_secs_f64());
    assert!(
        before < after && (0.04..=took).contains(&after),
        "{before} {after} of {took}"
    );
}

#[test]
fn a_call_that_the_kernel_does_not_end_is_counted_until_it_returns() {
    let machine = Machine::new();
    for number in [0, 1] {
        machine.host(number);
        let scan = machine.path(&format!("sys/class/scsi_host/host{number}/scan"));
        fs::remove_file(&scan).unwrap();
        // The open for writing blocks until a process reads.
        nix::unistd::mkfifo(&scan, nix::sys::stat::Mode::S_IRWXU).unwrap();
    }
    let engine = Engine::start(machine.roots()).unwrap();
    for source in ["scsi:0:0:0:1", "scsi:1:0:0:1"] {
        let request = AttachRequest::new(source.parse::<Source>().unwrap());
        let limit = Deadline::after(Duration::from_secs(10));
        let error = engine.attach(&request, limit).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }
    let stuck = || publish(|| engine.publish_metrics());
    for (number, left) in [(0, 2.0), (1, 1.0)] {
        assert_eq!(value(&stuck(), "lunbd_stuck_calls{}"), &gauge(left));
        let scan = machine.path(&format!("sys/class/scsi_host/host{number}/scan"));
        drop(File::open(scan).unwrap());
        let limit = soon();
        while value(&stuck(), "lunbd_stuck_calls{}") == &gauge(left) {
            assert!(!limit.has_passed(), "host{number} is free again");
            std::thread::yield_now();
        }
    }
    assert_eq!(value(&stuck(), "lunbd_stuck_calls{}"), &gauge(0.0));
}

#[test]
fn the_recovery_of_one_volume_is_counted_by_its_outcome() {
    let machine = Machine::new();
    machine.write("journal/journal.lock", "");
    let spec = json!({
        "sources": ["scsi:7:0:0:1"], "expect": null, "min_paths": 1, "multipath": "prefer",
        "nbd": null,
    });
    let detach = json!({
        "operation": { "detach": { "abandon_unwritten": false } },
        "begun_at": "2026-11-21T03:00:00Z",
    });
    for (volume, intent) in [("pvc-1", json!(null)), ("pvc-2", detach)] {
        let record = json!({
            "volume": volume, "spec": spec, "intent": intent, "outcome": null,
        });
        let file = machine.path(&format!("journal/{volume}.json"));
        fs::write(file, Record::seal(&serde_json::to_vec(&record).unwrap())).unwrap();
    }
    let engine = Engine::start(machine.roots()).unwrap();
    let journal = engine
        .open_journal_at(&machine.path("journal"), soon())
        .unwrap();
    // Both claim one source, so the detach of the second is refused.
    let found = publish(|| {
        for volume in ["pvc-1", "pvc-2", "pvc-2"] {
            let recovered = engine.recover_volume(&journal, &volume.parse().unwrap(), soon());
            assert!(recovered.is_some());
        }
    });
    require(
        &found,
        &[
            ("lunbd_calls_total{call=recover,outcome=ok}", Counter(1)),
            ("lunbd_calls_total{call=recover,outcome=in_use}", Counter(2)),
        ],
    );
}

#[test]
fn each_look_of_a_heal_is_counted_by_its_outcome() {
    let machine = Machine::new();
    // Two devices are connected under the URI of a server, and their nodes are missing.
    for (name, number) in [("nbd0", "43:0"), ("nbd1", "43:32")] {
        for (file, text) in [("dev", number), ("backend", "nbd://127.0.0.1:1/x")] {
            machine.write(&format!("sys/block/{name}/{file}"), &format!("{text}\n"));
        }
    }
    let engine = Engine::start(machine.roots()).unwrap();
    let found = publish(|| {
        for _ in 0..3 {
            let healings: Vec<HealReport> = engine.heal(soon()).unwrap();
            assert_eq!(healings.len(), 2, "{healings:?}");
        }
    });
    require(
        &found,
        &[
            ("lunbd_heals_total{outcome=failed}", Counter(6)),
            ("lunbd_calls_total{call=heal,outcome=ok}", Counter(3)),
        ],
    );
}

#[test]
fn a_reconciler_tells_how_many_volumes_are_wanted_and_fail_and_how_its_steps_ended() {
    let machine = Machine::new();
    let engine = Arc::new(Engine::start(machine.roots()).unwrap());
    let journal = engine.open_journal_at(&machine.path("journal"), soon());
    let options = Options::default();
    let reconciler = Reconciler::new(Arc::clone(&engine), journal.unwrap(), options);
    let mut desired = Desired::default();
    for (volume, source) in [("pvc-1", "scsi:7:0:0:1"), ("pvc-2", "scsi:7:0:0:2")] {
        let source: Source = source.parse().unwrap();
        let request = AttachRequest::new(source);
        desired.insert(volume.parse().unwrap(), &request).unwrap();
    }
    reconciler.set(desired);
    let left = reconciler.apply(soon()).unwrap();
    assert!(!left.is_empty(), "there is no such host");
    let found = publish(|| reconciler.publish_metrics());
    require(
        &found,
        &[
            ("lunbd_reconcile_steps_total{outcome=failed}", Counter(2)),
            ("lunbd_reconcile_steps_total{outcome=ok}", Counter(0)),
            ("lunbd_volumes{state=wanted}", gauge(2.0)),
            ("lunbd_volumes{state=in_use}", gauge(2.0)),
            ("lunbd_volumes{state=failing}", gauge(2.0)),
            ("lunbd_volumes{state=running}", gauge(0.0)),
        ],
    );
    require_documented(&found, 5, include_str!("../src/reconcile/telemetry.rs"));
}

/// An attached disk of our own at `0:0:0:0`, and its record.
fn with_a_volume() -> (San, Arc<Engine>, Desired) {
    let mut san = San::new();
    san.machine.host(0);
    san.machine.write("run/lunbd/journal/journal.lock", "");
    let name = san.disk(0, 0, Some(0));
    let record = json!({
        "volume": "pvc-0",
        "spec": {
            "sources": ["scsi:0:0:0:0"], "expect": null, "min_paths": 1,
            "multipath": "prefer", "nbd": null,
        },
        "intent": null,
        "outcome": {
            "node": format!("/dev/{name}"), "devno": "8:0", "diskseq": "1", "size": 1_048_576,
            "names": [format!("naa.60014051{:024x}", 0)], "map": null,
            "nbd_index": null, "at": "2026-11-21T03:00:00Z",
        },
    });
    let sealed = Record::seal(&serde_json::to_vec(&record).unwrap());
    let file = san.machine.path("run/lunbd/journal/pvc-0.json");
    fs::write(file, sealed).unwrap();
    let mut desired = Desired::default();
    let request = AttachRequest::new("scsi:0:0:0:0".parse::<Source>().unwrap());
    desired.insert("pvc-0".parse().unwrap(), &request).unwrap();
    let engine = Arc::new(Engine::start(san.machine.roots()).unwrap());
    (san, engine, desired)
}

#[test]
fn each_call_and_each_event_of_a_volume_is_a_known_number_of_looks_and_plans_and_of_few_wake_ups() {
    const CALLS: u64 = 5;
    const EVENTS: u64 = 3;
    let (_san, engine, desired) = with_a_volume();
    let journal = engine.open_journal(soon()).unwrap();
    let hour = Duration::from_secs(3600);
    let options = Options::default().resync(hour).trust();
    let reconciler = Reconciler::new(Arc::clone(&engine), journal, options);
    reconciler.set(desired.clone());
    let count = |name: &str| match value(&publish(|| reconciler.publish_metrics()), name) {
        Counter(count) => *count,
        other => panic!("{other:?}"),
    };
    let wakeups = || count("lunbd_reconcile_wakeups_total{}");
    let everything = || count("lunbd_reconcile_refreshes_total{scope=all}");
    let volumes = || count("lunbd_reconcile_refreshes_total{scope=some}");
    let plans = || count("lunbd_reconcile_plans_total{}");
    let until = |what: &str, counter: &dyn Fn() -> u64, is: u64| {
        let limit = soon();
        while counter() < is {
            assert!(!limit.has_passed(), "{what}: {} of {is}", counter());
            std::thread::yield_now();
        }
        assert_eq!(counter(), is, "{what}");
    };
    let looks_and_plans = || (everything(), volumes(), plans());
    std::thread::scope(|scope| {
        struct Stop<'a>(&'a Reconciler);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        let running = scope.spawn(|| reconciler.run());
        let stop = Stop(&reconciler);
        // The first look is at everything, and the first plan comes from it.
        until("the first plan", &plans, 1);
        assert_eq!(wakeups(), 0);
        assert_eq!(looks_and_plans(), (1, 0, 1));
        for call in 1..=CALLS {
            reconciler.set(desired.clone());
            until("a plan for each call", &plans, 1 + call);
        }
        // A call that comes before the loop sleeps does not wake it.
        assert!(wakeups() <= CALLS, "{}", wakeups());
        assert_eq!(looks_and_plans(), (1, 0, 1 + CALLS));
        for event in 1..=EVENTS {
            let path = "/devices/x/host0/target0:0:0/0:0:0:0/block/sda";
            let datagram = datagram(path, "SUBSYSTEM=block\0");
            engine.hub().feed(&Message::parse(&datagram).unwrap());
            until("a look for each event", &volumes, event);
            // The plan follows the look, and a run that is stopped between the two makes none.
            until("a plan for each event", &plans, 1 + CALLS + event);
        }
        assert_eq!(everything(), 1);
        drop(stop);
        running.join().unwrap().unwrap();
    });
    // Each call and each event wakes the loop at most once. The timer of the look that an event
    // requested wakes it too. The end wakes it once.
    let most = CALLS + 2 * EVENTS + 1;
    assert!((1..=most).contains(&wakeups()), "{}", wakeups());
    assert_eq!(plans(), 1 + CALLS + EVENTS);
}
