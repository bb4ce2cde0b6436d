//! The attach and the detach of an NBD volume: each write to sysfs, each netlink command and
//! each ioctl fails or never returns. Five consecutive seeds cover every call, and 25 cover
//! every call in every way (`guest::faults`).

use std::path::Path;

use vm_tests::guest::agent::unit;
use vm_tests::guest::fault_table::{
    ALL_BUT_EBUSY, ALL_BUT_ENODEV, EBUSY, ENODEV, ERRORS, FAULTS, HANGS, Row,
};
use vm_tests::guest::faults::FaultSweep;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, ScsiDebug};

const SILENT: &str = "a unit that does not answer is detached as the unit that the kernel scanned";
const LOOKS_AGAIN: &str =
    "a device that is gone is what a detach wants: it looks, and deletes again";

/// The hanging call has not returned when the claim begins.
const STUCK: &[&str] = &["quarantined", "timed_out"];

const SCSI: &[Row] = &[
    Row::refused("attach write scan:*", ALL_BUT_ENODEV, "scan"),
    Row::refused_as("attach write scan:*", &[ENODEV], "scan", &["no_such_host"]),
    Row::refused("attach ioctl BLKGETDISKSEQ:*", &FAULTS, "identify"),
    Row::refused_as("attach ioctl SG_IO:*", ERRORS, "identify", &["io"]),
    Row::refused("attach ioctl SG_IO:*", HANGS, "identify"),
    Row::succeeds("detach ioctl BLKGETDISKSEQ:*", ERRORS, SILENT),
    Row::refused_as("detach ioctl BLKGETDISKSEQ:*", HANGS, "claim", STUCK),
    Row::succeeds("detach ioctl SG_IO:*", ERRORS, SILENT),
    Row::refused_as("detach ioctl SG_IO:*", HANGS, "claim", STUCK),
    Row::refused("detach fsync:*", &FAULTS, "flush"),
    Row::refused("detach sync_file_range:*", &FAULTS, "flush"),
    Row::refused("detach ioctl BLKFLSBUF:*", &FAULTS, "flush"),
    Row::refused("detach write delete:*", ALL_BUT_ENODEV, "delete"),
    Row::succeeds("detach write delete:*", &[ENODEV], LOOKS_AGAIN),
];

const TAKEN: &str = "an attach whose connect is answered with EBUSY tries the next device";
const NO_EVENT: &str = "a device that is gone has no event that could be waited for";

const NBD: &[Row] = &[
    Row::refused("attach netlink family:*", ALL_BUT_EBUSY, "connect"),
    Row::succeeds("attach netlink family:*", &[EBUSY], TAKEN),
    Row::refused("attach netlink command 1:*", ALL_BUT_EBUSY, "connect"),
    Row::succeeds("attach netlink command 1:*", &[EBUSY], TAKEN),
    Row::refused("detach fsync:*", &FAULTS, "flush"),
    Row::refused("detach sync_file_range:*", &FAULTS, "flush"),
    Row::refused("detach ioctl BLKFLSBUF:*", &FAULTS, "flush"),
    // A detach by another process than that of the attach asks first whether the device is
    // connected.
    Row::refused("detach netlink family:*", &FAULTS, "reconfigure"),
    Row::refused("detach netlink command 3:*", &FAULTS, "reconfigure"),
    Row::refused("detach netlink command 2:*", &FAULTS, "disconnect"),
    Row::refused("detach write uevent:*", ALL_BUT_ENODEV, "settle"),
    Row::succeeds("detach write uevent:*", &[ENODEV], NO_EVENT),
];

/// The engine sends udev another marked event if udev takes more than ten seconds. That happens
/// on a slow machine only.
fn comes_always(act: &str) -> bool {
    !act.contains(" write uevent:") || act == "detach write uevent:1"
}

#[test]
fn calls_of_a_scsi_attach_and_detach_that_fail_or_hang_end_as_their_table_says() {
    guest::sweep_time_limit();
    let target = ScsiDebug::with_luns(2);
    let source = unit(&target, 1).to_string();
    let stands = || !target.devices().is_empty();
    FaultSweep::new("SCSI", vec![source], SCSI, stands)
        .only(comes_always)
        .run(&[
            "attach write scan:1",
            "attach ioctl SG_IO:1",
            "detach write delete:1",
            "detach fsync:1",
        ]);
}

#[test]
fn calls_of_an_nbd_attach_and_detach_that_fail_or_hang_end_as_their_table_says() {
    guest::sweep_time_limit();
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(8 << 20);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let connected = || {
        let mut names = guest::entries("/sys/block").into_iter();
        names.any(|name| Path::new("/sys/block").join(name).join("pid").exists())
    };
    let source = server.uri("disk");
    FaultSweep::new("NBD", vec![source], NBD, connected)
        .only(comes_always)
        .run(&["attach netlink command 1:1", "detach netlink command 2:1"]);
}
