//! What the bench runs in the guest: whole attaches and detaches by `lunbd` and by what is
//! used today, side by side in one boot. It has no time limit, and ends early only if
//! something does not work.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "the tables are its output, and it ends where it cannot go on"
)]

mod at_once;
mod log_in;
mod nbd;
mod rounds;
mod scale;
mod scsi_methods;
mod sizes;
mod start;
mod table;
mod tls;
mod udev_load;
mod volumes;

use std::env;
use std::fs;

use vm_bench::figures::Figures;
use vm_tests::guest;
use vm_tests::job::RESULT_FILE;

/// The arguments are the parts and the number of rounds: `nbd iscsi iscsi-login 20`.
fn main() {
    guest::enter();
    let arguments: Vec<String> = env::args().skip(1).collect();
    let is_wanted = |part: &str| arguments.iter().any(|argument| argument == part);
    let rounds = arguments.iter().find_map(|argument| argument.parse().ok());
    let rounds = rounds.expect("a number of rounds");
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's release");
    let processors = std::thread::available_parallelism().expect("the processors");
    let mut figures = Figures {
        kernel: kernel.trim().to_owned(),
        udev: guest::run(&["udevadm", "--version"]).trim().to_owned(),
        processors: processors.get(),
        rounds,
        ..Figures::default()
    };
    println!(
        "Linux {}, systemd-udevd {}, {processors} virtual CPUs; {rounds} rounds where nothing \
         else is said, taking turns, one more before them that is not counted.\n",
        figures.kernel, figures.udev
    );
    if is_wanted("start") {
        let rows = start::measure(rounds);
        start::print(&rows);
        figures.start = Some(rows);
    }
    if is_wanted("nbd") {
        let rows = nbd::compare(rounds);
        table::print("NBD, one nbdkit memory export", &rows);
        figures.nbd = Some(rows);
        let at_once = at_once::measure();
        at_once::print(&at_once);
        figures.nbd_at_once = Some(at_once);
    }
    if is_wanted("nbd-volumes") {
        let volumes = volumes::measure();
        volumes::print(&volumes);
        figures.volumes = Some(volumes);
    }
    if is_wanted("scale") {
        figures.scale = Some(scale::measure(rounds));
    }
    if is_wanted("nbd-tls") {
        let tls = tls::measure(rounds);
        tls::print(&tls);
        figures.tls = Some(tls);
    }
    if is_wanted("iscsi") {
        figures.scsi = Some(sizes::measure(rounds));
    }
    if is_wanted("iscsi-login") {
        figures.log_in = Some(log_in::measure(rounds));
    }
    let json = serde_json::to_vec(&figures).expect("the figures as JSON");
    fs::write(RESULT_FILE, json).expect(RESULT_FILE);
}
