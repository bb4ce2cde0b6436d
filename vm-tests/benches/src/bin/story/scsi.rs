//! One LUN of many by a scan for it alone, and by a scan of the whole bus.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use vm_bench::story::Run;
use vm_tests::guest::{self, ScsiDebug, UeventCounter, udevd};

use crate::show;

/// LUNs behind the host.
pub(crate) const LUNS: u32 = 256;
const LUN: u32 = 77;
/// Longer than the pauses between the disks of a wildcard scan.
const QUIET: Duration = Duration::from_secs(2);

/// Attaches one LUN by the engine, reads it and detaches it, and shows that nothing is left.
pub(crate) fn targeted() -> Run {
    let target = ScsiDebug::with_luns(LUNS);
    let source = format!("scsi:{}:0:0:{LUN}", target.host());
    println!("One of them is wanted: LUN {LUN}. Nothing is attached yet.\n");

    let counter = UeventCounter::start();
    let identity = show(&["attach", &source]);
    let attached = millis(counter.elapsed());
    let mut run = until_quiet("lunbd attach", &target, &counter);
    // udevd is done only when the attach returns.
    run.quiet_at = run.quiet_at.max(attached);
    println!(
        "  {} kernel uevents, all of them this disk's own\n",
        run.uevents_at.len()
    );

    // A repeated attach changes nothing, and its JSON names the node.
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

/// Shows what a scan of the bus for that one LUN does.
pub(crate) fn wildcard() -> Run {
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
    // udevd may have worked for longer than the kernel sent events.
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
