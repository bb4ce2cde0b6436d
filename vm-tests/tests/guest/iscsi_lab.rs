//! The lab's iSCSI tests itself: LIO, iscsid and multipathd behave as the other tests assume.

use std::fs;
use std::io::Write;
use std::time::Duration;

use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{self, Iscsid, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};
use vm_tests::guest::{self, udevd};

const IQN: &str = "iqn.2026-01.example:lab";
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn read(path: impl AsRef<std::path::Path>) -> String {
    fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

#[test]
fn a_lun_scanned_on_two_portals_is_one_map_and_nothing_is_left_of_it() {
    {
        let store = Store::ramdisk("1a", 16 * MIB);
        let mut target = IscsiTarget::new(IQN);
        target.map(3, &store);
        let iscsid = Iscsid::start();
        let multipathd = Multipathd::start_mapping_every_disk(NoPath::Fail);
        let sessions = [0, 1].map(|portal| iscsid.login(PORTALS[portal], IQN, Timeouts::default()));
        for session in &sessions {
            let lone = format!("{}:", session.host);
            let devices = guest::entries("/sys/bus/scsi/devices");
            assert!(
                !devices.iter().any(|name| name.starts_with(&lone)),
                "{devices:?}"
            );
        }
        let disks = sessions.each_ref().map(|session| session.scanned_disk(3));
        for session in &sessions {
            assert_eq!(read(session.device_dir(3).join("wwid")), store.wwid());
        }
        let map = guest::wait_until("a map of both", LIMIT, || {
            let of = disks.each_ref().map(|disk| multipathd::map_of(disk));
            (of[0].is_some() && of[0] == of[1]).then(|| of[0].clone())?
        });
        assert_eq!(multipathd::maps(), [map.as_str()]);
        assert!(disks.iter().all(|disk| multipathd.knows(disk)));
        assert_eq!(
            read(format!("/sys/block/{map}/size")),
            (16 * MIB / 512).to_string()
        );
    }
    assert_eq!(multipathd::maps(), [] as [&str; 0]);
    assert_eq!(iscsid::sessions(), []);
    assert_eq!(guest::entries("/sys/kernel/config/target/core"), ["alua"]);
}

#[test]
fn a_portal_without_its_network_fails_its_session_alone_and_serves_it_again_later() {
    let store = Store::file("2b", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(0, &store);
    let iscsid = Iscsid::start();
    let [first, second, third] =
        [0, 1, 2].map(|portal| iscsid.login(PORTALS[portal], IQN, Timeouts::default()));
    let disk = second.scanned_disk(0);
    udevd::settle();
    target.portal_down(1);
    second.wait_for_state("FAILED", LIMIT);
    assert_eq!([first.state(), third.state()], ["LOGGED_IN"; 2]);
    assert_eq!(read(second.device_dir(0).join("state")), "blocked");
    target.portal_up(1);
    second.wait_for_state("LOGGED_IN", LIMIT);
    assert_eq!(read(second.device_dir(0).join("state")), "running");
    fs::read(format!("/dev/{disk}")).expect("a read after the loss");
}

#[test]
fn the_lab_makes_a_second_session_on_one_portal_and_stops_a_target() {
    let target = IscsiTarget::new(IQN);
    let iscsid = Iscsid::start();
    let timeouts = Timeouts {
        replacement: 1,
        ..Timeouts::default()
    };
    let first = iscsid.login(PORTALS[2], IQN, timeouts);
    let second = iscsid.login_again(&first);
    assert_ne!(first, second);
    assert_eq!(iscsid::sessions(), [first.clone(), second.clone()]);
    target.stop();
    first.wait_for_state("FREE", LIMIT);
    target.start();
    first.wait_for_state("LOGGED_IN", LIMIT);
    second.wait_for_state("LOGGED_IN", LIMIT);
    first.logout();
    assert_eq!(iscsid::sessions(), [second]);
}

#[test]
fn the_lab_grows_a_lun_and_puts_another_volume_at_its_number() {
    let [growable, other] = [
        Store::growable("3c", 8 * MIB),
        Store::ramdisk("4d", 8 * MIB),
    ];
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &growable);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let disk = session.scanned_disk(1);
    let size = || read(format!("/sys/block/{disk}/size"));
    assert_eq!(size(), (8 * MIB / 512).to_string());
    growable.grow(12 * MIB);
    fs::write(session.device_dir(1).join("rescan"), "1").unwrap();
    guest::wait_until("the new size", LIMIT, || {
        (size() == (12 * MIB / 512).to_string()).then_some(())
    });

    target.remap(1, &other);
    fs::write(session.device_dir(1).join("rescan"), "1").unwrap();
    guest::wait_until("the other's identity", LIMIT, || {
        (read(session.device_dir(1).join("wwid")) == other.wwid()).then_some(())
    });
}

#[test]
fn what_is_written_is_in_the_stores_file() {
    let store = Store::file("5e", MIB);
    store.set_write_cache(true);
    let mut target = IscsiTarget::new(IQN);
    target.map(0, &store);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let disk = session.scanned_disk(0);
    // The kernel makes the disk's directory before its queue.
    guest::wait_until("a write cache", LIMIT, || {
        let cache = read(format!("/sys/block/{disk}/queue/write_cache"));
        (cache == "write back").then_some(())
    });
    let mut device = fs::OpenOptions::new()
        .write(true)
        .open(format!("/dev/{disk}"))
        .unwrap();
    device.write_all(b"lunbd was here").unwrap();
    device.sync_all().unwrap();
    let content = fs::read(store.path().unwrap()).unwrap();
    assert!(content.starts_with(b"lunbd was here"));
}

#[test]
fn rescan_scsi_bus_finds_the_lun() {
    let store = Store::ramdisk("6f", MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(0, &store);
    target.map(5, &store);
    let iscsid = Iscsid::start();
    let session = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let host = format!("--hosts={}", session.host);
    // Without `-a` the script looks only at targets that already have a device. Without the LUN
    // it takes half a minute.
    let address = ["-a", "--channels=0", "--ids=0", "--luns=5"];
    let said = guest::run(&[&["rescan-scsi-bus.sh", &host], &address[..]].concat());
    assert!(said.contains("1 new or changed device(s) found"), "{said}");
    // The programs that the script calls for multipath maps.
    guest::run(&["which", "multipath", "dmsetup", "sg_inq"]);
    // The script looks at the unit, not at its disk, which appears later.
    guest::wait_until("the disk", LIMIT, || session.disk(5));
}
