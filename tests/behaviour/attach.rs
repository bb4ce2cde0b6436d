//! Attaches.

use std::fs;
use std::time::{Duration, Instant};

use lunbd::engine::StageObserver;
use lunbd::error::Stage;
use lunbd::id::{HostNo, Wwid};
use lunbd::uevent::Settled;
use lunbd::{AttachRequest, Cancel, Deadline, Engine, Error, ErrorKind, Source};

use super::machine::{
    Machine, attach, detach, device_dir, devices, disk_of, soon, unit, write_attribute,
};

const NONE: [&str; 0] = [];

pub(crate) fn one_of_many_luns_is_attached_and_no_other_device_appears<M: Machine>() {
    let machine = M::with(1, 128);
    let (engine, host) = (machine.engine(), machine.hosts()[0]);
    let attachment = attach(&engine, &unit(host, 77));
    assert!(attachment.changed);
    let address = format!("{host}:0:0:77");
    assert_eq!(devices(&*machine, &engine), [address.as_str()]);
    assert_eq!(attachment.hctl().unwrap().to_string(), address);
    assert_eq!(attachment.size, 16 << 20);
    assert!(!attachment.read_only);
    let disk = disk_of(&engine, &unit(host, 77)).unwrap();
    let cache = fs::read_to_string(disk.join("queue/write_cache")).unwrap();
    assert_eq!(cache.trim_end(), "write back");
    assert_eq!(attachment.settled, Settled::UdevEvent);
    assert!(!attachment.links.is_empty());
    for link in &attachment.links {
        assert_eq!(fs::canonicalize(link).unwrap(), attachment.node);
    }
    let by_link = attachment.links.iter().any(|link| {
        let name = link.file_name().unwrap().to_str().unwrap();
        name.parse()
            .is_ok_and(|wwid: Wwid| attachment.identity().unwrap().is(&wwid))
    });
    assert!(by_link, "{attachment:?}");
}

pub(crate) fn a_repeated_attach_returns_the_device_unchanged_and_proves_it_again<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let first = attach(&engine, &source);
    // If the kernel sent an event of the disk late, at udevd's request, it could act as a
    // barrier.
    machine.settle();
    let again = attach(&engine, &source);
    assert!(!again.changed);
    assert_eq!(again.settled, Settled::Barrier);
    assert_eq!(again.devno, first.devno);
    assert_eq!(again.diskseq, first.diskseq);
    assert_eq!(again.identity(), first.identity());
    assert_eq!(again.links, first.links);
}

pub(crate) fn the_expected_unit_is_attached_by_any_of_its_names<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let names = attach(&engine, &source).identity().unwrap().names.clone();
    assert!(names.len() > 1, "{names:?}");
    for name in names {
        let request = AttachRequest::new(source.clone()).expect(name.clone());
        assert!(engine.attach(&request, soon()).is_ok(), "{name}");
    }
}

/// A name that no unit of the machine has.
fn wrong() -> Wwid {
    "naa.60014050000000000000000000000000".parse().unwrap()
}

pub(crate) fn a_wrong_expectation_leaves_nothing_behind<M: Machine>() {
    let machine = M::with(1, 4);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 3));
    let request = AttachRequest::new(source).expect(wrong());
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch);
    assert_eq!(error.stage(), Some(Stage::Identify));
    assert!(error.to_string().contains(&wrong().to_string()), "{error}");
    assert_eq!(devices(&*machine, &engine), NONE);
}

pub(crate) fn an_attach_that_expects_another_unit_leaves_another_processs_device<M: Machine>() {
    let machine = M::with(1, 4);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 2));
    let before = attach(&engine, &source);
    let request = AttachRequest::new(source.clone()).expect(wrong());
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch);
    let names = &before.identity().unwrap().names;
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    assert_eq!(error.found(), names);
    let after = attach(&engine, &source);
    assert_eq!((after.changed, after.diskseq), (false, before.diskseq));
}

pub(crate) fn a_lun_that_is_not_there_is_not_found_within_a_second_and_leaves_nothing<
    M: Machine,
>() {
    let machine = M::with(1, 4);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 9));
    let request = AttachRequest::new(source);
    // Take the fastest of a few tries: a busy machine delays one or the other.
    let mut quickest = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        let error = engine.attach(&request, soon()).unwrap_err();
        quickest = quickest.min(start.elapsed());
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(error.stage(), Some(Stage::Scan));
        let message = error.to_string();
        assert!(message.contains("does not present LUN 9"), "{message}");
    }
    assert!(quickest < Duration::from_secs(1), "{quickest:?}");
    assert_eq!(devices(&*machine, &engine), NONE);
}

pub(crate) fn a_host_that_is_not_there_is_named_with_those_that_are<M: Machine>() {
    let machine = M::with(1, 1);
    let (engine, host) = (machine.engine(), machine.hosts()[0]);
    let error = engine
        .attach(&AttachRequest::new(unit(4711, 0)), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSuchHost);
    assert!(
        error.to_string().contains(&format!("host{host}")),
        "{error}"
    );
}

pub(crate) fn a_channel_beyond_the_hosts_limits_is_refused_by_the_kernel<M: Machine>() {
    let machine = M::with(1, 1);
    let engine = machine.engine();
    let Source::Scsi(mut hctl) = unit(machine.hosts()[0], 0) else {
        panic!("it is no address");
    };
    hctl.channel = 200;
    let request = AttachRequest::new(hctl);
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert_eq!(error.stage(), Some(Stage::Scan));
    assert_eq!(hctl.host, HostNo(machine.hosts()[0]));
}

pub(crate) fn a_device_that_is_no_disk_is_not_supported_and_leaves_nothing_behind<M: Machine>() {
    let machine = M::with_a_tape();
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 0));
    let request = AttachRequest::new(source);
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert!(error.to_string().contains("0x01"), "{error}");
    assert_eq!(devices(&*machine, &engine), NONE);
}

pub(crate) fn two_concurrent_attaches_create_one_device_and_both_return_it<M: Machine>() {
    let machine = M::with(1, 3);
    let one = machine.engine();
    // The two attaches are of one process, and of two processes as far as the engines know.
    for (lun, other) in [(1, one.clone()), (2, machine.engine())] {
        let source = unit(machine.hosts()[0], lun);
        let (first, second) = std::thread::scope(|scope| {
            let first = scope.spawn(|| attach(&one, &source));
            let second = scope.spawn(|| attach(&other, &source));
            (first.join().unwrap(), second.join().unwrap())
        });
        assert_ne!(first.changed, second.changed);
        assert_eq!(first.devno, second.devno);
        assert_eq!(first.diskseq, second.diskseq);
    }
    assert_eq!(devices(&*machine, &one).len(), 2);
}

pub(crate) fn an_offline_device_is_not_handed_out_and_stays<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    attach(&engine, &source);
    machine.settle();
    let state = device_dir(&engine, &source).join("state");
    write_attribute(&engine, &state, "offline\n");
    let request = AttachRequest::new(source.clone());
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady);
    assert!(error.to_string().contains("in state offline"), "{error}");
    assert_eq!(devices(&*machine, &engine).len(), 1);
    write_attribute(&engine, &state, "running\n");
    assert!(!attach(&engine, &source).changed);
    detach(&engine, &source).unwrap();
}

pub(crate) fn an_attach_times_out_if_udevd_does_not_answer_and_the_next_one_takes_its_device<
    M: Machine,
>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let stopped = machine.stop_udevd();
    // The limit leaves time for the earlier stages, also on a slow machine.
    let limit = Deadline::after(Duration::from_secs(10));
    let error = engine
        .attach(&AttachRequest::new(source.clone()), limit)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Settle), "{error}");
    assert_eq!(devices(&*machine, &engine).len(), 1);
    drop(stopped);
    let next = machine.engine();
    let attachment = attach(&next, &source);
    assert!(!attachment.changed);
    assert!(!attachment.links.is_empty());
}

pub(crate) fn an_attach_that_is_cancelled_while_it_waits_removes_its_device<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let stopped = machine.stop_udevd();
    let error = cancelled_at(Stage::Settle, &engine, &source);
    assert_eq!(error.stage(), Some(Stage::Settle), "{error}");
    drop(stopped);
    assert_eq!(devices(&*machine, &engine), NONE);
    assert!(attach(&engine, &source).changed);
}

pub(crate) fn an_attach_that_is_cancelled_at_any_earlier_stage_leaves_nothing_behind<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    for stage in [Stage::Lock, Stage::Scan, Stage::Probe, Stage::Identify] {
        cancelled_at(stage, &engine, &source);
        assert_eq!(devices(&*machine, &engine), NONE, "{stage}");
    }
    assert!(attach(&engine, &source).changed);
}

/// The error of an attach that is cancelled as soon as it enters `stage`.
fn cancelled_at(stage: Stage, engine: &Engine, source: &Source) -> Error {
    let cancel = Cancel::new();
    // Much longer than a cancelled attach may take.
    let deadline = Deadline::after(Duration::from_secs(600)).cancelled_by(&cancel);
    let request = AttachRequest::new(source.clone()).observe(StageObserver::new(move |entered| {
        if entered == stage {
            cancel.cancel();
        }
    }));
    let error = engine.attach(&request, deadline).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error:#}");
    assert!(deadline.elapsed() < Duration::from_secs(300), "{error:#}");
    error
}
