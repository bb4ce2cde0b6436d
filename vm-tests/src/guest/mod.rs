//! What tests in the guest use.

pub mod agent;
pub mod certificates;
pub mod crash;
pub mod daemon;
pub mod direct;
pub mod directory;
pub mod dirty_path;
pub mod disk_users;
pub mod exports;
pub mod fault_table;
pub mod faults;
pub mod fcoe;
pub mod heartbeat;
pub mod hidden_writers;
pub mod inject;
pub mod iscsi_proxy;
pub mod iscsi_target;
pub mod iscsi_tcp;
pub mod iscsid;
#[path = "../../../tests/json_schema/mod.rs"]
mod json_schema;
pub mod keeping;
pub mod kills;
pub mod lio;
pub mod loopback;
pub mod md;
pub mod multipathd;
pub mod named_reader;
pub mod nbd_agent;
pub mod nbd_device;
pub mod nbd_server;
pub mod nvmet;
pub mod own_processes;
pub mod partition_maps;
pub mod partitioned;
pub mod queueing_map;
pub mod relay;
pub mod rotation;
mod scsi_debug;
mod scsi_disk;
pub mod served;
pub mod stuck_fuse;
pub mod system_calls;
mod tcp_reset;
pub mod terminal;
pub mod tgt;
pub mod thread_limit;
pub mod tls_proxy;
pub mod tls_servers;
pub mod udev_arrivals;
pub mod udevd;
mod uevent_counter;
pub mod uevent_minimum;
pub mod unwritten;
pub mod writer;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::job;
use crate::sweep_row::SweepRow;

pub use scsi_debug::{ScsiDebug, ScsiDebugOptions};
pub use uevent_counter::{KernelUevent, UeventCounter};

/// Panics anywhere but in the guest.
///
/// These tests load modules, kill udevd and mount file systems; a host is a user's machine.
pub fn enter() {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    assert!(
        cmdline
            .split_whitespace()
            .any(|word| word.starts_with(job::GUEST_MARK)),
        "this runs only in the lab's guest: use vm-tests/test"
    );
}

/// Ends the test as Skipped, with a reason for the summary.
///
/// The reason must be in `vm-tests/expected-skips` for this kernel, or the run
/// fails.
pub fn skip(reason: &str) -> ! {
    enter();
    fs::write(job::SKIP_FILE, reason).expect("writing down why the test skips");
    std::process::exit(job::SKIP_STATUS)
}

/// Asks for more time than [`job::DEFAULT_LIMIT_SECS`], counted from the start of the test.
pub fn time_limit(limit: Duration) {
    enter();
    fs::write(job::LIMIT_FILE, limit.as_secs().to_string()).expect("writing the time limit");
}

/// Shows a line of figures in the run's summary, also if the test passes.
pub fn tell(line: &str) {
    // libtest has not ended its own line.
    println!("\n{}{line}", job::TOLD);
}

/// Shows in the last lines of the run which points of a sweep the test has met.
pub fn tell_met(line: &str) {
    println!("\n{}{line}", job::MET);
}

/// The name of the series that the lab selected: `6.1`, `newest`.
#[must_use]
pub fn series() -> String {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let mark = format!("{}=", job::GUEST_MARK);
    let series = cmdline
        .split_whitespace()
        .find_map(|word| word.strip_prefix(&mark));
    series
        .expect("this runs only in the lab's guest")
        .to_owned()
}

/// The seed of all random choices, from the lab, which prints it.
#[must_use]
pub fn seed() -> u64 {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let mark = format!("{}=", job::SEED_MARK);
    let given = cmdline
        .split_whitespace()
        .find_map(|word| word.strip_prefix(&mark)?.parse().ok());
    given.expect("this runs only in the lab's guest")
}

/// Whether a sweep takes every step (`LUNBD_VM_SWEEPS=whole` on the host). That takes too long
/// for every run.
#[must_use]
pub fn sweeps_are_whole() -> bool {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    cmdline
        .split_whitespace()
        .any(|word| word == job::WHOLE_SWEEPS)
}

/// Prints the result of a whole sweep for `results/sweeps.md`: see `sweep-table`.
pub fn tell_whole_sweep(sweep: &str, done: String, points: String, took: Duration) {
    let row = SweepRow {
        sweep: sweep.to_owned(),
        kernel: run(&["uname", "-r"]).trim().to_owned(),
        done,
        points,
        seconds: took.as_secs(),
        test: name_of_test(),
        date: run(&["date", "--utc", "+%F"]).trim().to_owned(),
    };
    tell(&row.line());
}

/// The only test of this process, from its command line.
fn name_of_test() -> String {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.find(|argument| !argument.starts_with('-'));
    name.unwrap_or_default()
}

/// Sets the time limit of a sweep, with room for a slow machine.
pub fn sweep_time_limit() {
    time_limit(Duration::from_mins(if sweeps_are_whole() {
        150
    } else {
        38
    }));
}

/// The running kernel's series: `(6, 1)` for 6.1.192.
#[must_use]
pub fn kernel() -> (u32, u32) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's release");
    let mut parts = release.split(['.', '-']).map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => panic!("a kernel release of an unknown form: {release:?}"),
    }
}

/// Runs the `lunbd` command as a user would.
#[must_use]
pub fn lunbd<S: AsRef<OsStr>>(args: &[S]) -> Output {
    enter();
    let output = Command::new("lunbd")
        .args(args)
        .output()
        .expect("lunbd is on the guest's PATH");
    if args.iter().any(|one| one.as_ref() == "--json") {
        let lines = [&output.stdout, &output.stderr];
        let lines = lines.map(|text| String::from_utf8_lossy(text));
        for line in lines.iter().flat_map(|text| text.lines()) {
            require_as_in_the_schema(line);
        }
    }
    output
}

/// Panics unless the line is JSON that the command's schema allows.
pub fn require_as_in_the_schema(line: &str) {
    let parsed = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    json_schema::require(&parsed);
}

/// Runs a program of the guest and returns its output; panics with the whole output unless it
/// succeeds.
pub fn run<S: AsRef<OsStr> + std::fmt::Debug>(command: &[S]) -> String {
    enter();
    let output = Command::new(&command[0])
        .args(&command[1..])
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Makes a device-mapper device without waiting for udev.
pub fn create_map(name: &str, uuid: Option<&str>, table: &str) {
    need_module("dm_mod");
    let mut command = vec!["dmsetup", "create", name, "--noudevsync", "--table", table];
    command.extend(uuid.into_iter().flat_map(|uuid| ["--uuid", uuid]));
    run(&command);
}

/// The node of a device-mapper device.
#[must_use]
pub fn node_of_map(name: &str) -> PathBuf {
    let has_name = |block: &String| {
        let shown = fs::read_to_string(format!("/sys/block/{block}/dm/name"));
        shown.is_ok_and(|shown| shown.trim() == name)
    };
    let block = entries("/sys/block").into_iter().find(has_name);
    Path::new("/dev").join(block.expect("a device-mapper device"))
}

/// Loads a module. Starts no program if the module is loaded: for a thousand volumes that would
/// take minutes.
pub fn need_module(name: &str) {
    if !Path::new("/sys/module").join(name).exists() {
        modprobe(name, &[]);
    }
}

/// Loads a module with its parameters, with the modprobe that udevd also uses.
pub fn modprobe(module: &str, parameters: &[&str]) {
    let mut command = vec!["modprobe", module];
    command.extend(parameters);
    run(&command);
}

/// Calls `look` until it finds something, and panics with `what` after `limit`. For events that
/// the kernel offers no way to wait for.
pub fn wait_until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    wait_until_ok(limit, || look().ok_or_else(|| what.to_owned()))
}

/// Calls `look` until it succeeds, and panics with its last error after `limit`.
pub fn wait_until_ok<T>(limit: Duration, mut look: impl FnMut() -> Result<T, String>) -> T {
    let start = Instant::now();
    loop {
        // If one look took all the time, the event may have come meanwhile.
        let is_last = start.elapsed() >= limit;
        match look() {
            Ok(found) => return found,
            Err(last_seen) => assert!(!is_last, "{last_seen}: not within {limit:?}"),
        }
        pause_between_looks(start);
    }
}

/// Sleeps before the next look of a wait that began at `start`, and longer in a long wait: each
/// look takes the emulated processor from the work that is waited for.
fn pause_between_looks(start: Instant) {
    let pause = start.elapsed() / 20;
    std::thread::sleep(pause.clamp(Duration::from_millis(5), Duration::from_millis(100)));
}

/// The resources of this process that a leak adds to: the targets of its descriptors and the
/// names of its threads.
#[must_use]
pub fn descriptors_and_threads() -> (Vec<String>, Vec<String>) {
    let descriptors = entries("/proc/self/fd").into_iter().filter_map(|number| {
        let target = fs::read_link(format!("/proc/self/fd/{number}")).ok()?;
        Some(target.display().to_string())
    });
    let threads = entries("/proc/self/task").into_iter().filter_map(|number| {
        let name = fs::read_to_string(format!("/proc/self/task/{number}/comm")).ok()?;
        Some(name.trim().to_owned())
    });
    (descriptors.collect(), threads.collect())
}

/// Waits until this process has no more descriptors and threads than `before`: a worker's
/// thread ends a moment after its last call.
pub fn wait_for_no_more_than(before: &(Vec<String>, Vec<String>)) {
    let limit = Instant::now() + Duration::from_secs(60);
    loop {
        let now = descriptors_and_threads();
        if now.0.len() <= before.0.len() && now.1.len() <= before.1.len() {
            return;
        }
        let is_over = Instant::now() >= limit;
        assert!(!is_over, "leaked: {now:#?}, where there were {before:#?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The names in a directory of sysfs; none if it does not exist.
#[must_use]
pub fn entries(dir: impl AsRef<Path>) -> Vec<String> {
    fs::read_dir(dir).map_or_else(
        |_| Vec::new(),
        |entries| {
            entries
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect()
        },
    )
}
