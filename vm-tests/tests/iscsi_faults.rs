//! Each command to the kernel's iSCSI of a login and of a logout, and each step of the
//! login on our own socket, fails once in every way, and once never returns: the error
//! names the stage, what stands is known, and the next try succeeds.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test panics to fail"
)]

use vm_tests::guest;
use vm_tests::guest::faults::FaultSweep;
use vm_tests::guest::iscsi_target::IscsiTarget;
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::sessions;
use vm_tests::guest::lio::Store;

/// All but those settings that come after the names: one stands for them.
fn is_tried(act: &str) -> bool {
    /// `MAX_RECV_DLENGTH`, and what names a session.
    const SET: [&str; 6] = ["0", "32", "15", "34", "17", "18"];
    match act.strip_prefix("iscsi set ") {
        Some(param) => SET.iter().any(|set| param.split(':').next() == Some(set)),
        None => act.starts_with("iscsi "),
    }
}

#[test]
fn each_step_of_a_login_and_a_logout_fails_once_in_every_way() {
    guest::sweep_time_limit();
    iscsi_tcp::prepare();
    let mut target = IscsiTarget::new("iqn.2026-01.example:faults");
    target.map(1, &Store::ramdisk("f1", 8 << 20));
    let source = target.uri(&[0], 1);
    let stands = || !sessions().is_empty();
    FaultSweep::new("iSCSI", vec![source], 21, stands)
        .attach_options(&["--log-in"])
        .only(is_tried)
        .run(&["attach iscsi connect:1", "detach iscsi event 27:1"]);
    nothing_is_left();
}
