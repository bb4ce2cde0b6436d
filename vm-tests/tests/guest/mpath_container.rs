//! What `doctor` says in a container, by what the container was given of the machine.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use vm_tests::guest::multipathd::{Multipathd, NoPath};
use vm_tests::guest::{self, ScsiDebug, udevd};

/// What a container may be given of the machine.
const ALL: [&str; 6] = ["pid", "net", "udev", "dev", "sys", "lunbd"];

/// How the checks that are about containers come out in one that was `given` these.
fn expected(given: &[&str]) -> BTreeMap<&'static str, &'static str> {
    let has = |what: &[&str]| what.iter().all(|one| given.contains(one));
    let good_or = |else_: &'static str, what: &[&str]| if has(what) { "good" } else { else_ };
    // Whether udev answers is asked by an attribute of sysfs.
    let udev = if has(&["net", "udev"]) {
        good_or("missing", &["sys"])
    } else {
        "limited"
    };
    BTreeMap::from([
        ("users", good_or("limited", &["pid"])),
        ("network namespace", good_or("limited", &["net"])),
        ("multipath", good_or("limited", &["net"])),
        ("udev", udev),
        ("device nodes", good_or("missing", &["dev"])),
        ("sysfs", good_or("missing", &["sys"])),
        // Whether it is the machine's directory is seen by the machine's first process.
        ("locks", good_or("limited", &["pid", "lunbd"])),
        ("scsi", "good"),
        ("nbd", module("nbd")),
        ("iscsi", module("iscsi_tcp")),
    ])
}

/// How the check of a driver comes out.
fn module(name: &str) -> &'static str {
    let is_loaded = Path::new("/sys/module").join(name).exists();
    if is_loaded { "good" } else { "limited" }
}

/// `/run`, `/dev` and `/sys` of its own, but for what it was `given`.
fn script(given: &[&str]) -> String {
    let mut lines = vec![
        "set -e",
        "mkdir -p /tmp/machine/run /tmp/machine/dev",
        "mount --bind /run /tmp/machine/run",
        "mount -t tmpfs tmpfs /run",
    ];
    if given.contains(&"udev") {
        lines.push("mkdir /run/udev && mount --bind /tmp/machine/run/udev /run/udev");
    }
    if given.contains(&"lunbd") {
        lines.push("mkdir /run/lunbd && mount --bind /tmp/machine/run/lunbd /run/lunbd");
    }
    if !given.contains(&"dev") {
        // Nodes of the devices that there are, as container engines make them at the start.
        lines.push("mount --bind /dev /tmp/machine/dev");
        lines.push("mount -t tmpfs tmpfs /dev");
        lines.push("cp -a /tmp/machine/dev/* /dev/");
    }
    if !given.contains(&"sys") {
        lines.push("mount -o remount,bind,ro /sys");
    }
    lines.push("exec lunbd doctor --json");
    lines.join("\n")
}

fn checks(given: &[&str]) -> BTreeMap<String, Value> {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--uts", "--ipc"]);
    if !given.contains(&"net") {
        command.arg("--net");
    }
    if !given.contains(&"pid") {
        command.args(["--pid", "--fork", "--mount-proc"]);
    }
    let output = command.args(["sh", "-c", &script(given)]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{given:?}: {error}: {output:?}"));
    let checks = report["checks"].as_array().unwrap().iter();
    let named = checks.map(|check| (check["name"].as_str().unwrap().to_owned(), check.clone()));
    named.collect()
}

#[test]
fn doctor_says_what_a_container_lacks_and_nothing_else() {
    guest::enter();
    let _target = ScsiDebug::with_luns(2);
    let _multipathd = Multipathd::start(NoPath::Fail);
    // udev is asked about a virtual block device.
    guest::need_module("loop");
    udevd::settle();
    // As any attach does.
    guest::run(&["mkdir", "-p", "-m", "700", "/run/lunbd"]);
    let mut containers = vec![Vec::new(), ALL.to_vec()];
    for lacking in ALL {
        containers.push(ALL.into_iter().filter(|one| *one != lacking).collect());
    }
    let mut wrong = Vec::new();
    for given in containers {
        let found = checks(&given);
        for (name, expected) in expected(&given) {
            let check = found.get(name).cloned().unwrap_or_default();
            if check["finding"] != expected {
                wrong.push(format!(
                    "given {given:?}, {name} is not {expected}: {check}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
