//! What a recorder of the `metrics` facade is told.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test panics to fail")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use lunbd::engine::ReapRequest;
use lunbd::reconcile::{Desired, Options, Reconciler};
use lunbd::{AttachRequest, Deadline, DetachTarget, Engine, Roots, Source};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshot};
use tempfile::TempDir;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// All that was recorded: `NAME{label=value,...}` and what.
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

/// Panics unless each is in the table of this source.
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

/// A machine with nothing on it.
fn machine() -> (TempDir, Engine) {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    for directory in [
        "sys/class/scsi_host",
        "sys/bus/scsi/devices",
        "sys/block",
        "proc/self",
    ] {
        std::fs::create_dir_all(root.path().join(directory)).unwrap();
    }
    let engine = Engine::start(roots).unwrap();
    (root, engine)
}

#[test]
fn calls_and_their_stages_are_measured_also_those_that_fail_and_each_metric_is_documented() {
    let (_root, engine) = machine();
    let source: Source = "scsi:7:0:0:1".parse().unwrap();
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let request = AttachRequest::new(source);
        engine.attach(&request, soon()).unwrap_err();
        engine.attach(&request, soon()).unwrap_err();
        let name = "naa.5000c500a1b2c3d4".parse().unwrap();
        engine.detach(DetachTarget::Unit(name), soon()).unwrap();
        engine.reap(&ReapRequest::default(), soon()).unwrap();
        engine.publish_metrics();
    });
    let found = read(snapshotter.snapshot());
    let value = |name| value(&found, name);
    let failed = value("lunbd_calls_total{call=attach,outcome=no_such_host}");
    assert_eq!(failed, &DebugValue::Counter(2));
    let detached = value("lunbd_calls_total{call=detach,outcome=ok}");
    assert_eq!(detached, &DebugValue::Counter(1));
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
    assert_eq!(value("lunbd_watches{}"), &DebugValue::Gauge(0.0.into()));
    assert_eq!(value("lunbd_stuck_calls{}"), &DebugValue::Gauge(0.0.into()));

    require_documented(&found, 11, include_str!("../src/engine/telemetry.rs"));
}

#[test]
fn a_reconciler_tells_how_many_volumes_are_wanted_and_fail_and_how_its_steps_ended() {
    let (root, engine) = machine();
    let engine = Arc::new(engine);
    let journal = engine.open_journal_at(&root.path().join("journal"), soon());
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
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || reconciler.publish_metrics());
    let found = read(snapshotter.snapshot());
    let counted = reconciler.counters();
    assert!(counted.wakeups > 0 && counted.resyncs > 0, "{counted:?}");
    for (name, count) in [
        ("lunbd_reconcile_steps_total{outcome=failed}", 2),
        ("lunbd_reconcile_steps_total{outcome=ok}", 0),
        ("lunbd_reconcile_wakeups_total{}", counted.wakeups),
        (
            "lunbd_reconcile_looks_total{at=everything}",
            counted.resyncs,
        ),
        ("lunbd_reconcile_looks_total{at=volumes}", counted.looks),
        ("lunbd_reconcile_plans_total{}", counted.plans),
    ] {
        assert_eq!(value(&found, name), &DebugValue::Counter(count), "{name}");
    }
    for (state, count) in [
        ("wanted", 2.0),
        ("in_use", 2.0),
        ("failing", 2.0),
        ("at_work", 0.0),
    ] {
        let name = format!("lunbd_volumes{{state={state}}}");
        let gauge = DebugValue::Gauge(f64::into(count));
        assert_eq!(value(&found, &name), &gauge, "{name}");
    }
    require_documented(&found, 5, include_str!("../src/reconcile/telemetry.rs"));
}
