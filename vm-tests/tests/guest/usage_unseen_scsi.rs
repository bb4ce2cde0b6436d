//! Users of a disk that the command cannot see: it says so, and replaces and reaps nothing.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::Command;

use lunbd::{AttachRequest, Source};
use serde_json::Value;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::{ScsiDebug, udevd};

/// A command prefix that hides other processes from the command.
type Confinement<'a> = &'a [&'a str];

fn lunbd(confinement: Confinement<'_>, arguments: &[&str]) -> (Option<i32>, Value) {
    let output = Command::new(confinement[0])
        .args(&confinement[1..])
        .args(arguments)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    let said = serde_json::from_str(text.lines().next().unwrap_or_default());
    (output.status.code(), said.unwrap_or(Value::Null))
}

/// `doctor`'s finding about the users of disks.
fn users(confinement: Confinement<'_>) -> Value {
    let (_, doctor) = lunbd(confinement, &["doctor", "--json"]);
    let checks = doctor.as_array().or_else(|| doctor["checks"].as_array());
    let mut checks = checks.expect("checks").iter();
    let users = checks.find(|check| check["name"] == "users");
    users.expect("a check of users").clone()
}

/// A target whose units get other names when `vpd_use_hostno` changes.
fn target() -> ScsiDebug {
    let target = ScsiDebug::options().luns(4).hosts(2).size_mib(16).load();
    target.set("vpd_use_hostno", 1);
    target
}

fn at(target: &ScsiDebug, lun: u32) -> String {
    format!("scsi:{}:0:0:{lun}", target.hosts()[1])
}

/// Nothing is replaced or reaped. Each detach continues and reports that it did not see
/// `place`, and `doctor` reports it too. Each disk has a writer.
fn what_is_not_seen_is_said(confinement: Confinement<'_>, place: &str) {
    let (engine, target) = (engine(), target());
    let at = |lun| at(&target, lun);
    let mut writers = Vec::new();
    for lun in [0, 2, 3] {
        let request = AttachRequest::new(at(lun).parse::<Source>().unwrap());
        let node = engine.attach(&request, soon()).unwrap().node;
        if lun > 0 {
            writers.push(OpenOptions::new().write(true).open(node).unwrap());
        }
    }
    udevd::settle();
    let devices = target.devices();
    assert_eq!(users(confinement)["finding"], "limited");

    target.set("max_luns", 3);
    let (code, reaped) = lunbd(confinement, &["reap", "--json"]);
    assert_eq!(code, Some(7), "{reaped}");
    assert_eq!(target.devices(), devices);
    target.set("max_luns", 4);

    target.set("vpd_use_hostno", 0);
    let (code, replaced) = lunbd(confinement, &["attach", &at(3), "--json"]);
    assert_eq!(code, Some(7), "{replaced}");
    assert_eq!(target.devices(), devices);
    target.set("vpd_use_hostno", 1);

    let (code, detached) = lunbd(confinement, &["detach", &at(2), "--json"]);
    assert_eq!(code, Some(0), "{detached}");
    let hidden = detached["receipt"]["not_looked_at"].to_string();
    assert!(hidden.contains(place), "{hidden}");
    drop(writers);
    // Without the confinement everything is visible.
    let last = engine.detach(at(0).parse::<Source>().unwrap(), soon());
    let seen = serde_json::to_value(last.unwrap().receipt.unwrap()).unwrap();
    assert_eq!(seen["not_looked_at"], Value::Array(Vec::new()));
    engine
        .detach(at(3).parse::<Source>().unwrap(), soon())
        .unwrap();
}

#[test]
fn what_a_pid_namespace_hides_is_said_and_nothing_is_replaced_or_reaped_there() {
    let confinement = ["unshare", "--pid", "--fork", "--mount-proc", "lunbd"];
    what_is_not_seen_is_said(&confinement, "other_pid_namespaces");
}

/// Like a systemd service with `ProtectProc=` and without `CAP_SYS_PTRACE`.
fn hidepid(script: &str) -> [&str; 6] {
    ["unshare", "--mount", "sh", "-c", script, "sh"]
}

#[test]
fn what_hidepid_hides_is_said_and_nothing_is_replaced_or_reaped_there() {
    let script = "mount -t proc -o hidepid=invisible proc /proc && \
                  exec setpriv --bounding-set -sys_ptrace lunbd \"$@\"";
    what_is_not_seen_is_said(&hidepid(script), "hidden_processes");
}

#[test]
fn each_form_of_hidepid_is_known_and_hides_nothing_from_a_process_that_may_trace() {
    let _target = target();
    for option in ["1", "2", "noaccess", "ptraceable"] {
        let mount = format!("mount -t proc -o hidepid={option} proc /proc");
        let script = format!("{mount} && exec setpriv --bounding-set -sys_ptrace lunbd \"$@\"");
        let users = users(&hidepid(&script));
        assert_eq!(users["finding"], "limited", "{option}: {users}");
        let seen = users["seen"].as_str().unwrap();
        assert!(seen.contains("hidepid"), "{option}: {seen}");
    }
    let script = "mount -t proc -o hidepid=ptraceable proc /proc && exec lunbd \"$@\"";
    assert_eq!(users(&hidepid(script))["finding"], "good");
}

/// The user has each capability, and none over the machine's processes.
#[test]
fn root_of_a_user_namespace_replaces_nothing_where_hidepid_hides_the_machines_processes() {
    let (engine, target) = (engine(), target());
    let source = || at(&target, 3).parse::<Source>().unwrap();
    let request = AttachRequest::new(source());
    let node = engine.attach(&request, soon()).unwrap().node;
    let writer = OpenOptions::new().write(true).open(&node).unwrap();
    udevd::settle();
    let script = "mount -t proc -o hidepid=ptraceable proc /proc && \
                  exec unshare --user --map-root-user lunbd \"$@\"";
    let confinement = hidepid(script);
    target.set("vpd_use_hostno", 0);
    let (code, replaced) = lunbd(&confinement, &["attach", &at(&target, 3), "--json"]);
    target.set("vpd_use_hostno", 1);
    assert_eq!(code, Some(7), "{replaced}");
    assert!(Path::new(&node).exists());
    let users = users(&confinement);
    assert_eq!(users["finding"], "limited", "{users}");
    drop(writer);
    engine.detach(source(), soon()).unwrap();
}

/// The kernel asks for a capability over the machine.
#[test]
fn doctor_does_not_take_the_capabilities_of_a_user_namespace_for_those_that_are_needed() {
    let (engine, target) = (engine(), target());
    let source = || at(&target, 3).parse::<Source>().unwrap();
    engine
        .attach(&AttachRequest::new(source()), soon())
        .unwrap();
    udevd::settle();
    let confinement = ["unshare", "--user", "--map-root-user", "lunbd"];
    let (code, detached) = lunbd(&confinement, &["detach", &at(&target, 3), "--json"]);
    let (_, doctor) = lunbd(&confinement, &["doctor", "--json"]);
    let checks = doctor["checks"].as_array().unwrap();
    let named = |name| checks.iter().find(|check| check["name"] == name).unwrap();
    let (privileges, buffer) = (named("privileges"), named("receive buffer"));
    println!("{code:?} {detached} {privileges} {buffer}");
    assert_eq!(code, Some(7), "{detached}");
    assert_eq!(privileges["finding"], "missing", "{privileges}");
    engine.detach(source(), soon()).unwrap();
}
