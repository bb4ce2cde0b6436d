//! A udevd that is stopped, killed, restarted or absent, and the events that reach a process in
//! another namespace.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use lunbd::engine::StageObserver;
use lunbd::error::Stage;
use lunbd::uevent::{Mode, Settled};
use lunbd::{AttachRequest, Deadline, DetachRequest, Engine, ErrorKind, Roots};
use vm_tests::guest::agent::{assert_is_another_life, unit};
use vm_tests::guest::{self, ScsiDebug, udevd};

/// How much longer than its deadline a call may take on a busy machine.
const LATENESS: Duration = Duration::from_secs(10);

fn in_seconds(seconds: u64) -> Deadline {
    Deadline::after(Duration::from_secs(seconds))
}

#[test]
fn an_attach_with_a_stopped_udevd_times_out_at_settle_and_a_repeated_attach_completes() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let engine = Engine::start(Roots::default()).unwrap();
    let request = AttachRequest::new(unit(&target, 3));
    let stopped = udevd::stopped();
    let start = Instant::now();
    let limit = Duration::from_secs(20);
    let error = engine.attach(&request, Deadline::after(limit)).unwrap_err();
    let took = start.elapsed();
    assert!(took < limit + LATENESS, "{took:?}");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Settle));
    let seen = error.last_seen().unwrap();
    assert!(
        seen.contains("the kernel's event") && seen.contains("none of udev"),
        "{seen}"
    );
    // The error is right: the device exists.
    assert!(target.disk(3).is_some());

    // The command finds the same in a new process.
    let source = unit(&target, 3).to_string();
    let output = guest::lunbd(&["attach", &source, "--timeout", "20s", "--json"]);
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
fn a_detach_with_a_stopped_udevd_reports_a_removed_device_and_unfinished_udev_work() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let engine = Engine::start(Roots::default()).unwrap();
    engine
        .attach(&AttachRequest::new(unit(&target, 3)), in_seconds(60))
        .unwrap();
    udevd::settle();
    let stopped = udevd::stopped();
    let error = engine.detach(unit(&target, 3), in_seconds(20)).unwrap_err();
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
    let _absent = udevd::absent();
    // Without udevd no process loads modules for devices.
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

/// A container shows its own first process, which does not show udevd's network namespace.
#[test]
fn a_container_with_udevs_socket_hears_udev_in_the_hosts_network_namespace_alone() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let source = unit(&target, 3).to_string();
    let contained = |namespaces: &[&str], arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc"]);
        command.args(namespaces).arg("lunbd").args(arguments);
        let output = command.output().unwrap();
        println!("{output:?}");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap_or_default()
    };
    let attach = ["attach", &source, "--json", "--timeout", "40s"];
    let apart = contained(&["--net"], &attach);
    assert_eq!(apart["settled"], "kernel_only");
    let doctor = contained(&["--net"], &["doctor", "--json"]);
    assert_eq!(doctor["mode"], "kernel_only");
    let checks = doctor["checks"].as_array().unwrap();
    let udev = checks.iter().find(|check| check["name"] == "udev").unwrap();
    assert_eq!(udev["finding"], "limited");
    let seen = udev["seen"].as_str().unwrap();
    assert!(seen.contains("another network namespace"), "{seen}");
    let of_host = contained(&[], &attach);
    let settled = of_host["settled"].as_str().unwrap();
    assert!(settled == "udev_event" || settled == "barrier", "{settled}");
    guest::run(&["lunbd", "detach", &source]);
}

/// Like a systemd service with `ProcSubset=pid`.
#[test]
fn an_attach_works_with_a_proc_that_shows_only_processes() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let source = unit(&target, 3).to_string();
    let script = "mount -t proc -o subset=pid proc /proc && exec lunbd \"$@\"";
    let lunbd = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]);
        let output = command.args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let attach = ["attach", &source, "--json", "--timeout", "40s"];
    assert_eq!(lunbd(&attach)["changed"], true);
    // For an attached device the engine must ask udev with a marked event.
    let again = lunbd(&attach);
    assert_eq!(again["changed"], false);
    assert_eq!(again["settled"], "barrier");
    assert_eq!(lunbd(&["doctor", "--json"])["ready"], true);
    let detached = lunbd(&["detach", &source, "--json"]);
    assert_eq!(detached["receipt"]["not_looked_at"], serde_json::json!([]));
}

/// The user has root's number and none of its capabilities: no event arrives, sysfs can be
/// written, and no page cache can be dropped.
#[test]
fn a_new_user_namespace_attaches_by_looking_at_sysfs_and_may_not_detach() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let source = unit(&target, 3).to_string();
    let apart = ["unshare", "--user", "--map-root-user", "--net", "lunbd"];
    let run = |arguments: &[&str]| {
        let mut command = Command::new(apart[0]);
        command.args(&apart[1..]).args(arguments).output().unwrap()
    };
    let doctor = String::from_utf8(run(&["doctor"]).stdout).unwrap();
    assert!(doctor.contains("no events reach this process"), "{doctor}");
    let attach = run(&["attach", &source, "--json"]);
    assert!(attach.status.success(), "{attach:?}");
    let attachment: serde_json::Value = serde_json::from_slice(&attach.stdout).unwrap();
    let node = Path::new(attachment["node"].as_str().unwrap());
    assert_eq!(
        node.file_name().unwrap().to_str(),
        target.disk(3).as_deref()
    );
    assert_eq!(attachment["settled"], "kernel_only");
    assert_eq!(attachment["links"], serde_json::json!([]));

    let detach = run(&["detach", &source, "--json"]);
    assert_eq!(detach.status.code(), Some(7), "{detach:?}");
    let failure: serde_json::Value = serde_json::from_slice(&detach.stderr).unwrap();
    assert_eq!(failure["stage"], "flush");
    assert_eq!(
        target.disk(3).as_deref(),
        node.file_name().unwrap().to_str()
    );
    guest::run(&["lunbd", "detach", &source]);
    assert_eq!(target.devices(), [] as [&str; 0]);
}

/// Whether a thread of this process scans in the kernel.
fn is_scanning() -> bool {
    let threads = guest::entries("/proc/self/task");
    threads.iter().any(|thread| {
        let stack = fs::read_to_string(format!("/proc/self/task/{thread}/stack"));
        stack.is_ok_and(|stack| stack.contains("scsi_probe_and_add_lun"))
    })
}

#[test]
fn a_scan_that_hangs_does_not_hang_the_caller_and_a_detach_waits_for_its_end() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let engine = Engine::start(Roots::default()).unwrap();
    // The target does not answer: the kernel's INQUIRY runs into its timeout of 20 s.
    target.set("every_nth", -1);
    target.set("opts", 4);
    let start = Instant::now();
    let request = AttachRequest::new(unit(&target, 3));
    let limit = Duration::from_secs(8);
    let error = engine.attach(&request, Deadline::after(limit)).unwrap_err();
    let took = start.elapsed();
    assert!(took < limit + LATENESS, "{took:?}");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert!(
        error.last_seen().unwrap().contains("host state="),
        "{error}"
    );
    assert!(is_scanning());
    // The target answers again. The scan continues, and may find the unit or not.
    target.set("every_nth", 0);
    target.set("opts", 0);
    engine.detach(unit(&target, 3), in_seconds(300)).unwrap();
    assert!(!is_scanning(), "the detach has not waited for the scan");
    assert_eq!(target.devices(), [] as [&str; 0]);
}

fn restart_udevd() {
    udevd::kill();
    udevd::start();
}

/// The device's own event dies with the udevd that was handling it.
#[test]
fn a_udevd_that_is_killed_and_restarted_in_an_attach_is_asked_again() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let engine = Engine::start(Roots::default()).unwrap();
    let stopped = udevd::stopped();
    let events = guest::UeventCounter::start();
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Settle {
            // The disk serves a moment before its event, which goes to the first udevd.
            let announced = events.wait_for(Duration::from_secs(30), |event| {
                event.kind() == ("add", "block", "disk")
            });
            announced.expect("the disk's own event");
            restart_udevd();
        }
    });
    let request = AttachRequest::new(unit(&target, 3)).observe(observer);
    let attachment = engine.attach(&request, in_seconds(60)).unwrap();
    drop(stopped);
    assert_eq!(attachment.settled, Settled::Barrier);
    assert!(!attachment.links.is_empty());
    for link in &attachment.links {
        assert_eq!(fs::canonicalize(link).unwrap(), attachment.node);
    }
    engine.detach(unit(&target, 3), in_seconds(60)).unwrap();
}

/// Nothing can make udev handle a removed device again, so the error says that udev has not
/// handled the removal.
#[test]
fn a_udevd_that_is_killed_and_restarted_in_a_detach_leaves_an_error_that_says_so() {
    guest::enter();
    let target = ScsiDebug::with_luns(4);
    let engine = Engine::start(Roots::default()).unwrap();
    let request = AttachRequest::new(unit(&target, 3));
    let first = engine.attach(&request, in_seconds(60)).unwrap();
    // The link of the bus goes before the disk does, and with it the disk's event.
    let device = fs::canonicalize(target.device_dir(3)).unwrap();
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Delete {
            udevd::kill();
            let device = device.clone();
            std::thread::spawn(move || {
                let gone = || (!device.exists()).then_some(());
                guest::wait_until("the device to be gone", Duration::from_secs(60), gone);
                udevd::start();
            });
        }
    });
    let detach = DetachRequest::new(unit(&target, 3)).observe(observer);
    let failure = engine.detach(detach, in_seconds(15)).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Settle));
    assert!(failure.last_seen().unwrap().contains("the device is gone"));
    assert!(failure.receipt.paths[0].gone);
    guest::wait_until("udevd to answer", Duration::from_secs(60), || {
        udevd::answers().then_some(())
    });
    assert!(
        !engine
            .detach(unit(&target, 3), in_seconds(60))
            .unwrap()
            .changed
    );
    // The stale record of the first disk is no proof for the next one.
    let next = engine.attach(&request, in_seconds(60)).unwrap();
    assert_is_another_life(&first, &next);
    for link in &next.links {
        assert_eq!(fs::canonicalize(link).unwrap(), next.node);
    }
    engine.detach(unit(&target, 3), in_seconds(60)).unwrap();
}
