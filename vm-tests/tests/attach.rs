//! Attach, as an agent links it.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test panics to fail"
)]

use std::fs;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use lunbd::engine::{Finding, StageObserver};
use lunbd::error::Stage;
use lunbd::id::{HostNo, Lun, Wwid};
use lunbd::uevent::{HubOptions, Mode, Settled};
use lunbd::{AttachRequest, Deadline, Engine, ErrorKind, Roots};
use vm_tests::guest::agent::{at, attach, detach, engine, soon, unit};
use vm_tests::guest::uevent_minimum::{Kind, Minimum};
use vm_tests::guest::{self, ScsiDebug, UeventCounter};

/// For what follows a flood, which udevd handles in its order: a few seconds, and
/// minutes were seen on a machine that was shared by twenty.
const LIMIT: Duration = Duration::from_mins(10);

#[test]
fn one_of_256_luns_is_attached_and_no_other_device_appears() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(256));
    let attachment = attach(&engine, &target, 77);

    assert!(attachment.changed);
    let address = format!("{}:0:0:77", target.host());
    assert_eq!(target.devices(), [address.as_str()]);
    assert_eq!(attachment.hctl().unwrap().to_string(), address);
    assert_eq!(attachment.size, 8 << 20);
    assert_eq!(attachment.settled, Settled::UdevEvent);
    // udev's own tools agree on the name and on the links.
    let node = attachment.node.to_str().unwrap();
    let serial = guest::run(&[
        "udevadm",
        "info",
        "--query=property",
        "--property=ID_SERIAL",
        "--value",
        node,
    ]);
    let by_udev: Wwid = serial.trim().parse().unwrap();
    assert!(
        attachment.identity().unwrap().is(&by_udev),
        "{:?}",
        attachment.identity()
    );
    assert!(!attachment.links.is_empty());
    for link in &attachment.links {
        assert_eq!(fs::canonicalize(link).unwrap(), attachment.node);
    }
}

#[test]
fn an_attach_and_a_detach_cause_only_the_kernels_own_minimum_of_uevents() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(256));
    let minimum = Minimum::of_this_kernel();
    guest::udevd::settle();
    let raises = |act: &dyn Fn(), wanted: &[Kind]| {
        let counter = UeventCounter::start();
        act();
        minimum.require(&counter, wanted);
    };
    raises(&|| drop(attach(&engine, &target, 7)), &minimum.first_lun());
    raises(&|| drop(attach(&engine, &target, 200)), minimum.disk);
    raises(&|| drop(detach(&engine, &target, 200)), minimum.delete);
    raises(&|| drop(detach(&engine, &target, 200)), &[]);
}

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
fn what_is_attached_already_comes_back_unchanged_and_proven_again() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let first = attach(&engine, &target, 1);
    // An event of the disk that udevd has the kernel send late would do for a barrier.
    guest::udevd::settle();
    let again = attach(&engine, &target, 1);
    assert!(!again.changed);
    assert_eq!(again.settled, Settled::Barrier);
    assert_eq!(again.devno, first.devno);
    assert_eq!(again.diskseq, first.diskseq);
    assert_eq!(again.identity(), first.identity());
    assert_eq!(again.links, first.links);
}

#[test]
fn the_expected_unit_is_attached_by_any_of_its_names() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let names = attach(&engine, &target, 1)
        .identity()
        .unwrap()
        .names
        .clone();
    assert!(names.len() > 1, "{names:?}");
    for name in names {
        let request =
            AttachRequest::new(unit(&target, 1)).expect(name.to_string().parse().unwrap());
        assert!(engine.attach(&request, soon()).is_ok(), "{name}");
    }
}

#[test]
fn a_wrong_expectation_leaves_nothing_behind() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(4));
    let wrong: Wwid = "naa.60014050000000000000000000000000".parse().unwrap();
    let request = AttachRequest::new(unit(&target, 3)).expect(wrong.clone());
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch);
    assert_eq!(error.stage(), Some(Stage::Identify));
    assert!(error.to_string().contains(&wrong.to_string()), "{error}");
    assert_eq!(target.devices(), [] as [&str; 0]);

    // What somebody else attached is not taken away from them.
    attach(&engine, &target, 2);
    let error = engine
        .attach(&AttachRequest::new(unit(&target, 2)).expect(wrong), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch);
    assert_eq!(target.devices().len(), 1);
}

#[test]
fn a_lun_that_is_not_there_is_not_found_within_a_second_of_the_scans_return() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(4));
    // The quickest of a few: a busy machine holds up one or the other.
    let mut quickest = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        let error = engine
            .attach(&AttachRequest::new(unit(&target, 9)), soon())
            .unwrap_err();
        quickest = quickest.min(start.elapsed());
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(error.stage(), Some(Stage::Scan));
        assert!(
            error.to_string().contains("does not present LUN 9"),
            "{error}"
        );
    }
    assert!(quickest < Duration::from_secs(1), "{quickest:?}");
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn a_host_that_is_not_there_is_named_with_those_that_are() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(1));
    let mut hctl = at(&target, Lun::from_kernel(0));
    hctl.host = HostNo(4711);
    let error = engine
        .attach(&AttachRequest::new(hctl), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSuchHost);
    assert!(
        error
            .to_string()
            .contains(&format!("host{}", target.host())),
        "{error}"
    );
}

#[test]
fn a_target_beyond_the_hosts_limits_is_refused_by_the_kernel() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(1));
    let mut hctl = at(&target, Lun::from_kernel(0));
    hctl.channel = 200;
    let error = engine
        .attach(&AttachRequest::new(hctl), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert_eq!(error.stage(), Some(Stage::Scan));
}

#[test]
fn a_device_that_is_no_disk_is_not_supported_and_leaves_nothing_behind() {
    let engine = engine();
    // Peripheral device type 1: a tape.
    let target = ScsiDebug::options().luns(1).parameter("ptype", 1).load();
    let error = engine
        .attach(&AttachRequest::new(unit(&target, 0)), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert!(error.to_string().contains("0x01"), "{error}");
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn two_at_once_bring_one_device_and_both_get_it() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let (one, two) = std::thread::scope(|scope| {
        let one = scope.spawn(|| attach(&engine, &target, 1));
        let two = scope.spawn(|| attach(&engine, &target, 1));
        (one.join().unwrap(), two.join().unwrap())
    });
    assert_ne!(one.changed, two.changed);
    assert_eq!(one.devno, two.devno);
    assert_eq!(one.diskseq, two.diskseq);
}

#[test]
fn without_privileges_the_kernels_refusal_is_passed_on() {
    let (_engine, target) = (engine(), ScsiDebug::with_luns(1));
    let source = format!("scsi:{}:0:0:0", target.host());
    let output = std::process::Command::new("setpriv")
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
    // The hub may be behind.
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
    // The smallest that the kernel gives: a few events.
    let options = HubOptions::default().receive_buffer(1);
    let engine = Arc::new(Engine::with_options(Roots::default(), &options).unwrap());
    let (scans, flood_from) = mpsc::channel();
    let its = Arc::clone(&engine);
    let observer = StageObserver::new(move |stage| {
        // Its watch is there, and is told before the scan.
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
                flood(10);
            }
            flood(3_000);
        });
        let attached = engine.attach(&request, Deadline::after(LIMIT));
        // With it goes the observer, which the flood waits for.
        drop(request);
        attached.unwrap()
    });
    guest::udevd::settle();
    assert!(!attachment.links.is_empty());
}

/// Events of a device that nobody here waits for.
fn flood(events: usize) {
    for _ in 0..events {
        fs::write("/sys/devices/virtual/mem/full/uevent", "change").unwrap();
    }
}

#[test]
fn doctor_finds_nothing_missing_in_the_guest_and_gets_udevs_answer() {
    let engine = engine();
    guest::modprobe("loop", &[]);
    let checks = engine.preflight(soon());
    let missing: Vec<_> = checks
        .iter()
        .filter(|check| check.finding == Finding::Missing)
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert_eq!(engine.hub().mode(), Mode::Udev);
    let udev = checks.iter().find(|check| check.name == "udev").unwrap();
    assert!(udev.seen.contains("answered"), "{udev:?}");
}
