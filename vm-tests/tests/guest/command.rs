//! The `lunbd` command, as a user or a script runs it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vm_tests::guest::{self, ScsiDebug, udevd};

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

fn exits(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
}

#[test]
fn attach_list_and_detach_tell_of_the_same_disk() {
    guest::enter();
    let target = ScsiDebug::with_luns(8);
    let source = format!("scsi:{}:0:0:5", target.host());
    let attached = guest::lunbd(&["attach", &source, "--json"]);
    exits(&attached, 0);
    let attached = json(&attached.stdout);
    assert_eq!(attached["changed"], true);
    assert_eq!(attached["settled"], "udev_event");
    let stages: Vec<&str> = attached["phases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|phase| phase["stage"].as_str().unwrap())
        .collect();
    assert_eq!(
        stages,
        [
            "resolve", "lock", "scan", "probe", "identify", "lock", "settle", "map", "identify"
        ]
    );

    let listed = json(&guest::lunbd(&["list", "--json"]).stdout);
    let path = &listed["units"][0]["paths"][0];
    assert_eq!(format!("scsi:{}", path["hctl"].as_str().unwrap()), source);
    for field in ["node", "devno", "diskseq", "size"] {
        assert_eq!(path[field], attached[field], "{field}");
    }
    let table = String::from_utf8(guest::lunbd(&["list"]).stdout).unwrap();
    assert!(
        table.contains(&source) && table.contains("running"),
        "{table}"
    );

    let node = attached["node"].as_str().unwrap();
    let detached = guest::lunbd(&["detach", node]);
    exits(&detached, 0);
    let told = String::from_utf8(detached.stdout).unwrap();
    assert!(told.contains(&format!("{node} is gone")), "{told}");
    assert!(detached.stderr.is_empty(), "a pipe gets no progress");
    let again = guest::lunbd(&["detach", &source, "--json"]);
    exits(&again, 0);
    assert_eq!(json(&again.stdout)["changed"], false);
}

#[test]
fn each_failure_has_its_exit_code_and_its_json() {
    guest::enter();
    let target = ScsiDebug::with_luns(8);
    let host = target.host();
    let failed = |arguments: &[&str], code, kind: &str| {
        let output = guest::lunbd(&[arguments, &["--json"]].concat());
        exits(&output, code);
        assert!(output.stdout.is_empty(), "{output:?}");
        assert_eq!(json(&output.stderr)["kind"], kind);
    };
    let there = format!("scsi:{host}:0:0:1");
    failed(&["attach", "scsi:99:0:0:1"], 3, "no_such_host");
    failed(&["attach", &format!("scsi:{host}:0:0:99")], 3, "not_found");
    failed(&["attach", &format!("scsi:{host}:77:0:0")], 1, "refused");
    let wrong = "naa.60014050000000000000000000000000";
    failed(
        &["attach", &there, "--expect", wrong],
        4,
        "identity_mismatch",
    );
    failed(&["attach", &there, "--timeout", "0s"], 6, "timed_out");
    assert_eq!(target.devices(), [] as [&str; 0]);

    exits(&guest::lunbd(&["attach", &there]), 0);
    let node = format!("/dev/{}", target.disk(1).unwrap());
    guest::run(&["mkswap", &node]);
    guest::run(&["swapon", &node]);
    failed(&["detach", &there], 5, "in_use");
    guest::run(&["swapoff", &node]);
    exits(&guest::lunbd(&["detach", &there]), 0);
}

#[test]
fn watch_prints_the_kernels_events_and_udevs_as_they_come() {
    guest::enter();
    let target = ScsiDebug::with_luns(8);
    let mut watch = Command::new("lunbd")
        .args(["watch", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    // The command listens as soon as it shows an event that this test makes the kernel send.
    let (listening, told) = std::sync::mpsc::channel();
    let nudge = thread::spawn(move || {
        let pause = Duration::from_millis(50);
        while told.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            fs::write("/sys/devices/virtual/mem/full/uevent", "change").unwrap();
        }
    });
    let mut next = || json(lines.next().unwrap().unwrap().as_bytes());
    let first = next();
    assert_eq!(first["v"], 1);
    assert_eq!(first["type"], "uevent");
    assert_eq!(first["origin"], "kernel");
    listening.send(()).unwrap();
    nudge.join().unwrap();

    let source = format!("scsi:{}:0:0:3", target.host());
    exits(&guest::lunbd(&["attach", &source]), 0);
    let mut by_kernel = None;
    loop {
        let event = next();
        let disk = event["subsystem"] == "block" && event["action"] == "add";
        match event["origin"].as_str().unwrap() {
            "kernel" if disk => by_kernel = Some(event["seqnum"].clone()),
            "udev" if disk => {
                assert_eq!(Some(&event["seqnum"]), by_kernel.as_ref());
                assert!(!event["links"].as_array().unwrap().is_empty());
                break;
            }
            _ => {}
        }
    }
    watch.kill().unwrap();
    watch.wait().unwrap();
    exits(&guest::lunbd(&["detach", &source]), 0);
    udevd::settle();
}

const SIGNALS: [(Signal, i32); 2] = [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)];
const LIMIT: Duration = Duration::from_secs(120);

/// Starts the command with more time than any signal takes.
fn start(arguments: &[&str]) -> Child {
    let mut command = Command::new("lunbd");
    command
        .args(arguments)
        .args(["--timeout", "600s", "--json"]);
    let command = command.stderr(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().unwrap()
}

/// Sends the signal to a command that runs, and returns the error of that command.
fn ended_by(child: Child, signal: Signal, code: i32) -> Value {
    let pid = i32::try_from(child.id()).unwrap();
    let tasks = format!("/proc/{pid}/task");
    guest::wait_until("the command to wait for signals", LIMIT, || {
        let names = guest::entries(&tasks).into_iter();
        let mut names =
            names.filter_map(|task| fs::read_to_string(format!("{tasks}/{task}/comm")).ok());
        names
            .any(|name| name.trim() == "lunbd-signals")
            .then_some(())
    });
    kill(Pid::from_raw(pid), signal).unwrap();
    let output = child.wait_with_output().unwrap();
    exits(&output, code);
    let said = json(&output.stderr);
    assert_eq!(said["kind"], "cancelled", "{said}");
    said
}

#[test]
fn a_signal_ends_an_attach_that_waits_and_what_it_brought_is_gone() {
    guest::enter();
    let target = ScsiDebug::with_luns(8);
    let source = format!("scsi:{}:0:0:2", target.host());
    for (signal, code) in SIGNALS {
        let stopped = udevd::stopped();
        let attach = start(&["attach", &source]);
        target.wait_for_disk(2);
        ended_by(attach, signal, code);
        drop(stopped);
        assert_eq!(target.devices(), [] as [&str; 0]);
    }
    udevd::settle();
}

#[test]
fn a_signal_ends_a_detach_that_waits_for_udev_and_the_receipt_says_that_the_disk_is_gone() {
    guest::enter();
    let target = ScsiDebug::with_luns(8);
    let source = format!("scsi:{}:0:0:2", target.host());
    for (signal, code) in SIGNALS {
        exits(&guest::lunbd(&["attach", &source]), 0);
        udevd::settle();
        // The link of the bus goes before the disk does.
        let device = fs::canonicalize(target.device_dir(2)).unwrap();
        let stopped = udevd::stopped();
        let detach = start(&["detach", &source]);
        guest::wait_until("the disk to be gone", LIMIT, || {
            (!device.exists()).then_some(())
        });
        let said = ended_by(detach, signal, code);
        assert_eq!(said["stage"], "settle", "{said}");
        assert_eq!(said["receipt"]["paths"][0]["gone"], true, "{said}");
        drop(stopped);
        udevd::settle();
        let again = guest::lunbd(&["detach", &source, "--json"]);
        exits(&again, 0);
        assert_eq!(json(&again.stdout)["changed"], false);
    }
}

#[test]
fn a_signal_ends_a_detach_that_waits_for_an_attach_and_the_attach_continues() {
    guest::enter();
    let target = ScsiDebug::with_luns(8);
    let source = format!("scsi:{}:0:0:2", target.host());
    for (signal, code) in SIGNALS {
        let stopped = udevd::stopped();
        let attach = start(&["attach", &source]);
        target.wait_for_disk(2);
        // A signal that arrives before the detach waits ends it at an earlier stage.
        let waits = (1..=8).any(|seconds| {
            let detach = start(&["detach", &source]);
            thread::sleep(Duration::from_secs(seconds));
            ended_by(detach, signal, code)["stage"] == "lock"
        });
        assert!(waits, "no detach waited for the attach");
        assert_eq!(target.devices().len(), 1);
        drop(stopped);
        let attached = attach.wait_with_output().unwrap();
        exits(&attached, 0);
        assert_eq!(target.devices().len(), 1);
        exits(&guest::lunbd(&["detach", &source]), 0);
    }
    udevd::settle();
}
