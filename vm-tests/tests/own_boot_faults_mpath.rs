//! Each write to sysfs, each message to multipathd, each ioctl of device-mapper
//! and each flush of an attach and of a detach of a multipath volume fails once
//! in every way, and once never returns: see `guest::faults`.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test panics to fail"
)]

use std::path::Path;

use vm_tests::guest::faults::FaultSweep;
use vm_tests::guest::multipathd::{self, Multipathd, NoPath};
use vm_tests::guest::{self, ScsiDebug};

#[test]
fn each_call_of_a_multipath_attach_and_detach_fails_once_in_every_way() {
    guest::sweep_time_limit();
    let _multipathd = Multipathd::start(NoPath::Fail);
    let (target, sources) = ScsiDebug::two_paths();
    let stands = || !target.devices().is_empty() || !multipathd::maps().is_empty();
    let sweep = FaultSweep::new("multipath", sources, 44, stands)
        .attach_options(&["--multipath", "require", "--min-paths", "2"])
        // The map of a partition is removed by the kernel alone, the map below it by
        // multipathd.
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
        "detach multipathd del map:1",
        "detach multipathd del path:2",
        "detach write delete:2",
    ]);
}
