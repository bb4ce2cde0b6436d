//! The lab tests itself: kernel, udevd, target and counter behave as the other tests assume.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use vm_tests::guest::uevent_minimum::{Kind, Minimum};
use vm_tests::guest::{self, ScsiDebug, UeventCounter, udevd};

/// The limit for events that must come.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn the_kernel_is_of_the_series_that_was_asked_for() {
    guest::enter();
    let (major, minor) = guest::kernel();
    match guest::series().as_str() {
        "newest" => assert!(
            (major, minor) > (6, 12),
            "{major}.{minor} is not newer than trixie's"
        ),
        series => assert_eq!(format!("{major}.{minor}"), series),
    }
}

#[test]
fn a_real_udevd_answers_and_makes_links_for_a_new_disk() {
    let target = ScsiDebug::with_luns(4);
    assert!(udevd::answers());
    target.scan("0 0 1");
    let disk = guest::wait_until("a disk", LIMIT, || target.disk(1));
    // `udevadm settle` is not enough: from 6.12 on it may return before.
    guest::wait_until("a by-id link", LIMIT, || {
        guest::entries("/dev/disk/by-id").into_iter().find(|link| {
            let target = fs::read_link(format!("/dev/disk/by-id/{link}"));
            target.is_ok_and(|target| target.file_name() == Path::new(&disk).file_name())
        })
    });
}

#[test]
fn a_scsi_debug_host_has_no_device_until_it_is_scanned() {
    let target = ScsiDebug::with_luns(256);
    assert_eq!(target.devices(), Vec::<String>::new());
    target.scan("0 0 7");
    assert_eq!(target.devices(), [format!("{}:0:0:7", target.host())]);
}

#[test]
fn two_hosts_are_two_paths_to_one_unit() {
    let target = ScsiDebug::options().luns(2).paths(2).load();
    let wwids = target.hosts().iter().map(|host| {
        ScsiDebug::scan_on(*host, "0 0 1");
        let disk = guest::wait_until("a disk", LIMIT, || ScsiDebug::disk_on(*host, 1));
        fs::read_to_string(format!("/sys/block/{disk}/device/wwid")).expect("a wwid")
    });
    let wwids: Vec<String> = wwids.collect();
    assert_eq!(wwids.len(), 2);
    assert_eq!(wwids[0], wwids[1]);
}

#[test]
fn one_targeted_scan_and_one_delete_raise_the_kernels_own_minimum_of_uevents() {
    let minimum = Minimum::of_this_kernel();
    let target = ScsiDebug::with_luns(256);
    udevd::settle();
    let raises = |act: &dyn Fn(), wanted: &[Kind]| {
        let counter = UeventCounter::start();
        act();
        minimum.require(&counter, wanted);
    };
    let delete = |lun| fs::write(target.device_dir(lun).join("delete"), "1").unwrap();

    raises(&|| target.scan("0 0 7"), &minimum.first_lun());
    raises(&|| target.scan("0 0 8"), minimum.disk);
    // The first unit exists already; the second LUN does not exist.
    raises(&|| target.scan("0 0 8"), &[]);
    raises(&|| target.scan("0 0 999"), &[]);
    raises(&|| delete(8), minimum.delete);
    raises(&|| delete(7), &minimum.delete_last_lun());
}

#[test]
fn without_udevd_a_disk_raises_the_kernels_events_alone_and_opening_it_none() {
    let minimum = Minimum::of_this_kernel();
    let _absent = udevd::absent();
    assert!(!udevd::answers());
    let target = ScsiDebug::with_luns(4);
    let counter = UeventCounter::start();
    target.scan("0 0 0");
    minimum.require(&counter, &minimum.first_lun());
    let counter = UeventCounter::start();
    target.scan("0 0 1");
    minimum.require(&counter, minimum.disk);
    let node = format!("/dev/{}", target.disk(1).expect("a disk"));
    let counter = UeventCounter::start();
    File::open(&node).expect(&node);
    minimum.require(&counter, &[]);
}

#[test]
fn a_stopped_udevd_does_not_answer_until_it_continues() {
    {
        let _held = udevd::stopped();
        let ping = Command::new("udevadm")
            .args(["control", "--ping", "--timeout=2"])
            .output()
            .unwrap();
        assert!(!ping.status.success(), "{ping:?}");
    }
    assert!(udevd::answers());
}

#[test]
fn the_lunbd_command_is_on_the_path() {
    let output = guest::lunbd(&["--no-such-option"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
