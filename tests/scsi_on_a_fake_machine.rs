//! What the engine writes and reads, on a machine that is a directory.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

#[allow(dead_code, reason = "each suite uses a part of it")]
mod machine;

use std::time::{Duration, Instant};

use lunbd::engine::DetachFailure;
use lunbd::error::{Retry, Stage};
use lunbd::uevent::Mode;
use lunbd::{AttachRequest, Deadline, DetachTarget, Engine, Error, ErrorKind, Source};
use machine::Machine;

fn attach(machine: &Machine, source: &str, limit: Duration) -> Error {
    let engine = Engine::start(machine.roots()).unwrap();
    let source: Source = source.parse().unwrap();
    let deadline = Deadline::after(limit);
    engine
        .attach(&AttachRequest::new(source), deadline)
        .unwrap_err()
}

fn detach(machine: &Machine, target: &str) -> Result<lunbd::Detachment, DetachFailure> {
    let engine = Engine::start(machine.roots()).unwrap();
    let target: DetachTarget = target.parse()?;
    engine.detach(target, Deadline::after(LIMIT))
}

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn a_directory_is_a_machine_without_events() {
    let machine = Machine::new();
    let engine = Engine::start(machine.roots()).unwrap();
    assert_eq!(engine.hub().mode(), Mode::SysfsPoll);
}

#[test]
fn one_line_in_plain_decimal_is_written_and_a_scan_that_says_nothing_is_not_found() {
    let machine = Machine::new();
    machine.host(3);
    let error = attach(&machine, "scsi:3:1:2:flat-300", LIMIT);
    assert_eq!(machine.read("sys/class/scsi_host/host3/scan"), "1 2 16684");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert_eq!(error.retry(), Retry::AfterChange);
}

#[test]
fn a_lun_that_the_array_may_count_in_flat_addressing_is_explained() {
    let machine = Machine::new();
    machine.host(0);
    let error = attach(&machine, "scsi:0:0:0:300", LIMIT);
    assert!(
        error.to_string().contains("write the LUN as flat-300"),
        "{error}"
    );
    let error = attach(&machine, "scsi:0:0:0:30", LIMIT);
    assert!(!error.to_string().contains("flat"), "{error}");
}

#[test]
fn a_host_that_is_not_there_is_named_with_those_that_are() {
    let machine = Machine::new();
    machine.host(7);
    let error = attach(&machine, "scsi:3:0:0:1", LIMIT);
    assert_eq!(error.kind(), ErrorKind::NoSuchHost);
    assert!(
        error.to_string().contains("this machine has host7"),
        "{error}"
    );
}

#[test]
fn a_lun_that_the_scan_file_cannot_carry_is_refused_before_anything_is_written() {
    let machine = Machine::new();
    machine.host(0);
    let error = attach(&machine, "scsi:0:0:0:12345678901234567", LIMIT);
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert_eq!(machine.read("sys/class/scsi_host/host0/scan"), "");
}

#[test]
fn a_scan_that_hangs_times_out_at_its_stage_and_says_what_was_last_seen() {
    let machine = Machine::new();
    machine.host(0);
    let scan = machine.path("sys/class/scsi_host/host0/scan");
    std::fs::remove_file(&scan).unwrap();
    // Nobody reads: the open for writing blocks, as the kernel's scan would.
    nix::unistd::mkfifo(&scan, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let start = Instant::now();
    let error = attach(&machine, "scsi:0:0:0:1", Duration::from_secs(1));
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert_eq!(error.last_seen(), Some("host state=running"));
    assert!(start.elapsed() < LIMIT);
    // The hung thread is let go.
    drop(std::fs::File::open(&scan).unwrap());
}

#[test]
fn a_detach_of_what_is_gone_is_a_success_that_changed_nothing() {
    let machine = Machine::new();
    let detachment = detach(&machine, "scsi:0:0:0:1").unwrap();
    assert!(!detachment.changed);
    assert_eq!(detachment.flush, None);
}

#[test]
fn a_path_that_leads_nowhere_proves_nothing() {
    let machine = Machine::new();
    let error = detach(&machine, "/dev/no-such-disk").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let error = detach(&machine, "/dev/null").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let error = detach(&machine, "sdb").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("expected scsi:"), "{error}");
}

#[test]
fn a_disk_without_a_node_is_not_deleted() {
    let machine = Machine::new();
    machine.disk("1:0:0:4", "sdb");
    machine.write("proc/self/mountinfo", "");
    let error = detach(&machine, "scsi:1:0:0:4").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady);
    assert_eq!(error.stage(), Some(Stage::Claim));
    assert!(error.to_string().contains("its node is missing"), "{error}");
    assert_eq!(machine.read("sys/devices/fake/1:0:0:4/delete"), "");
}
