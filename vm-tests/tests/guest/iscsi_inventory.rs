//! `lunbd list` on a machine with sessions, a map and a mount.

use std::time::Duration;

use serde_json::{Value, json};
use vm_tests::guest;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};

const IQN: &str = "iqn.2026-01.example:inventory";
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const MOUNT: &str = "/tmp/inventory";

/// Unmounts on drop, also if the test fails.
struct Mounted;

impl Mounted {
    fn new(node: &str) -> Self {
        guest::run(&["mkfs.ext4", "-q", "-F", node]);
        std::fs::create_dir_all(MOUNT).unwrap();
        guest::run(&["mount", "-t", "ext4", node, MOUNT]);
        Self
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        guest::run(&["umount", MOUNT]);
        std::fs::remove_dir(MOUNT).unwrap();
    }
}

fn units() -> Vec<Value> {
    let listed = guest::lunbd(&["list", "--json"]);
    assert!(listed.status.success(), "{listed:?}");
    let mut listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    serde_json::from_value(listed["units"].take()).unwrap()
}

fn table() -> String {
    String::from_utf8(guest::lunbd(&["list"]).stdout).unwrap()
}

#[test]
fn the_list_shows_units_with_sessions_map_and_mount_and_a_path_that_is_down() {
    let [shared, lone] = ["a1", "b2"].map(|serial| Store::ramdisk(serial, 16 * MIB));
    let mut target = IscsiTarget::new(IQN);
    target.map(3, &shared);
    target.map(4, &lone);
    let iscsid = Iscsid::start();
    let sessions = [0, 1].map(|at| iscsid.login(PORTALS[at], IQN, Timeouts::default()));
    let multipathd = Multipathd::start_mapping_every_disk(NoPath::Fail);
    let single = sessions[0].scanned_disk(4);
    let disks = sessions.each_ref().map(|session| session.scanned_disk(3));
    let map = guest::wait_until("a map of both", LIMIT, || {
        let of = disks.each_ref().map(|disk| multipathd::map_of(disk));
        (of[0].is_some() && of[0] == of[1]).then(|| of[0].clone())?
    });
    assert!(multipathd.knows(&disks[0]));
    let mounted = Mounted::new(&format!("/dev/{map}"));

    let found = units();
    let [ours, other] = found.as_slice() else {
        panic!("{found:?}");
    };
    assert_eq!(ours["names"][0], shared.wwid());
    assert_eq!(ours["serial"], shared.serial());
    assert_eq!(ours["size"], 16 * MIB);
    assert_eq!(ours["mounts"][0]["path"], MOUNT);
    assert_eq!(ours["map"]["node"], format!("/dev/{map}"));
    assert_eq!(ours["map"]["size"], 16 * MIB);
    let uuid = format!("mpath-3{}", shared.wwid().trim_start_matches("naa."));
    assert_eq!(ours["map"]["uuid"], uuid);
    assert_eq!(ours["paths"].as_array().unwrap().len(), 2);
    for (at, (session, disk)) in sessions.iter().zip(&disks).enumerate() {
        let path = &ours["paths"][at];
        assert_eq!(path["hctl"], format!("{}:0:0:3", session.host));
        assert_eq!(path["node"], format!("/dev/{disk}"));
        assert_eq!(path["state"], "running");
        let reach = json!({
            "transport": "iscsi",
            "session": session.id.to_string(),
            "portal": PORTALS[at],
            "target": IQN,
        });
        assert_eq!(path["reach"], reach);
        assert_eq!(path["unreadable"], json!([]));
    }
    assert_eq!([&ours["degraded"], &ours["sizes_differ"]], [false, false]);
    assert_eq!(other["names"][0], lone.wwid());
    assert_eq!(other["paths"][0]["node"], format!("/dev/{single}"));
    assert_eq!(other["mounts"], json!([]));
    let shown = table();
    assert!(
        shown.contains(MOUNT) && shown.contains(PORTALS[1]),
        "{shown}"
    );

    target.portal_down(1);
    sessions[1].wait_until_lost(LIMIT);
    let down = units().into_iter().find(|unit| unit["degraded"] == true);
    let down = down.expect("a unit with a path that is down");
    assert_eq!(down["names"][0], shared.wwid());
    assert_eq!(down["paths"][0], ours["paths"][0]);
    assert_ne!(down["paths"][1]["state"], "running");
    assert_eq!(down["paths"][1]["reach"], ours["paths"][1]["reach"]);
    for stays in ["names", "map", "mounts", "size"] {
        assert_eq!(down[stays], ours[stays], "{stays}");
    }
    let shown = table();
    assert!(shown.contains("1 of 2 running"), "{shown}");
    target.portal_up(1);
    sessions[1].wait_for_state("LOGGED_IN", LIMIT);
    drop(mounted);
}
