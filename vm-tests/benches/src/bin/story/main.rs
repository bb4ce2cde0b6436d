//! What the demo runs in the guest. It attaches one LUN of 256 by `lunbd`, reads it and
//! detaches it, and shows what a wildcard scan does instead. Then it kills the server of an
//! NBD device while a process reads the device.

#![allow(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "the story is its output, and it ends where it cannot go on"
)]

mod nbd;
mod scsi;

use std::fs;

use vm_bench::story::Figures;
use vm_tests::guest;
use vm_tests::job::RESULT_FILE;

fn main() {
    guest::enter();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's release");
    let kernel = kernel.trim().to_owned();
    println!(
        "Linux {kernel}, systemd-udevd, a SCSI target with {} LUNs.\n",
        scsi::LUNS
    );
    let runs = vec![scsi::targeted(), scsi::wildcard()];
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
    nbd::survives_its_server();
    let figures = Figures {
        kernel,
        luns: scsi::LUNS,
        runs,
    };
    let json = serde_json::to_vec(&figures).expect("the figures as JSON");
    fs::write(RESULT_FILE, json).expect(RESULT_FILE);
}

/// Runs the command, and prints it with its output.
fn show(arguments: &[&str]) -> String {
    println!("$ lunbd {}", arguments.join(" "));
    let output = guest::lunbd(arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{text}");
    assert!(output.status.success(), "{output:?}");
    text
}
