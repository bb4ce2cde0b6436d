//! What the demo runs in the guest: one LUN of 256 attached by `lunbd`, read,
//! detached; then what a wildcard scan does instead.

#![allow(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "the story is its output, and it ends where it cannot go on"
)]

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use vm_tests::guest::{self, ScsiDebug, UeventCounter, udevd};
use vm_tests::job::RESULT_FILE;
use vm_tests::story::{Figures, Run};

const LUNS: u32 = 256;
const LUN: u32 = 77;
/// Longer than the pauses between the disks of a wildcard scan.
const QUIET: Duration = Duration::from_secs(2);

fn main() {
    guest::enter();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's release");
    let kernel = kernel.trim().to_owned();
    println!("Linux {kernel}, systemd-udevd, a SCSI target with {LUNS} LUNs.\n");
    let runs = vec![targeted(), wildcard()];
    println!(
        "{:<32} {:>6} {:>15} {:>14}",
        "", "disks", "kernel uevents", "time to quiet"
    );
    for run in &runs {
        #[expect(clippy::cast_precision_loss, reason = "seconds for a reader")]
        let seconds = run.quiet_at as f64 / 1000.0;
        println!(
            "{:<32} {:>6} {:>15} {seconds:>12.1} s",
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

/// One LUN, by the engine: attached, read, detached, nothing left.
fn targeted() -> Run {
    let target = ScsiDebug::with_luns(LUNS);
    let source = format!("scsi:{}:0:0:{LUN}", target.host());
    println!("One of them is wanted: LUN {LUN}. Nothing is attached yet.\n");

    let counter = UeventCounter::start();
    let identity = show(&["attach", &source]);
    let attached = millis(counter.elapsed());
    let mut run = until_quiet("lunbd attach", &target, &counter);
    // udevd is not done before the attach says so.
    run.quiet_at = run.quiet_at.max(attached);
    println!(
        "  {} kernel uevents, all of them this disk's own\n",
        run.uevents_at.len()
    );

    // The same again changes nothing, and its JSON names the node.
    let attachment = guest::lunbd(&["attach", &source, "--json"]);
    let attachment: Value = serde_json::from_slice(&attachment.stdout).expect("JSON of attach");
    let node = attachment["node"].as_str().expect("a node");
    assert!(identity.contains(node), "two answers about one device");
    let disk = File::open(node).expect(node);
    let sum = guest::run(&["sha256sum", node]);
    println!("$ sha256sum {node}\n  {}", sum.trim());
    println!("  {} bytes read through the device\n", length(node, disk));

    show(&["list"]);
    println!();
    show(&["detach", &source]);
    let left = target.devices();
    assert!(left.is_empty(), "left: {left:?}");
    assert!(!Path::new(node).exists(), "{node} is left");
    println!("  nothing is left: no SCSI device, no {node}, no link\n");
    run
}

/// What scanning the bus for that one LUN does.
fn wildcard() -> Run {
    let target = ScsiDebug::with_luns(LUNS);
    let scan = "- - -";
    println!(
        "The same LUN by a wildcard scan, for contrast:\n$ echo '{scan}' > /sys/class/scsi_host/host{}/scan",
        target.host()
    );
    let counter = UeventCounter::start();
    target.scan(scan);
    let run = until_quiet("a wildcard scan", &target, &counter);
    println!(
        "  {} disks, {} kernel uevents\n",
        run.disks,
        run.uevents_at.len()
    );
    run
}

/// Runs the command and shows it with what it prints.
fn show(arguments: &[&str]) -> String {
    println!("$ lunbd {}", arguments.join(" "));
    let output = guest::lunbd(arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{text}");
    assert!(output.status.success(), "{output:?}");
    text
}

fn length(node: &str, mut disk: File) -> u64 {
    std::io::copy(&mut disk, &mut std::io::sink()).expect(node)
}

/// Waits until neither the kernel nor udevd has anything more to do.
fn until_quiet(what: &str, target: &ScsiDebug, counter: &UeventCounter) -> Run {
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
    Run {
        what: what.to_owned(),
        disks: target.devices().len(),
        uevents_at: events.iter().map(|event| millis(event.at)).collect(),
        quiet_at: millis(quiet),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
