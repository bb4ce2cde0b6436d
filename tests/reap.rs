//! A reap beside a reconciler that runs, on the kernel of `tests/fake_kernel`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test panics to fail"
)]

#[allow(dead_code, reason = "other tests use the rest of it")]
mod fake_kernel;

use std::thread;
use std::time::Duration;

use fake_kernel::{Address, FakeKernel, Unit, access};
use lunbd::engine::{ReapOutcome, ReapRequest};
use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Options, Reconciler};
use lunbd::{AttachRequest, Deadline, Source};

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
        drop(stop);
        running.join().unwrap().unwrap();
    });
}
