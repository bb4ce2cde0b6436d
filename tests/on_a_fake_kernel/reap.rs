//! Reaps, on the kernel of `tests/fake_kernel`.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::fake_kernel::{Address, FakeKernel, Unit, access};
use lunbd::engine::{Evidence, ReapOutcome, ReapReport, ReapRequest, StaleLun};
use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Options, Reconciler};
use lunbd::{AttachRequest, Attachment, Deadline, Engine, ErrorKind, Source};

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(120))
}

fn unit(lun: u64) -> Source {
    format!("scsi:0:0:0:{lun}").parse().unwrap()
}

/// Stops the reconciler also if the test panics.
struct Stop<'a>(&'a Reconciler);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[test]
fn a_running_reconciler_reaps_a_stale_lun_and_leaves_those_of_its_volumes() {
    let fake = FakeKernel::with_hosts(1);
    for lun in 1..=3 {
        let unit = Unit::disk(lun);
        let kernel = fake.kernel();
        kernel.change(|state| state.units.insert(Address::of(0, lun), unit));
    }
    let engine = access::engine(fake.root());
    let place = fake.root().join("journal");
    let journal = engine.open_journal_at(&place, soon()).unwrap();
    engine.attach(&AttachRequest::new(unit(1)), soon()).unwrap();
    let reconciler = Reconciler::new(engine, journal, Options::default());
    let volume: VolumeId = "pvc-2".parse().unwrap();
    let mut desired = Desired::default();
    desired
        .insert(volume.clone(), &AttachRequest::new(unit(2)))
        .unwrap();
    reconciler.set(desired);
    thread::scope(|scope| {
        let running = scope.spawn(|| reconciler.run());
        let stop = Stop(&reconciler);
        reconciler.wait_attached(&volume, soon()).unwrap();
        fake.kernel().settle();
        // The array presents LUN 3 alone from now on.
        fake.kernel()
            .change(|state| state.units.retain(|address, _| address.lun == 3));
        let report = reconciler.reap(&ReapRequest::default(), soon()).unwrap();
        let [idle, owned] = &report.stale_luns[..] else {
            panic!("{report:?}");
        };
        assert!(matches!(idle.outcome, ReapOutcome::Reaped), "{report:?}");
        assert_eq!(
            (idle.hctl.lun.to_string(), &idle.volume),
            ("1".to_owned(), &None)
        );
        assert!(
            matches!(owned.outcome, ReapOutcome::Skipped(_)),
            "the volume's device is gone: {report:?}"
        );
        assert_eq!(owned.volume, Some(volume));
        assert_eq!(fake.kernel().devices(), ["0:0:0:2"]);
        drop(stop);
        running.join().unwrap().unwrap();
    });
}

/// A machine with one host that has attached the LUNs 1 and 2.
fn with_two_attached() -> (FakeKernel, Arc<Engine>, Attachment) {
    let fake = FakeKernel::with_hosts(1);
    for lun in 1..=2 {
        let unit = Unit::disk(lun);
        let kernel = fake.kernel();
        kernel.change(|state| state.units.insert(Address::of(0, lun), unit));
    }
    let engine = access::engine(fake.root());
    let first = engine.attach(&AttachRequest::new(unit(1)), soon()).unwrap();
    engine.attach(&AttachRequest::new(unit(2)), soon()).unwrap();
    fake.kernel().settle();
    (fake, engine, first)
}

fn reaped(report: &ReapReport) -> &StaleLun {
    let [one] = &report.stale_luns[..] else {
        panic!("{report:?}");
    };
    assert!(matches!(one.outcome, ReapOutcome::Reaped), "{report:?}");
    one
}

#[test]
fn a_stale_lun_that_a_process_has_open_stays() {
    let (fake, engine, stale) = with_two_attached();
    fake.kernel()
        .change(|state| state.units.retain(|address, _| address.lun == 2));
    let reader = fake.kernel().enter_opener(&stale.node, false);
    for request in [ReapRequest::default().dry_run(), ReapRequest::default()] {
        let report = engine.reap(&request, soon()).unwrap();
        let skipped = report.first_skipped().unwrap();
        assert_eq!(skipped.kind(), ErrorKind::InUse, "{report:?}");
        assert_eq!(fake.kernel().devices().len(), 2);
    }
    fake.kernel().leave_opener(reader);
    let report = engine.reap(&ReapRequest::default(), soon()).unwrap();
    reaped(&report);
    assert_eq!(fake.kernel().devices(), ["0:0:0:2"]);
}

#[test]
fn a_lun_at_which_another_unit_answers_is_reaped_and_reported_as_the_unit_that_it_was() {
    let (fake, engine, stale) = with_two_attached();
    let other = Unit::disk(9);
    fake.kernel()
        .change(|state| state.units.insert(Address::of(0, 1), other));
    let report = engine.reap(&ReapRequest::default(), soon()).unwrap();
    let stale_lun = reaped(&report);
    assert!(matches!(stale_lun.evidence, Evidence::Replaced { .. }));
    assert_eq!(stale_lun.identity.names, stale.identity().unwrap().names);
    assert_eq!(fake.kernel().devices(), ["0:0:0:2"]);
}

#[test]
fn the_target_is_asked_about_a_device_that_is_offline_and_only_its_answer_proves_it_stale() {
    let (fake, engine, _) = with_two_attached();
    let bus = engine.roots().sysfs.join("bus/scsi/devices");
    let state = bus.join("0:0:0:1/state");
    let devices = &engine.roots().devices;
    devices
        .write_attribute(&state, "offline\n", &|| true)
        .unwrap();
    let report = engine.reap(&ReapRequest::default(), soon()).unwrap();
    assert!(report.stale_luns.is_empty(), "the target lists it");
    assert_eq!(report.unproven.len(), 1, "{report:?}");
    fake.kernel()
        .change(|state| state.units.retain(|address, _| address.lun == 2));
    let report = engine.reap(&ReapRequest::default(), soon()).unwrap();
    let evidence = &reaped(&report).evidence;
    assert!(matches!(evidence, Evidence::NotListed { .. }), "{evidence}");
    assert_eq!(fake.kernel().devices(), ["0:0:0:2"]);
}
