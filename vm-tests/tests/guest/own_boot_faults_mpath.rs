//! The attach and the detach of a multipath volume: each write to sysfs, each message to
//! multipathd, each ioctl of device-mapper and each flush fails or never returns. Five
//! consecutive seeds cover every call, and 25 cover every call in every way (`guest::faults`).
//! Three calls are left out, because their number differs from run to run: the write to
//! `uevent`, and the ioctls that read a map's status and table.

use std::path::Path;

use vm_tests::guest::fault_table::{
    ALL_BUT_ENODEV, EBUSY, EIO, ENODEV, ERRORS, ETIMEDOUT, FAULTS, HANGS, Row,
};
use vm_tests::guest::faults::FaultSweep;
use vm_tests::guest::inject::Fault;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};
use vm_tests::guest::{self, ScsiDebug};

const SILENT: &str = "a path that does not answer is detached as the unit that the kernel scanned";
const OTHER_PATH: &str = "the other path flushes the unit's cache after all pages are written";
const WRITTEN_NEXT: &str = "the call after it writes the pages that this one should have dropped";
const WRITTEN_AGAIN: &str =
    "the claimed path is written back in full, and no longer through its map";
/// The kernel reports a failed write so.
const FAILED_WRITE: &[Fault] = &[EIO, ETIMEDOUT];
const NO_FAILED_WRITE: &[Fault] = &[EBUSY, ENODEV];
const TRIED_AGAIN: &str = "somebody had it open for a moment: the removal is tried again";
const LOOKS_AGAIN: &str =
    "a device that is gone is what a detach wants: it looks, and removes it again";
const WRITTEN_ANYWAY: &str = "the calls after it write the pages and flush them";
const BY_THE_KERNEL: &str = "what multipathd does not remove the kernel is told to remove";
const DELETED_ANYWAY: &str = "multipathd learns from the kernel's own event that the path is gone";
const TOLD_AGAIN: &str = "a multipathd that went away may have been restarted: it is told again";
/// The hanging call has not returned when the claim begins.
const STUCK: &[&str] = &["quarantined", "timed_out"];
const TOO_FEW: &[&str] = &["too_few_paths"];

const MULTIPATH: &[Row] = &[
    Row::refused_as("attach write scan:*", &FAULTS, "scan", TOO_FEW),
    Row::refused_as("attach ioctl BLKGETDISKSEQ:*", &FAULTS, "identify", TOO_FEW),
    Row::refused_as("attach ioctl SG_IO:*", &FAULTS, "identify", TOO_FEW),
    Row::succeeds("attach multipathd add path:*", ERRORS, TOLD_AGAIN),
    Row::refused("attach multipathd add path:*", HANGS, "map"),
    Row::succeeds("detach ioctl BLKGETDISKSEQ:*", ERRORS, SILENT),
    Row::succeeds("detach ioctl SG_IO:*", ERRORS, SILENT),
    // First the map of the partition, then the map, then the paths' own pages before their
    // claims, and last the claimed paths.
    Row::refused("detach fsync:1", &FAULTS, "flush"),
    Row::refused("detach ioctl BLKFLSBUF:1", ALL_BUT_ENODEV, "flush"),
    Row::succeeds("detach ioctl BLKFLSBUF:1", &[ENODEV], WRITTEN_ANYWAY),
    Row::refused("detach sync_file_range:1", &FAULTS, "flush"),
    Row::refused("detach fsync:2", &FAULTS, "flush"),
    Row::refused("detach sync_file_range:2", &FAULTS, "flush"),
    Row::refused("detach ioctl BLKFLSBUF:2", ALL_BUT_ENODEV, "flush"),
    Row::succeeds("detach ioctl BLKFLSBUF:2", &[ENODEV], WRITTEN_ANYWAY),
    Row::succeeds("detach ioctl BLKFLSBUF:3", ERRORS, WRITTEN_NEXT),
    Row::succeeds("detach ioctl BLKFLSBUF:4", ERRORS, WRITTEN_NEXT),
    Row::refused("detach sync_file_range:3", FAILED_WRITE, "flush"),
    Row::refused("detach sync_file_range:4", FAILED_WRITE, "flush"),
    Row::succeeds("detach sync_file_range:3", NO_FAILED_WRITE, WRITTEN_AGAIN),
    Row::succeeds("detach sync_file_range:4", NO_FAILED_WRITE, WRITTEN_AGAIN),
    Row::succeeds("detach fsync:3", ERRORS, OTHER_PATH),
    Row::refused("detach sync_file_range:5", FAILED_WRITE, "flush"),
    Row::succeeds("detach sync_file_range:5", NO_FAILED_WRITE, OTHER_PATH),
    Row::succeeds("detach ioctl BLKFLSBUF:5", ERRORS, OTHER_PATH),
    Row::succeeds("detach fsync:4", ERRORS, OTHER_PATH),
    Row::refused("detach sync_file_range:6", FAILED_WRITE, "flush"),
    Row::succeeds("detach sync_file_range:6", NO_FAILED_WRITE, OTHER_PATH),
    Row::succeeds("detach ioctl BLKFLSBUF:6", ERRORS, OTHER_PATH),
    Row::refused_as("detach ioctl BLKGETDISKSEQ:*", HANGS, "claim", STUCK),
    Row::refused_as("detach ioctl SG_IO:*", HANGS, "claim", STUCK),
    Row::refused_as("detach ioctl BLKFLSBUF:3", HANGS, "claim", STUCK),
    Row::refused_as("detach sync_file_range:3", HANGS, "claim", STUCK),
    Row::refused_as("detach sync_file_range:4", HANGS, "claim", STUCK),
    Row::succeeds("detach sync_file_range:5", HANGS, OTHER_PATH),
    Row::succeeds("detach sync_file_range:6", HANGS, OTHER_PATH),
    Row::refused_as("detach ioctl BLKFLSBUF:4", HANGS, "claim", STUCK),
    Row::succeeds("detach fsync:3", HANGS, OTHER_PATH),
    Row::succeeds("detach ioctl BLKFLSBUF:5", HANGS, OTHER_PATH),
    Row::succeeds("detach fsync:4", HANGS, OTHER_PATH),
    Row::succeeds("detach ioctl BLKFLSBUF:6", HANGS, OTHER_PATH),
    // This removes the map of the partition; multipathd removes the map below it.
    Row::refused_as(
        "detach dm remove:*",
        &[EIO, ETIMEDOUT],
        "remove_map",
        &["io"],
    ),
    Row::succeeds("detach dm remove:*", &[EBUSY], TRIED_AGAIN),
    Row::succeeds("detach dm remove:*", &[ENODEV], LOOKS_AGAIN),
    Row::refused("detach dm remove:*", HANGS, "remove_map"),
    Row::succeeds("detach multipathd del map:*", &FAULTS, BY_THE_KERNEL),
    Row::succeeds("detach multipathd del path:*", &FAULTS, DELETED_ANYWAY),
    Row::succeeds("detach multipathd show paths:*", ERRORS, DELETED_ANYWAY),
    Row::refused("detach multipathd show paths:*", HANGS, "forget"),
    Row::refused("detach write delete:*", ALL_BUT_ENODEV, "delete"),
    Row::succeeds("detach write delete:*", &[ENODEV], LOOKS_AGAIN),
];

/// Calls that are repeated while udev or a flush is slow do not occur in every run.
fn comes_always(act: &str) -> bool {
    let repeated = [" write uevent:", " dm status:", " dm table:"];
    !repeated.iter().any(|call| act.contains(call))
}

#[test]
fn calls_of_a_multipath_attach_and_detach_that_fail_or_hang_end_as_their_table_says() {
    guest::sweep_time_limit();
    let _multipathd = Multipathd::start_mapping_every_disk(NoPath::Fail);
    let (target, sources) = ScsiDebug::two_paths();
    let stands = || !target.devices().is_empty() || !multipathd::maps().is_empty();
    let sweep = FaultSweep::new("multipath", sources, MULTIPATH, stands)
        .only(comes_always)
        .attach_options(&["--multipath", "require", "--min-paths", "2"])
        // The kernel alone removes the map of a partition; multipathd removes the map below it.
        .between(|| {
            let maps = multipathd::maps();
            let [map] = &*maps else {
                panic!("{maps:?}");
            };
            multipathd::make_a_partition(&Path::new("/dev").join(map));
        });
    sweep.run(&[
        "attach write scan:2",
        "attach ioctl SG_IO:1",
        "attach multipathd add path:2",
        "detach dm remove:1",
        "detach fsync:4",
        "detach ioctl BLKFLSBUF:6",
        "detach multipathd del map:1",
        "detach multipathd del path:2",
        "detach write delete:2",
    ]);
}
