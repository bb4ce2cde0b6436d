//! Kernel calls that do not come back: the caller does, and the rest goes on.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test panics to fail"
)]

use std::fs;
use std::time::{Duration, Instant};

use lunbd::engine::StageObserver;
use lunbd::error::Stage;
use lunbd::id::HostNo;
use lunbd::{AttachRequest, Deadline, DetachRequest, Engine, ErrorKind, Source};
use vm_tests::guest::agent::{attach, detach, engine, soon, unit};
use vm_tests::guest::{self, ScsiDebug};

/// What a caller gives.
const LIMIT: Duration = Duration::from_secs(3);
/// The caller's own work and a busy machine.
const TOLERANCE: Duration = Duration::from_secs(10);
/// What the commands below take: longer than all that is to go on meanwhile.
const HUNG_SECS: u32 = 30;

/// `scsi_debug` swallows every command while this lives. What it has swallowed
/// stays lost, also when the others are answered again.
struct Swallowing<'a>(&'a ScsiDebug);

impl<'a> Swallowing<'a> {
    fn by(target: &'a ScsiDebug) -> Self {
        swallow();
        Self(target)
    }
}

fn swallow() {
    // SDEBUG_OPT_TIMEOUT
    for (attribute, value) in [("every_nth", "-1"), ("opts", "4")] {
        let path = format!("/sys/bus/pseudo/drivers/scsi_debug/{attribute}");
        fs::write(path, value).unwrap();
    }
}

impl Drop for Swallowing<'_> {
    fn drop(&mut self) {
        self.0.set("opts", 0);
        self.0.set("every_nth", 0);
    }
}

/// The kernel's limit of a scan's INQUIRY, for as long as this lives.
struct InquiryLimit(String);

const INQUIRY_LIMIT: &str = "/sys/module/scsi_mod/parameters/inq_timeout";

impl InquiryLimit {
    fn of(seconds: u32) -> Self {
        let before = fs::read_to_string(INQUIRY_LIMIT).unwrap();
        fs::write(INQUIRY_LIMIT, seconds.to_string()).unwrap();
        Self(before)
    }
}

impl Drop for InquiryLimit {
    fn drop(&mut self) {
        let _ = fs::write(INQUIRY_LIMIT, &self.0);
    }
}

fn in_time(engine: &Engine, source: Source) -> lunbd::Error {
    let start = Instant::now();
    let error = engine
        .attach(&AttachRequest::new(source), Deadline::after(LIMIT))
        .unwrap_err();
    let took = start.elapsed();
    assert!(took < LIMIT + TOLERANCE, "{took:?}: {error}");
    error
}

fn until_lifted(engine: &Engine) {
    guest::wait_until("the call to return", Duration::from_mins(2), || {
        engine.stuck_calls().is_empty().then_some(())
    });
}

#[test]
fn a_scan_that_hangs_quarantines_its_host_until_it_returns_while_another_host_attaches() {
    let engine = engine();
    let target = ScsiDebug::options().luns(4).hosts(2).load();
    let (hung, other) = (target.hosts()[0], target.hosts()[1]);
    let _limit = InquiryLimit::of(HUNG_SECS);

    let swallowing = Swallowing::by(&target);
    let error = in_time(&engine, unit(&target, 1));
    drop(swallowing);
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Scan), "{error}");

    let stuck = engine.stuck_calls();
    assert_eq!(stuck.len(), 1);
    assert_eq!(stuck[0].host, HostNo(hung));
    assert_eq!(stuck[0].stage, Stage::Scan);
    assert!(stuck[0].whole_host);
    assert!(
        stuck[0].stack.iter().any(|name| name.contains("scsi")),
        "{stuck:?}"
    );

    // At once, and it says why.
    let start = Instant::now();
    let request = AttachRequest::new(unit(&target, 2));
    let error = engine.attach(&request, soon()).unwrap_err();
    assert!(start.elapsed() < TOLERANCE, "{:?}", start.elapsed());
    assert_eq!(error.kind(), ErrorKind::Quarantined);
    assert!(error.to_string().contains("stage scan"), "{error}");
    assert!(error.last_seen().unwrap().contains("scsi"), "{error}");

    let elsewhere: Source = format!("scsi:{other}:0:0:1").parse().unwrap();
    let attached = engine
        .attach(&AttachRequest::new(elsewhere.clone()), soon())
        .unwrap();
    assert!(attached.changed);
    // Or the other host has proven nothing.
    assert_eq!(engine.stuck_calls().len(), 1);

    until_lifted(&engine);
    // The scan that was given up has found its unit after all.
    assert!(attach(&engine, &target, 2).changed);
    for lun in [1, 2] {
        detach(&engine, &target, lun).unwrap();
    }
    engine.detach(elsewhere, soon()).unwrap();
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn a_flush_that_hangs_quarantines_its_device_and_not_the_others_of_its_host() {
    let engine = engine();
    let target = ScsiDebug::with_luns(4);
    // The host's second device would wait for the first one's I/O: its tags come
    // to be shared, and for that the kernel freezes the queues that there are
    // (`block/blk-mq.c`, `blk_mq_add_queue_tag_set`). A third does not.
    attach(&engine, &target, 2);
    attach(&engine, &target, 1);
    guest::udevd::settle();
    // A flush gets twice this (`drivers/scsi/sd.c`, SD_FLUSH_TIMEOUT_MULTIPLIER).
    let timeout = (HUNG_SECS / 2).to_string();
    fs::write(target.device_dir(1).join("timeout"), timeout).unwrap();

    // Time for what comes before the flush, too.
    let limit = 2 * LIMIT;
    let observer = StageObserver::new(|stage| {
        if stage == Stage::Flush {
            swallow();
        }
    });
    let request = DetachRequest::new(unit(&target, 1)).observe(observer);
    let start = Instant::now();
    let error = engine.detach(request, Deadline::after(limit)).unwrap_err();
    let took = start.elapsed();
    drop(Swallowing(&target));
    assert!(took < limit + TOLERANCE, "{took:?}: {error}");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Flush), "{error}");

    let stuck = engine.stuck_calls();
    assert_eq!(stuck.len(), 1);
    assert_eq!(stuck[0].stage, Stage::Flush);
    assert!(!stuck[0].whole_host);
    assert!(!stuck[0].stack.is_empty());

    let error = in_time(&engine, unit(&target, 1));
    assert_eq!(error.kind(), ErrorKind::Quarantined, "{error}");
    assert!(error.to_string().contains("stage flush"), "{error}");
    assert!(attach(&engine, &target, 3).changed);
    assert_eq!(engine.stuck_calls().len(), 1);

    until_lifted(&engine);
    // The flush that hung may have failed in the end.
    let abandon = DetachRequest::new(unit(&target, 1)).abandon_unwritten();
    assert!(engine.detach(abandon, soon()).unwrap().changed);
    for lun in [2, 3] {
        assert!(detach(&engine, &target, lun).unwrap().changed);
    }
}
