//! What the demo runs in the guest: one LUN of 256 attached, and what a
//! wildcard scan does instead.

#![allow(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "the story is its output, and it ends where it cannot go on"
)]

use std::fs;
use std::time::Duration;

use vm_tests::guest::{self, ScsiDebug, UeventCounter, udevd};
use vm_tests::job::RESULT_FILE;
use vm_tests::story::{Figures, Run};

const LUNS: u32 = 256;
/// Longer than the pauses between the disks of a wildcard scan.
const QUIET: Duration = Duration::from_secs(2);

fn main() {
    guest::enter();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's release");
    let kernel = kernel.trim().to_owned();
    println!("Linux {kernel}, systemd-udevd, a SCSI target with {LUNS} LUNs.\n");
    let runs = vec![
        run("one targeted scan", "0 0 7"),
        run("a wildcard scan", "- - -"),
    ];
    println!(
        "{:<20} {:>6} {:>15} {:>14}",
        "", "disks", "kernel uevents", "time to quiet"
    );
    for run in &runs {
        #[expect(clippy::cast_precision_loss, reason = "seconds for a reader")]
        let seconds = run.quiet_at as f64 / 1000.0;
        println!(
            "{:<20} {:>6} {:>15} {seconds:>12.1} s",
            run.what,
            run.disks,
            run.uevents_at.len()
        );
    }
    let figures = Figures {
        kernel,
        luns: LUNS,
        runs,
    };
    let json = serde_json::to_vec(&figures).expect("the figures as JSON");
    fs::write(RESULT_FILE, json).expect(RESULT_FILE);
}

fn run(what: &str, scan: &str) -> Run {
    let target = ScsiDebug::with_luns(LUNS);
    println!("{what}: `{scan}` to the scan file of host{}", target.host());
    let counter = UeventCounter::start();
    target.scan(scan);
    let kernel_quiet = counter
        .until_quiet(QUIET)
        .last()
        .map_or(Duration::ZERO, |event| event.at);
    let before_settle = counter.elapsed();
    udevd::settle();
    // udevd may still have been at it when the kernel had nothing more to say.
    let settled = counter.elapsed();
    let quiet = if settled > before_settle + Duration::from_secs(1) {
        settled
    } else {
        kernel_quiet
    };
    let events = counter.until_quiet(QUIET);
    let disks = target.devices().len();
    println!("  {disks} disk(s), {} kernel uevents\n", events.len());
    Run {
        what: what.to_owned(),
        disks,
        uevents_at: events.iter().map(|event| millis(event.at)).collect(),
        quiet_at: millis(quiet),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
