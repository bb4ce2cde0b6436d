//! A machine with systemd and lvm2, as Debian installs them: udev's rules activate each
//! complete volume group (`vgchange -aay`).

use std::fs;
use std::path::Path;
use std::time::Duration;

use lunbd::ErrorKind;
use lunbd::error::Stage;
use vm_tests::guest::agent::{attach, detach, engine, soon, unit};
use vm_tests::guest::{self, ScsiDebug, udevd};

const LIMIT: Duration = Duration::from_secs(120);
const GROUP: &str = "vg-of-ours";
/// device-mapper's spelling: a dash in a name is doubled.
const MAP: &str = "vg--of--ours-lv";

/// The maps that hold a disk, by `dm-N` and by device-mapper's name.
fn holders(node: &Path) -> Vec<(String, String)> {
    let disk = node.file_name().unwrap().to_str().unwrap();
    let names = guest::entries(format!("/sys/block/{disk}/holders"));
    let with_name = |map: String| {
        let name = fs::read_to_string(format!("/sys/block/{map}/dm/name")).unwrap_or_default();
        (map, name.trim().to_owned())
    };
    names.into_iter().map(with_name).collect()
}

fn is_held_by_the_volume(node: &Path) -> Option<String> {
    let mut holders = holders(node);
    holders.retain(|(_, name)| name == MAP);
    holders.pop().map(|(map, _)| map)
}

#[test]
fn an_active_lv_refuses_the_detach_by_name_and_one_that_lvm_activates_by_itself_does_too() {
    guest::enter();
    let engine = engine();
    let target = ScsiDebug::options().luns(4).size_mib(32).load();
    let first = attach(&engine, &target, 1);
    let node = first.node.to_str().unwrap();
    guest::run(&["pvcreate", node]);
    guest::run(&["vgcreate", GROUP, node]);
    guest::run(&["lvcreate", "--yes", "--extents", "2", "--name", "lv", GROUP]);
    udevd::settle();
    let is_refused = |node: &Path| {
        let map = is_held_by_the_volume(node).expect("the active volume");
        let failure = detach(&engine, &target, 1).unwrap_err();
        assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
        assert_eq!(failure.stage(), Some(Stage::Claim));
        let named = format!("held by {map}");
        assert!(failure.to_string().contains(&named), "{failure}");
        // The volume is unchanged, and still serves.
        assert_eq!(is_held_by_the_volume(node).as_deref(), Some(&*map));
        fs::read(format!("/dev/mapper/{MAP}")).unwrap();
    };
    is_refused(&first.node);

    // A deactivated volume releases the disk, and nothing activates it again meanwhile.
    guest::run(&["vgchange", "--activate", "n", GROUP]);
    let detachment = detach(&engine, &target, 1).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    udevd::settle();
    assert_eq!(target.devices(), [] as [&str; 0]);
    let maps = guest::run(&["dmsetup", "ls"]);
    assert!(!maps.contains(MAP), "{maps}");

    // The disk comes with its volume: lvm2's rules make systemd activate it in the background,
    // and it then holds the disk like any other user.
    let second = attach(&engine, &target, 1);
    let at_once = is_held_by_the_volume(&second.node).is_some();
    guest::wait_until("lvm2 to activate the volume", LIMIT, || {
        is_held_by_the_volume(&second.node)
    });
    guest::tell(&format!(
        "lvm2 had activated the volume when the attach returned: {at_once}"
    ));
    udevd::settle();
    is_refused(&second.node);
    guest::run(&["vgchange", "--activate", "n", GROUP]);
    let detachment = detach(&engine, &target, 1).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");

    // A detach right after the attach may meet any moment of the activation. It is refused, or
    // it removes a disk without users.
    for _ in 0..5 {
        let attachment = attach(&engine, &target, 1);
        match engine.detach(unit(&target, 1), soon()) {
            Ok(detachment) => {
                assert!(detachment.safe_to_unmap, "{detachment:?}");
                guest::tell("a detach at once came before lvm2");
            }
            Err(failure) => {
                assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
                guest::tell(&format!("a detach at once: {failure}"));
                guest::wait_until("lvm2 to activate the volume", LIMIT, || {
                    is_held_by_the_volume(&attachment.node)
                });
                udevd::settle();
                guest::run(&["vgchange", "--activate", "n", GROUP]);
                detach(&engine, &target, 1).unwrap();
            }
        }
        udevd::settle();
        let maps = guest::run(&["dmsetup", "ls"]);
        assert!(!maps.contains(MAP), "a map of a disk that is gone: {maps}");
    }
}
