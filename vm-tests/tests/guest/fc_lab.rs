//! The lab's Fibre Channel tests itself: libfc, `FCoE` and LIO behave as the other tests
//! assume.

use std::fs;
use std::time::Duration;

use vm_tests::guest;
use vm_tests::guest::fcoe::FcFabric;
use vm_tests::guest::lio::Store;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_lun_scanned_behind_a_port_is_blocked_while_the_link_is_down() {
    let store = Store::ramdisk("fc1", 8 * MIB);
    let mut fabric = FcFabric::up();
    fabric.map(2, &store);
    assert_eq!(fabric.of_rport("port_state"), "Online");
    assert_eq!(fabric.of_rport("port_name"), fabric.target_wwpn());
    let disk = fabric.scanned_disk(2);
    let dir = fabric.device_dir(2);
    let read = |attribute: &str| {
        let text = fs::read_to_string(dir.join(attribute)).unwrap_or_default();
        text.trim().to_owned()
    };
    fs::read(format!("/dev/{disk}")).expect("a read");
    assert_eq!(read("wwid"), store.wwid());
    assert_eq!(read("state"), "running");

    fabric.set_rport("fast_io_fail_tmo", "off");
    fabric.set_rport("dev_loss_tmo", "60");
    fabric.link_down();
    assert_eq!(read("state"), "blocked");
    fabric.link_up();
    assert_eq!(read("state"), "running");
}

#[test]
fn a_port_that_is_lost_for_longer_loses_its_devices() {
    let store = Store::ramdisk("fc2", 8 * MIB);
    let mut fabric = FcFabric::up();
    fabric.map(0, &store);
    fabric.scanned_disk(0);
    let dir = fabric.device_dir(0);
    fabric.set_rport("fast_io_fail_tmo", "1");
    fabric.set_rport("dev_loss_tmo", "3");
    fabric.link_down();
    guest::wait_until("the device to go", LIMIT, || (!dir.exists()).then_some(()));
    fabric.link_up();
    assert!(!dir.exists());
    assert_eq!(fabric.disk(0), None);
    fabric.scanned_disk(0);
}
