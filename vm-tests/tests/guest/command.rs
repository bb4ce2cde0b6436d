//! The `lunbd` command, as a user or a script runs it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

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
    let nudge = std::thread::spawn(move || {
        while told
            .recv_timeout(std::time::Duration::from_millis(50))
            .is_err()
        {
            std::fs::write("/sys/devices/virtual/mem/full/uevent", "change").unwrap();
        }
    });
    let mut next = || json(lines.next().unwrap().unwrap().as_bytes());
    assert_eq!(next()["origin"], "kernel");
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

#[test]
fn a_signal_ends_an_attach_that_waits_and_what_it_brought_is_gone() {
    guest::enter();
    let target = ScsiDebug::with_luns(8);
    let source = format!("scsi:{}:0:0:2", target.host());
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let stopped = udevd::stopped();
        let mut attach = Command::new("lunbd");
        attach.args(["attach", &source, "--timeout", "600s", "--json"]);
        let attach = attach.stderr(Stdio::piped()).stdout(Stdio::piped());
        let attach = attach.spawn().unwrap();
        target.wait_for_disk(2);
        let pid = i32::try_from(attach.id()).unwrap();
        kill(Pid::from_raw(pid), signal).unwrap();
        let output = attach.wait_with_output().unwrap();
        exits(&output, code);
        assert_eq!(json(&output.stderr)["kind"], "cancelled");
        drop(stopped);
        assert_eq!(target.devices(), [] as [&str; 0]);
    }
    udevd::settle();
}
