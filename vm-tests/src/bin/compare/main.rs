//! What the bench runs in the guest: whole attaches and detaches by `lunbd` and
//! by what is used today, side by side in one boot. No time is too long for it:
//! it ends early only where something does not work.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "the tables are its output, and it ends where it cannot go on"
)]

mod at_once;
mod nbd;
mod rounds;
mod scsi;
mod table;

use std::fs;

use serde::Serialize;
use vm_tests::guest;
use vm_tests::job::RESULT_FILE;

use crate::at_once::AtOnce;
use crate::rounds::{ROUNDS, Row};

/// All that was measured.
#[derive(Debug, Serialize)]
struct Figures {
    /// `uname -r`.
    kernel: String,
    rounds: usize,
    nbd: Vec<Row>,
    nbd_at_once: AtOnce,
    scsi: Vec<Row>,
}

fn main() {
    guest::enter();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's release");
    let kernel = kernel.trim().to_owned();
    let udev = guest::run(&["udevadm", "--version"]);
    let processors = std::thread::available_parallelism().expect("the processors");
    println!(
        "Linux {kernel}, systemd-udevd {}, {processors} virtual CPUs; {ROUNDS} rounds, \
         taking turns, one more before them that is not counted.\n",
        udev.trim()
    );
    let nbd = nbd::compare();
    table::print("NBD, one nbdkit memory export", &nbd);
    let nbd_at_once = at_once::measure();
    nbd_at_once.print();
    let scsi = scsi::compare();
    table::print("SCSI, one LUN of 256", &scsi);
    let figures = Figures {
        kernel,
        rounds: ROUNDS,
        nbd,
        nbd_at_once,
        scsi,
    };
    let json = serde_json::to_vec(&figures).expect("the figures as JSON");
    fs::write(RESULT_FILE, json).expect(RESULT_FILE);
}
