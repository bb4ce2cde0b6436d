//! udevd held, absent or late: each test has a boot of its own.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test panics to fail"
)]

use std::fs;
use std::time::{Duration, Instant};

use lunbd::error::Stage;
use lunbd::uevent::{Mode, Settled};
use lunbd::{AttachRequest, Deadline, Engine, ErrorKind, Roots};
use vm_tests::guest::agent::unit;
use vm_tests::guest::{self, ScsiDebug, udevd};

fn in_seconds(seconds: u64) -> Deadline {
    Deadline::after(Duration::from_secs(seconds))
}

#[test]
fn a_stopped_udevd_times_out_at_stage_settle_and_a_repeat_goes_on_from_there() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let engine = Engine::start(Roots::default()).unwrap();
    let request = AttachRequest::new(unit(&target, 3));
    let stopped = udevd::stopped();
    let start = Instant::now();
    let error = engine.attach(&request, in_seconds(4)).unwrap_err();
    assert!(
        start.elapsed() < Duration::from_secs(6),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Settle));
    let seen = error.last_seen().unwrap();
    assert!(
        seen.contains("the kernel's event") && seen.contains("none of udev"),
        "{seen}"
    );
    // The error says the truth: the device stands.
    assert!(target.disk(3).is_some());

    // The command finds the same in its own new process.
    let source = unit(&target, 3).to_string();
    let output = guest::lunbd(&["attach", &source, "--timeout", "2s", "--json"]);
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    let failure: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(failure["stage"], "settle");
    assert_eq!(failure["retry"], "again");

    drop(stopped);
    let attachment = engine.attach(&request, in_seconds(60)).unwrap();
    assert!(!attachment.changed);
    assert!(!attachment.links.is_empty());
    engine.detach(unit(&target, 3), in_seconds(60)).unwrap();
}

#[test]
fn a_detach_under_a_stopped_udevd_says_that_the_device_is_gone_and_udev_is_not_done() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let engine = Engine::start(Roots::default()).unwrap();
    engine
        .attach(&AttachRequest::new(unit(&target, 3)), in_seconds(60))
        .unwrap();
    let stopped = udevd::stopped();
    let error = engine.detach(unit(&target, 3), in_seconds(4)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Settle));
    assert!(
        error.last_seen().unwrap().contains("the device is gone"),
        "{error}"
    );
    assert_eq!(target.devices(), [] as [&str; 0]);
    drop(stopped);
    assert!(
        !engine
            .detach(unit(&target, 3), in_seconds(60))
            .unwrap()
            .changed
    );
}

#[test]
fn without_udevd_attach_and_detach_work_on_the_kernels_events_alone() {
    guest::enter();
    udevd::kill();
    // With no udevd nobody loads modules for devices.
    guest::modprobe("sd_mod", &[]);
    let target = ScsiDebug::with_luns(4);
    let engine = Engine::start(Roots::default()).unwrap();
    assert_eq!(engine.hub().mode(), Mode::KernelOnly);
    let attachment = engine
        .attach(&AttachRequest::new(unit(&target, 3)), in_seconds(60))
        .unwrap();
    assert_eq!(attachment.settled, Settled::KernelOnly);
    assert!(attachment.links.is_empty());
    assert!(attachment.identity().unwrap().wwid().is_some());
    fs::read(&attachment.node).unwrap();
    assert!(
        engine
            .detach(unit(&target, 3), in_seconds(60))
            .unwrap()
            .changed
    );
    assert_eq!(target.devices(), [] as [&str; 0]);

    let output = guest::lunbd(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["mode"], "kernel_only");
    assert_eq!(report["ready"], true);
}

#[test]
fn a_new_network_namespace_works_on_the_kernels_events_alone() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let source = unit(&target, 3).to_string();
    let attach = guest::run(&["unshare", "--net", "lunbd", "attach", &source, "--json"]);
    let attachment: serde_json::Value = serde_json::from_str(&attach).unwrap();
    assert_eq!(attachment["settled"], "kernel_only");
    guest::run(&["unshare", "--net", "lunbd", "detach", &source]);
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn a_scan_that_hangs_does_not_hang_the_caller() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let engine = Engine::start(Roots::default()).unwrap();
    // The target answers nothing: the kernel's INQUIRY runs into its 20 s.
    target.set("every_nth", -1);
    target.set("opts", 4);
    let start = Instant::now();
    let request = AttachRequest::new(unit(&target, 3));
    let error = engine.attach(&request, in_seconds(3)).unwrap_err();
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert!(
        error.last_seen().unwrap().contains("host state="),
        "{error}"
    );
}
