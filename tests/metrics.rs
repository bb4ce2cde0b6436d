//! What a recorder of the `metrics` facade is told.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test panics to fail")]

use std::collections::BTreeSet;
use std::time::Duration;

use lunbd::engine::ReapRequest;
use lunbd::{AttachRequest, Deadline, DetachTarget, Engine, Roots, Source};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshot};

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

#[test]
fn calls_and_their_stages_are_measured_also_those_that_fail_and_each_metric_is_documented() {
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
    let value = |name: &str| {
        let at = found.iter().position(|(found, _)| found == name);
        let Some((_, value)) = at.and_then(|at| found.get(at)) else {
            panic!("{name} of {found:?}");
        };
        value
    };
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

    let table = include_str!("../src/engine/telemetry.rs");
    let names: BTreeSet<&str> = found
        .iter()
        .filter_map(|(name, _)| name.split_once('{'))
        .map(|(name, _)| name)
        .collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        assert!(
            table.contains(&format!("/// | `{name}` |")),
            "{name} is not in the table"
        );
    }
}
