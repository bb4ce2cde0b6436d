//! Each write to sysfs, each netlink command and each ioctl of an attach and of a
//! detach fails once in every way, and once never returns: see
//! `guest::faults`.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test panics to fail"
)]

use std::path::Path;

use vm_tests::guest::agent::unit;
use vm_tests::guest::faults::FaultSweep;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, ScsiDebug};

/// One act of six is left out where the sweep is not whole, the others have one
/// fault each.
const ONE_IN: usize = 6;

#[test]
fn each_call_of_a_scsi_attach_and_detach_fails_once_in_every_way() {
    guest::sweep_time_limit();
    let target = ScsiDebug::with_luns(2);
    let source = unit(&target, 1).to_string();
    let stands = || !target.devices().is_empty();
    FaultSweep::new("SCSI", vec![source], ONE_IN, stands).run(&[
        "attach write scan:1",
        "attach ioctl SG_IO:1",
        "detach write delete:1",
        "detach fsync:1",
    ]);
}

#[test]
fn each_call_of_an_nbd_attach_and_detach_fails_once_in_every_way() {
    if guest::kernel() < (5, 14) {
        guest::skip("the kernel keeps no backend ids before 5.14");
    }
    guest::sweep_time_limit();
    let _module = NbdModule::load(2);
    let store = Store::sparse(8 << 20);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let connected = || {
        let mut names = guest::entries("/sys/block").into_iter();
        names.any(|name| Path::new("/sys/block").join(name).join("pid").exists())
    };
    let source = server.uri("disk");
    FaultSweep::new("NBD", vec![source], ONE_IN, connected)
        .run(&["attach netlink command 1:1", "detach netlink command 2:1"]);
}
