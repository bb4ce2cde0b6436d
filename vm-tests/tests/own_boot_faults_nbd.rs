//! Each write to sysfs, each netlink command and each ioctl of an attach and of a
//! detach fails once in every way, and once never returns: the error names the
//! stage, what stands is said, and the next try succeeds.
//!
//! See `guest::faults` for what is asked of each, and `guest::inject` for how a call
//! is taken away from the command.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test panics to fail"
)]

use std::path::Path;
use std::time::Duration;

use vm_tests::guest::agent::unit;
use vm_tests::guest::faults::FaultSweep;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, ScsiDebug};

/// What a slow machine may take.
const LIMIT: Duration = Duration::from_secs(38 * 60);

#[test]
fn each_call_of_a_scsi_attach_and_detach_fails_once_in_every_way() {
    guest::time_limit(LIMIT);
    let target = ScsiDebug::with_luns(2);
    let source = unit(&target, 1).to_string();
    let mut sweep = FaultSweep::new("SCSI", &source, || !target.devices().is_empty());
    sweep.run();
    sweep.conclude(&[
        "attach write scan:1",
        "detach write delete:1",
        "detach fsync:1",
    ]);
}

#[test]
fn each_call_of_an_nbd_attach_and_detach_fails_once_in_every_way() {
    if guest::kernel() < (5, 14) {
        guest::skip("the kernel keeps no backend ids before 5.14");
    }
    guest::time_limit(LIMIT);
    let _module = NbdModule::load(2);
    let store = Store::sparse(8 << 20);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let connected = || {
        let mut names = guest::entries("/sys/block").into_iter();
        names.any(|name| Path::new("/sys/block").join(name).join("pid").exists())
    };
    let mut sweep = FaultSweep::new("NBD", &server.uri("disk"), connected);
    sweep.run();
    sweep.conclude(&["attach netlink command 1:1", "detach netlink command 2:1"]);
}
