//! `doctor`'s findings in a container, by what the container got of the machine.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use vm_tests::guest::multipathd::{Multipathd, NoPath};
use vm_tests::guest::{self, ScsiDebug, udevd};

/// What a container may get of the machine: its namespaces, except the mount namespace, and its
/// directories. `multipathd` is the socket file of multipathd's versions since 0.12.
const ALL: [&str; 9] = [
    "pid",
    "net",
    "uts",
    "ipc",
    "udev",
    "dev",
    "sys",
    "lunbd",
    "multipathd",
];
/// Drivers of sources that a machine may lack.
const DRIVERS: [&str; 2] = ["nbd", "iscsi_tcp"];

/// The findings about containers in a container that was `given` these.
fn expected(given: &[&str]) -> BTreeMap<&'static str, &'static str> {
    let has = |what: &[&str]| what.iter().all(|one| given.contains(one));
    let good_or = |else_: &'static str, what: &[&str]| if has(what) { "good" } else { else_ };
    // An attribute of sysfs is needed to ask whether udev answers.
    let udev = if has(&["net", "udev"]) {
        good_or("missing", &["sys"])
    } else {
        "limited"
    };
    BTreeMap::from([
        ("users", good_or("limited", &["pid"])),
        ("network namespace", good_or("limited", &["net"])),
        // multipathd's abstract socket is in the machine's network namespace.
        (
            "multipath",
            if has(&["net"]) || has(&["multipathd"]) {
                "good"
            } else {
                "limited"
            },
        ),
        ("udev", udev),
        ("device nodes", good_or("missing", &["dev"])),
        ("sysfs", good_or("missing", &["sys"])),
        // The machine's first process shows whether the directory is the machine's.
        ("locks", good_or("limited", &["pid", "lunbd"])),
        ("scsi", "good"),
        ("nbd", module("nbd")),
        ("iscsi", module("iscsi_tcp")),
    ])
}

/// The finding about a driver.
fn module(name: &str) -> &'static str {
    let is_loaded = Path::new("/sys/module").join(name).exists();
    if is_loaded { "good" } else { "limited" }
}

/// A private `/run`, `/dev` and `/sys`, except for what the container was `given`.
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
    if given.contains(&"multipathd") {
        lines.push("touch /run/multipathd.socket");
        lines.push("mount --bind /tmp/machine/run/multipathd.socket /run/multipathd.socket");
    }
    if given.contains(&"lunbd") {
        lines.push("mkdir /run/lunbd && mount --bind /tmp/machine/run/lunbd /run/lunbd");
    }
    if !given.contains(&"dev") {
        // Nodes of the existing devices, as container engines make them at the start.
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
    command.arg("--mount");
    for namespace in ["net", "uts", "ipc"] {
        if !given.contains(&namespace) {
            command.arg(format!("--{namespace}"));
        }
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

/// Containers that get everything, nothing, and everything but one, and some random ones.
fn containers() -> Vec<Vec<&'static str>> {
    const BY_CHANCE: usize = 12;
    let mut containers = vec![Vec::new(), ALL.to_vec()];
    for lacking in ALL {
        containers.push(ALL.into_iter().filter(|one| *one != lacking).collect());
    }
    let mut chance = guest::seed();
    for _ in 0..BY_CHANCE {
        // Knuth's MMIX generator; its upper bits are the better ones.
        chance = chance.wrapping_mul(6_364_136_223_846_793_005);
        chance = chance.wrapping_add(1_442_695_040_888_963_407);
        let has = |at: &usize| chance >> (63 - at) & 1 == 1;
        containers.push((0..ALL.len()).filter(has).map(|at| ALL[at]).collect());
    }
    containers
}

/// Compares `doctor`'s findings in these containers with the expected ones.
fn compare(containers: &[Vec<&'static str>]) {
    let mut wrong = Vec::new();
    for given in containers {
        let found = checks(given);
        for (name, expected) in expected(given) {
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

#[test]
fn doctor_says_what_a_container_lacks_and_nothing_else() {
    guest::enter();
    let _target = ScsiDebug::with_luns(2);
    let _multipathd = Multipathd::start(NoPath::Fail);
    // A newer multipathd listens there itself.
    let socket = Path::new("/run/multipathd.socket");
    let listener = (!socket.exists()).then(|| UnixListener::bind(socket).unwrap());
    // The check asks udev about a virtual block device.
    guest::need_module("loop");
    udevd::settle();
    // Any attach makes this directory.
    guest::run(&["mkdir", "-p", "-m", "700", "/run/lunbd"]);
    // An earlier test on this machine may have loaded the drivers.
    for driver in DRIVERS {
        let module = Path::new("/sys/module").join(driver);
        if module.exists() {
            guest::run(&["modprobe", "--remove", driver]);
        }
        assert!(!module.exists(), "{driver}");
    }
    compare(&containers());
    for driver in DRIVERS {
        guest::modprobe(driver, &[]);
    }
    compare(&[Vec::new(), ALL.to_vec()]);
    // udev opens the new devices, and an open device keeps its driver.
    udevd::settle();
    for driver in DRIVERS {
        guest::run(&["modprobe", "--remove", driver]);
    }
    if listener.is_some() {
        fs::remove_file(socket).unwrap();
    }
}
