use std::fs;
use std::os::unix::fs::symlink;

use super::*;
use crate::engine::detach::resolve::ResolvedUnit;
use crate::engine::detach::scsi::unit_of;
use crate::engine::first_names::FirstNames;
use crate::engine::unit::paths::{UnitPaths, paths_of};
use crate::engine::unit::place::describe_unproven_remains;
use crate::kernel::Roots;
use crate::scsi::Units;

/// A machine with two devices that have the same page 83h.
fn two_devices(kind: u8, designator: &[u8]) -> (tempfile::TempDir, Engine) {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let length = u8::try_from(designator.len()).unwrap();
    let mut page = vec![0, 0x83, 0, length + 4, 2, kind, 0, length];
    page.extend(designator);
    for hctl in ["2:0:0:1", "3:0:0:1"] {
        let (dir, bus) = (roots.sysfs.join("devices").join(hctl), "bus/scsi/devices");
        fs::create_dir_all(&dir).unwrap();
        fs::create_dir_all(roots.sysfs.join(bus)).unwrap();
        symlink(&dir, roots.sysfs.join(bus).join(hctl)).unwrap();
        fs::write(dir.join("vpd_pg83"), &page).unwrap();
        fs::write(dir.join("state"), "running\n").unwrap();
    }
    (root, Engine::start(roots).unwrap())
}

fn found(engine: &Engine, name: &str) -> usize {
    let names = Identity::of([name.parse().unwrap()]);
    let soon = Deadline::after(Duration::from_secs(30));
    paths_of(engine, &names, &[], Vec::new(), soon)
        .unwrap()
        .len()
}

#[test]
fn a_device_that_cannot_be_read_is_not_taken_for_another_units() {
    let (_root, engine) = two_devices(3, &[0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4]);
    let page = engine.roots().sysfs.join("devices/3:0:0:1/vpd_pg83");
    fs::remove_file(&page).unwrap();
    fs::create_dir(page).unwrap();
    let names = Identity::of(["naa.5000c500a1b2c3d4".parse().unwrap()]);
    let soon = Deadline::after(Duration::from_secs(5));
    assert!(paths_of(&engine, &names, &[], Vec::new(), soon).is_err());
}

#[test]
fn a_device_that_somebody_takes_away_is_no_other_unit_than_the_expected_one() {
    let (_root, engine) = two_devices(3, &[0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4]);
    let devices = ScsiDevice::all(engine.roots()).unwrap();
    let going = engine.roots().sysfs.join("devices/2:0:0:1");
    let look = || {
        let soon = Deadline::after(Duration::from_secs(30));
        let none = Identity::default();
        paths_of(&engine, &none, &devices, Vec::new(), soon).unwrap()
    };
    let expected: Wwid = "naa.5000c500a1b2c3d4".parse().unwrap();
    let names =
        |known: &[KnownPath]| unit_of(&engine, &ResolvedUnit::default(), known, Some(&expected));
    // The page is gone, and the device's directory stays until its cache is written.
    fs::remove_file(going.join("vpd_pg83")).unwrap();
    let known = look();
    assert!(!known.iter().any(|path| path.is_being_removed));
    let error = names(&known).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch);
    fs::remove_file(going.join("state")).unwrap();
    let known = look();
    let leaves: Vec<bool> = known.iter().map(|path| path.is_being_removed).collect();
    assert_eq!(leaves, [true, false]);
    assert_eq!(names(&known).unwrap(), Identity::of([expected.clone()]));
}

#[test]
fn a_path_whose_disk_has_come_since_it_was_looked_at_is_not_taken_as_it_was() {
    let (_root, engine) = two_devices(3, &[0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4]);
    let devices = ScsiDevice::all(engine.roots()).unwrap();
    let soon = Deadline::after(Duration::from_secs(30));
    let look = |known| {
        let paths = paths_of(&engine, &Identity::default(), &devices, known, soon);
        paths.unwrap()
    };
    let disk = |path: &KnownPath| path.disk.as_ref().map(|disk| disk.name().to_owned());
    let mut known = look(Vec::new());
    assert!(known.iter().all(|path| path.disk.is_none()));
    // The other device was not read again, so its entry stays the same.
    known[1].timed_out = true;
    for name in ["sdb", "sdc"] {
        let parent = engine.roots().sysfs.join("devices/2:0:0:1/block");
        fs::create_dir_all(parent.join(name)).unwrap();
        fs::write(parent.join(name).join("dev"), "8:16\n").unwrap();
        // The device is offline, so its identity is not read.
        fs::write(parent.join("../state"), "offline\n").unwrap();
        known = look(known);
        assert_eq!(disk(&known[0]).as_deref(), Some(name));
        assert!(known[1].disk.is_none() && known[1].timed_out);
        fs::remove_dir_all(parent).unwrap();
    }
}

#[test]
fn a_device_with_the_units_name_and_another_text_and_serial_number_is_left_and_doubted() {
    let naa = [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];
    let (_root, engine) = two_devices(3, &naa);
    for (hctl, number) in [("2:0:0:1", b'1'), ("3:0:0:1", b'2')] {
        let dir = engine.roots().sysfs.join("devices").join(hctl);
        let text = [&[2, 1, 0, 9][..], b"VENDOR  ", &[number]].concat();
        let page = [&[0, 0x83, 0, 25, 1, 3, 0, 8][..], &naa, &text].concat();
        fs::write(dir.join("vpd_pg83"), page).unwrap();
        fs::write(dir.join("vpd_pg80"), [0, 0x80, 0, 1, number]).unwrap();
    }
    let devices = ScsiDevice::all(engine.roots()).unwrap();
    let named_devices = &devices[..1];
    let soon = Deadline::after(Duration::from_secs(30));
    let look = |unit: &Identity| paths_of(&engine, unit, named_devices, Vec::new(), soon).unwrap();
    let known = look(&Identity::default());
    let unit = unit_of(&engine, &ResolvedUnit::default(), &known, None).unwrap();
    assert_eq!(look(&unit).len(), 1);
    let unproven_paths = UnitPaths::find(&engine, &unit, named_devices, Vec::new(), soon);
    let unproven_paths = unproven_paths.unwrap().unproven_paths;
    let doubts = describe_unproven_remains(&engine, &unit, named_devices, &unproven_paths).unwrap();
    assert!(
        doubts.len() == 1 && doubts[0].contains("3:0:0:1"),
        "{doubts:?}"
    );
}

#[test]
fn a_path_that_has_a_unique_name_of_the_unit_beside_a_stronger_one_is_found() {
    let naa = [
        0x60, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4, 0, 0, 0, 0, 0, 0, 0, 1,
    ];
    let (_root, engine) = two_devices(3, &naa);
    let eui = [0, 0x25, 0x38, 0xa1, 0xb2, 0xc3, 0xd4, 0xe5];
    let page = [
        &[0, 0x83, 0, 32, 1, 3, 0, 16][..],
        &naa,
        &[1, 2, 0, 8],
        &eui,
    ]
    .concat();
    let devices = engine.roots().sysfs.join("devices");
    fs::write(devices.join("3:0:0:1/vpd_pg83"), page).unwrap();
    assert_eq!(found(&engine, "eui.002538a1b2c3d4e5"), 1);
    assert_eq!(found(&engine, "naa.6000c500a1b2c3d40000000000000001"), 2);
}

#[test]
fn a_disk_without_a_name_that_does_not_answer_may_be_a_path_that_is_left() {
    let naa = [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];
    let (_root, engine) = two_devices(3, &naa);
    let silent = engine.roots().sysfs.join("devices/3:0:0:1");
    fs::remove_file(silent.join("vpd_pg83")).unwrap();
    fs::write(silent.join("state"), "offline\n").unwrap();
    let unit = Identity::of(["naa.5000c500a1b2c3d4".parse().unwrap()]);
    let doubts = || {
        let soon = Deadline::after(Duration::from_secs(30));
        let found = UnitPaths::find(&engine, &unit, &[], Vec::new(), soon).unwrap();
        describe_unproven_remains(&engine, &unit, &[], &found.unproven_paths).unwrap()
    };
    assert!(doubts().is_empty(), "it is no disk: {:?}", doubts());
    let disk = silent.join("block/sdb");
    fs::create_dir_all(&disk).unwrap();
    fs::write(disk.join("dev"), "8:16\n").unwrap();
    let found = doubts();
    assert!(
        found.len() == 1 && found[0].contains("3:0:0:1 does not answer"),
        "{found:?}"
    );
    fs::write(disk.join("removable"), "1\n").unwrap();
    assert!(doubts().is_empty(), "a card reader: {:?}", doubts());
}

#[test]
fn a_path_that_the_index_has_missed_is_found_before_none_is_said_to_be_left() {
    let naa = [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];
    let (_root, mut engine) = two_devices(3, &naa);
    let devices = engine.roots().sysfs.join("devices");
    // No event and no write tells that the kernel has read this page again.
    let page = devices.join("3:0:0:1/vpd_pg83");
    let silent = fs::read(&page).unwrap();
    let mut of_another_unit = silent.clone();
    *of_another_unit.last_mut().unwrap() += 1;
    fs::write(&page, of_another_unit).unwrap();
    // A device without a name may be any unit.
    fs::remove_file(devices.join("2:0:0:1/vpd_pg83")).unwrap();
    for hctl in ["2:0:0:1", "3:0:0:1"] {
        fs::write(devices.join(hctl).join("rescan"), "").unwrap();
    }
    let (units, _events) = Units::for_test();
    *engine.units.get_mut() = units;
    assert_eq!(found(&engine, "naa.5000c500a1b2c3d4"), 0);
    fs::write(&page, silent).unwrap();
    assert_eq!(found(&engine, "naa.5000c500a1b2c3d4"), 1);
}

#[test]
fn paths_are_gathered_by_a_registered_name_and_not_by_a_vendors_text() {
    let naa = [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];
    let (_root, engine) = two_devices(3, &naa);
    assert_eq!(found(&engine, "naa.5000c500a1b2c3d4"), 2);
    assert_eq!(found(&engine, "naa.5000c500a1b2c3d5"), 0);
    let (_root, engine) = two_devices(1, b"VENDOR  HARDDISK");
    assert_eq!(found(&engine, "t10.VENDOR_HARDDISK"), 0);
}

#[test]
fn a_rescanned_disk_is_the_unit_that_it_was_first_and_a_doubt_for_the_one_that_it_reaches() {
    let [ours, theirs] = [
        [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4],
        [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd5],
    ];
    let (_root, engine) = two_devices(3, &ours);
    let roots = engine.roots();
    let devices = ScsiDevice::all(roots).unwrap();
    let dir = roots.sysfs.join("devices/3:0:0:1");
    fs::create_dir_all(dir.join("block/sdb")).unwrap();
    fs::write(dir.join("block/sdb/dev"), "8:16\n").unwrap();
    fs::write(dir.join("state"), "offline\n").unwrap();
    let disk = devices[1].disk().unwrap().unwrap();
    let record = FirstNames::of(roots, devices[1].hctl(), &disk).unwrap();
    let unit = |naa: [u8; 8]| Identity::of([Wwid::naa(&naa).unwrap()]);
    record.write_if_absent(&unit(ours)).unwrap();
    let page = [&[0, 0x83, 0, 12, 2, 3, 0, 8][..], &theirs].concat();
    fs::write(dir.join("vpd_pg83"), page).unwrap();

    let soon = Deadline::after(Duration::from_secs(30));
    let known = read_path(&engine, &devices[1], soon).unwrap().identity_now;
    let (was, now) = (unit(ours), unit(theirs));
    assert_eq!(known, PathIdentity::Replaced { was, now });
    let named = |naa| devices_named(&engine, unit(naa).wwid().unwrap()).unwrap();
    assert_eq!(named(ours), devices);
    assert_eq!(named(theirs), []);
    assert_eq!(found(&engine, "naa.5000c500a1b2c3d4"), 2);
    let theirs = unit(theirs);
    let found = UnitPaths::find(&engine, &theirs, &[], Vec::new(), soon).unwrap();
    assert!(found.paths.is_empty(), "{found:?}");
    let doubts = describe_unproven_remains(&engine, &theirs, &[], &found.unproven_paths).unwrap();
    let is_doubted = doubts.len() == 1 && doubts[0].contains("3:0:0:1 reports this unit's name");
    assert!(is_doubted, "{doubts:?}");
}
