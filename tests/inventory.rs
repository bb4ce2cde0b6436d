//! What the engine finds on a machine that is a directory, small and large.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test panics to fail")]

#[allow(dead_code, reason = "each suite uses a part of it")]
mod machine;

use std::fs;
use std::os::unix::fs::symlink;

use lunbd::Engine;
use lunbd::engine::{InventoryUnit, ScsiUnit, UnitKind};
use machine::san::{San, TARGET};

fn units(san: &San) -> Vec<InventoryUnit> {
    let engine = Engine::start(san.machine.roots()).unwrap();
    engine.inventory().unwrap().units
}

fn scsi(unit: &InventoryUnit) -> &ScsiUnit {
    let UnitKind::Scsi(scsi) = &unit.kind else {
        panic!("{unit:?}");
    };
    scsi
}

fn addresses(unit: &InventoryUnit) -> Vec<String> {
    let paths = &scsi(unit).paths;
    paths.iter().map(|path| path.hctl.to_string()).collect()
}

fn set(san: &San, host: u32, lun: u32, attribute: &str, text: &str) {
    let file = format!("sys/{}/{attribute}", San::device_dir(host, lun));
    san.machine.write(&file, text);
}

/// Makes a read of the attribute fail, as with a faulty device: here with `EISDIR`.
fn break_attribute(san: &San, host: u32, lun: u32, attribute: &str) {
    let file = format!("sys/{}/{attribute}", San::device_dir(host, lun));
    let file = san.machine.path(&file);
    fs::remove_file(&file).unwrap();
    fs::create_dir(file).unwrap();
}

#[test]
fn paths_of_one_name_are_one_unit_with_their_map_and_where_it_is_mounted() {
    let mut san = San::new();
    for host in [3, 4] {
        san.session(host);
    }
    let second = san.disk(4, 9, Some(7));
    let first = san.disk(3, 9, Some(7));
    san.disk(3, 10, Some(8));
    san.map(7, &[&first, &second]);
    let volume = san.stack("LVM-x", "vg-data", &["dm-0"]);
    san.mount(&volume, "/srv/a\\040b");
    san.write_mounts();

    let units = units(&san);
    assert_eq!(units.len(), 2);
    let unit = scsi(&units[0]);
    assert_eq!(addresses(&units[0]), ["3:0:0:9", "4:0:0:9"]);
    let name = "naa.60014051000000000000000000000007";
    assert_eq!(unit.identity.wwid().unwrap().to_string(), name);
    assert_eq!(unit.identity.serial.as_deref(), Some("00000007"));
    let path = &unit.paths[0];
    assert_eq!(path.node, Some(san.machine.path(&format!("dev/{first}"))));
    assert_eq!(path.devno.unwrap().to_string(), "8:16");
    assert_eq!(path.diskseq.unwrap().0, 2);
    assert_eq!(path.size, Some(1 << 20));
    assert_eq!(path.state.as_ref().unwrap().as_str(), "running");
    assert_eq!(
        path.reach.as_ref().unwrap().to_string(),
        format!("session 3, 10.0.0.3:3260, {TARGET}")
    );
    assert!(path.unreadable.is_empty(), "{path:?}");
    let map = unit.map.as_ref().unwrap();
    assert_eq!((map.name.as_str(), map.size), ("mpath7", Some(1 << 20)));
    assert_eq!(map.uuid, "mpath-360014051000000000000000000000007");
    assert_eq!(map.node, san.machine.path("dev/dm-0"));
    assert!(!unit.degraded && !unit.sizes_differ);
    assert_eq!(units[0].size, Some(1 << 20));
    assert_eq!(units[0].holders, ["dm-1"]);
    assert_eq!(units[0].mounts.len(), 1);
    assert_eq!(units[0].mounts[0].path.to_str(), Some("/srv/a b"));
    // The other unit has no map.
    assert_eq!(addresses(&units[1]), ["3:0:0:10"]);
    assert_eq!(scsi(&units[1]).map, None);
    assert!(units[1].mounts.is_empty() && units[1].holders.is_empty());
}

#[test]
fn a_path_that_does_not_run_degrades_its_unit_and_different_path_sizes_are_flagged() {
    let mut san = San::new();
    for (host, unit) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        san.disk(host, unit, Some(unit));
    }
    set(&san, 2, 1, "state", "transport-offline\n");
    let grown = format!("block/{}/size", "sdd");
    set(&san, 2, 2, &grown, "4096\n");
    let units = units(&san);
    let flags = units
        .iter()
        .map(|unit| (scsi(unit).degraded, scsi(unit).sizes_differ));
    assert_eq!(flags.collect::<Vec<_>>(), [(true, false), (false, true)]);
    let states = scsi(&units[0]).paths.iter();
    let states: Vec<_> = states
        .map(|path| path.state.as_ref().unwrap().as_str())
        .collect();
    assert_eq!(states, ["running", "transport-offline"]);
}

#[test]
fn what_cannot_be_read_of_one_path_is_data_about_it() {
    let mut san = San::new();
    let name = san.disk(1, 0, Some(1));
    san.disk(2, 0, Some(1));
    for attribute in ["state", &format!("block/{name}/size")] {
        break_attribute(&san, 1, 0, attribute);
    }
    // This path leads to the same unit, but cannot report it.
    san.disk(3, 0, Some(1));
    break_attribute(&san, 3, 0, "vpd_pg83");

    let units = units(&san);
    assert_eq!(units.len(), 2);
    assert_eq!(addresses(&units[0]), ["1:0:0:0", "2:0:0:0"]);
    let unit = scsi(&units[0]);
    assert!(unit.degraded && !unit.sizes_differ);
    let path = &unit.paths[0];
    assert_eq!((path.size, path.state.as_ref()), (None, None));
    assert_eq!(path.unreadable.len(), 2, "{path:?}");
    assert!(
        path.unreadable[1].starts_with("state: cannot read"),
        "{path:?}"
    );
    assert!(unit.paths[1].unreadable.is_empty());
    assert_eq!(units[0].size, Some(1 << 20));
    assert_eq!(scsi(&units[1]).identity.wwid(), None);
    assert!(scsi(&units[1]).paths[0].unreadable[0].starts_with("identity: "));
}

#[test]
fn a_device_without_a_name_is_a_unit_of_its_own_and_one_that_went_away_is_none() {
    let mut san = San::new();
    for host in [1, 2] {
        san.disk(host, 0, None);
        san.disk(host, 1, Some(1));
    }
    // One device went away completely after it was listed, and one partly.
    let gone = san.machine.path(&format!("sys/{}", San::device_dir(1, 1)));
    fs::remove_dir_all(gone).unwrap();
    let half = San::device_dir(2, 1);
    fs::remove_file(san.machine.path(&format!("sys/{half}/state"))).unwrap();
    // These are not disks either.
    san.machine.write("sys/bus/scsi/devices/host1/type", "");
    san.disk(3, 0, Some(3));
    let without_disk = san.disk(3, 1, Some(4));
    for lun in [0, 1] {
        set(&san, 3, lun, "type", "5\n");
    }
    let block = san.machine.path("sys/block");
    fs::remove_file(block.join(without_disk)).unwrap();
    fs::remove_file(block.join("sde")).unwrap();
    let drive = format!("../{}/block/sr0", San::device_dir(3, 0));
    symlink(drive, block.join("sr0")).unwrap();
    let found: Vec<_> = units(&san).iter().map(addresses).collect();
    assert_eq!(found, [["1:0:0:0"], ["2:0:0:0"]]);
}

#[test]
fn of_a_disk_that_was_replaced_while_it_was_looked_at_the_later_is_shown() {
    let mut san = San::new();
    let first = san.disk(1, 0, Some(1));
    let device = San::device_dir(1, 0);
    for (name, life) in [("sdy", 7), ("sdz", 8), ("sdx", 5)] {
        let event = format!("MAJOR=8\nMINOR=16\nDISKSEQ={life}\n");
        let block = format!("{device}/block/{name}");
        san.machine.write(&format!("sys/{block}/uevent"), &event);
        let link = san.machine.path(&format!("sys/block/{name}"));
        symlink(format!("../{block}"), link).unwrap();
    }
    let units = units(&san);
    assert_eq!(addresses(&units[0]), ["1:0:0:0"]);
    let node = scsi(&units[0]).paths[0].node.clone().unwrap();
    assert!(node.ends_with("sdz"), "{node:?}, and not {first}");
}

#[test]
fn a_vendors_text_gathers_no_paths() {
    let mut san = San::new();
    for host in [1, 2] {
        san.disk(host, 0, None);
        let page = "\0\u{3}\0\u{14}\u{2}\u{1}\0\u{10}VENDOR  HARDDISK";
        set(&san, host, 0, "vpd_pg83", page);
    }
    let units = units(&san);
    assert_eq!(units.len(), 2);
    let name = scsi(&units[1]).identity.wwid().unwrap().to_string();
    assert_eq!(name, "t10.VENDOR_HARDDISK");
}

#[test]
fn a_device_that_has_no_disk_yet_is_shown_without_one() {
    let mut san = San::new();
    let name = san.disk(1, 0, Some(1));
    fs::remove_file(san.machine.path(&format!("sys/block/{name}"))).unwrap();
    let units = units(&san);
    let path = &scsi(&units[0]).paths[0];
    assert_eq!(path.node, None);
    assert_eq!(path.state.as_ref().unwrap().as_str(), "running");
    assert_eq!(units[0].size, None);
}

#[test]
fn ten_thousand_disks_are_five_thousand_units() {
    let san = San::of_ten_thousand();
    let units = units(&san);
    assert_eq!(units.len(), 5000);
    let count = |is: &dyn Fn(&InventoryUnit) -> bool| units.iter().filter(|unit| is(unit)).count();
    assert_eq!(count(&|unit| scsi(unit).paths.len() == 2), 5000);
    assert_eq!(count(&|unit| scsi(unit).map.is_some()), 500);
    assert_eq!(count(&|unit| unit.mounts.len() == 1), 250);
    assert_eq!(count(&|unit| scsi(unit).degraded), 50);
    assert_eq!(count(&|unit| scsi(unit).sizes_differ), 0);
    assert_eq!(count(&|unit| !unit.holders.is_empty()), 0);
    let paths = || units.iter().flat_map(|unit| &scsi(unit).paths);
    assert!(paths().all(|path| path.reach.is_some() && path.unreadable.is_empty()));
    let nodes: std::collections::BTreeSet<_> = paths().map(|path| &path.node).collect();
    assert_eq!(nodes.len(), 10_000);
}
