//! The lab proves itself: kernel, udevd, target and counter are what the other
//! tests take them for.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "a test panics to fail"
)]

use std::time::Duration;

use vm_tests::guest::{self, ScsiDebug, UeventCounter, udevd};

#[test]
fn the_kernel_is_of_the_series_that_was_asked_for() {
    guest::enter();
    println!("{:?}", guest::kernel());
}

#[test]
fn a_real_udevd_answers() {
    guest::enter();
    assert!(udevd::answers());
}

#[test]
fn a_scsi_debug_host_has_no_device_until_it_is_scanned() {
    let target = ScsiDebug::with_luns(256);
    assert_eq!(target.devices(), Vec::<String>::new());
    target.scan("0 0 7");
    assert_eq!(target.devices(), [format!("{}:0:0:7", target.host())]);
    let counter = UeventCounter::start();
    target.scan("0 0 8");
    for event in counter.until_quiet(Duration::from_secs(2)) {
        println!("{event:?}");
    }
}
