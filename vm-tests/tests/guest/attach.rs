//! Attaches, as an agent that links the library makes them.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use lunbd::engine::{Finding, StageObserver};
use lunbd::error::Stage;
use lunbd::id::Lun;
use lunbd::uevent::{HubOptions, Mode, Settled};
use lunbd::{AttachRequest, Deadline, Engine, Roots};
use vm_tests::guest::agent::{at, engine, soon, unit};
use vm_tests::guest::{self, ScsiDebug};

/// The limit of a call after a flood, whose events udevd handles in order. That takes a few
/// seconds, and took minutes on a machine that twenty others shared.
const LIMIT: Duration = Duration::from_mins(10);

#[test]
fn flat_luns_300_and_16000_are_attached_and_found() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(16_383));
    for number in [300, 16_000] {
        let hctl = at(&target, Lun::flat(number).unwrap());
        let attachment = engine.attach(&AttachRequest::new(hctl), soon()).unwrap();
        assert_eq!(attachment.hctl(), Some(hctl));
        let kernel = u64::from(0x4000 | number);
        assert_eq!(
            target.disk(kernel).as_deref(),
            attachment.node.file_name().unwrap().to_str()
        );
        let by_command = guest::lunbd(&[
            "attach",
            &format!("scsi:{}:0:0:flat-{number}", target.host()),
            "--json",
        ]);
        let again: serde_json::Value = serde_json::from_slice(&by_command.stdout).unwrap();
        assert_eq!(again["changed"], false);
        assert_eq!(again["paths"][0]["hctl"], hctl.to_string());
    }
}

#[test]
fn without_privileges_the_kernels_refusal_is_passed_on() {
    let (_engine, target) = (engine(), ScsiDebug::with_luns(1));
    let source = format!("scsi:{}:0:0:0", target.host());
    let output = Command::new("setpriv")
        .args([
            "--reuid=65534",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ])
        .args(["lunbd", "attach", &source, "--json"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let error: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(error["kind"], "not_permitted");
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn thousands_of_foreign_uevents_during_an_attach_lose_nothing() {
    guest::time_limit(2 * LIMIT);
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let request = AttachRequest::new(unit(&target, 1));
    let attachment = std::thread::scope(|scope| {
        scope.spawn(|| flood(3_000));
        engine.attach(&request, Deadline::after(LIMIT)).unwrap()
    });
    assert_eq!(attachment.settled, Settled::UdevEvent);
    assert!(!attachment.links.is_empty());
    // The hub may still have events to read.
    guest::wait_until("the hub to have read all", LIMIT, || {
        (engine.hub().counters().events > 3_000).then_some(())
    });
    guest::udevd::settle();
    assert_eq!(engine.hub().counters().overruns, 0);
}

#[test]
fn a_full_socket_buffer_ends_in_a_resync_and_not_in_a_lost_waiter() {
    guest::time_limit(2 * LIMIT);
    let _engine = engine();
    let target = ScsiDebug::with_luns(2);
    // The smallest buffer that the kernel gives: a few events.
    let options = HubOptions::default().receive_buffer(1);
    let engine = Arc::new(Engine::with_options(Roots::default(), &options).unwrap());
    let (scans, flood_from) = mpsc::channel();
    let its = Arc::clone(&engine);
    let observer = StageObserver::new(move |stage| {
        // The attach has its watch here, and receives the notice before the scan.
        if stage == Stage::Scan {
            scans.send(()).unwrap();
            guest::wait_until("a resync", LIMIT, || {
                let counters = its.hub().counters();
                (counters.overruns > 0 && counters.resyncs > 0).then_some(())
            });
        }
    });
    let request = AttachRequest::new(unit(&target, 1)).observe(observer);
    let attachment = std::thread::scope(|scope| {
        let hub = engine.hub();
        scope.spawn(move || {
            flood_from.recv().unwrap();
            while hub.counters().resyncs == 0 {
                flood_on_each_processor();
            }
            flood(3_000);
        });
        let attached = engine.attach(&request, Deadline::after(LIMIT));
        // The request holds the observer, whose end the flood waits for.
        drop(request);
        attached.unwrap()
    });
    guest::udevd::settle();
    assert!(!attachment.links.is_empty());
}

/// Sends more events than the smallest buffer holds. The thread that receives them gets no
/// processor meanwhile.
fn flood_on_each_processor() {
    let processors = std::thread::available_parallelism().unwrap();
    std::thread::scope(|floods| {
        for _ in 0..processors.get() {
            floods.spawn(|| {
                let thread = nix::unistd::gettid().to_string();
                guest::run(&["chrt", "--fifo", "--pid", "1", &thread]);
                flood(50);
            });
        }
    });
}

/// Sends events of a device that nothing here waits for.
fn flood(events: usize) {
    for _ in 0..events {
        fs::write("/sys/devices/virtual/mem/full/uevent", "change").unwrap();
    }
}

#[test]
fn doctor_finds_nothing_missing_in_the_guest_and_gets_udevs_answer() {
    let engine = engine();
    guest::modprobe("loop", &[]);
    // udevd gets five seconds for its answer, and has the new devices to look at first.
    guest::udevd::settle();
    let checks = engine.preflight(soon());
    let missing: Vec<_> = checks
        .iter()
        .filter(|check| check.finding == Finding::Missing)
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert_eq!(engine.hub().mode(), Mode::Udev);
    let udev = checks.iter().find(|check| check.name == "udev").unwrap();
    assert!(udev.seen.contains("answered"), "{udev:?}");
    let journal = checks.iter().find(|check| check.name == "journal");
    assert!(journal.unwrap().finding == Finding::Good, "{journal:?}");
}

#[test]
fn doctor_says_what_a_process_cannot_write_though_it_has_its_capabilities() {
    let _target = ScsiDebug::with_luns(2);
    let all = "+sys_admin,+net_admin,+sys_ptrace";
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .args([format!("--inh-caps={all}"), format!("--ambient-caps={all}")])
        .args(["lunbd", "doctor"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(8), "{said}");
    for expected in ["/scan cannot be written", "(/run/lunbd/doctor.lock)"] {
        assert!(said.contains(expected), "no {expected}: {said}");
    }
}

/// The kernel sends no event there (`lib/kobject_uevent.c`).
#[test]
fn an_attach_in_a_network_namespace_of_another_user_namespace_looks_at_sysfs() {
    let target = ScsiDebug::with_luns(2);
    let unit = unit(&target, 1).to_string();
    let mut elsewhere = Command::new("unshare")
        .args(["--user", "--map-root-user", "--net", "cat"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let own = fs::read_link("/proc/self/ns/net").unwrap();
    let network = format!("/proc/{}/ns/net", elsewhere.id());
    guest::wait_until("the other network namespace", LIMIT, || {
        fs::read_link(&network)
            .is_ok_and(|its| its != own)
            .then_some(())
    });
    for call in ["attach", "detach"] {
        let output = Command::new("nsenter")
            .arg(format!("--net={network}"))
            .args(["lunbd", call, &unit, "--timeout", "20s"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{call}: {output:?}");
    }
    drop(elsewhere.stdin.take());
    elsewhere.wait().unwrap();
}
