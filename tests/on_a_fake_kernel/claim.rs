//! The claim of a disk and the flush under it, on the kernel of `tests/fake_kernel`: what
//! prevents a removal, and what does not.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::fake_kernel::{Address, FakeKernel, Kernel, Unit, access};
use lunbd::deadline::Cancel;
use lunbd::engine::{DetachFailure, Flush, StageObserver};
use lunbd::error::Stage;
use lunbd::kernel::OpenMode;
use lunbd::{
    AttachRequest, Attachment, Deadline, DetachRequest, Detachment, Engine, ErrorKind, Source,
};

const ADDRESS: &str = "0:0:0:1";

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn source() -> Source {
    format!("scsi:{ADDRESS}").parse().unwrap()
}

/// A machine with one disk, which is attached.
struct Attached {
    fake: FakeKernel,
    engine: Arc<Engine>,
    disk: Attachment,
}

impl Attached {
    fn new() -> Self {
        let fake = FakeKernel::with_hosts(1);
        let unit = Unit::disk(1);
        fake.kernel()
            .change(|state| state.units.insert(Address::of(0, 1), unit));
        let engine = access::engine(fake.root());
        let disk = engine
            .attach(&AttachRequest::new(source()), soon())
            .unwrap();
        fake.kernel().settle();
        Self { fake, engine, disk }
    }

    fn kernel(&self) -> &Arc<Kernel> {
        self.fake.kernel()
    }

    fn detach(&self) -> Result<Detachment, DetachFailure> {
        self.engine.detach(source(), soon())
    }

    fn abandon(&self) -> Result<Detachment, DetachFailure> {
        let request = DetachRequest::new(source()).abandon_unwritten();
        self.engine.detach(request, soon())
    }

    fn node(&self) -> &PathBuf {
        &self.disk.node
    }

    /// Claims the disk as another process would, which `/proc` does not show.
    fn claim_unseen(&self) -> File {
        let roots = access::roots(self.fake.root());
        let (file, _) = roots
            .devices
            .open(self.node(), OpenMode::Exclusive)
            .unwrap();
        file
    }

    fn put_offline(&self) {
        let bus = self.engine.roots().sysfs.join("bus/scsi/devices");
        let state = bus.join(ADDRESS).join("state");
        let devices = &self.engine.roots().devices;
        devices
            .write_attribute(&state, "offline\n", &|| true)
            .unwrap();
    }

    fn fail_writes(&self, fail: bool) {
        self.kernel().change(|state| {
            let units = state.units.values_mut();
            units.for_each(|unit| unit.fails_writes = fail);
        });
    }

    /// Panics unless the detach was refused for a user at its claim and the disk is there.
    fn require_refused(&self, done: Result<Detachment, DetachFailure>, because: &str) {
        let failure = done.unwrap_err();
        assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
        assert!(failure.to_string().contains(because), "{failure}");
        assert!(!failure.receipt.safe_to_unmap);
        assert_eq!(self.kernel().devices(), [ADDRESS]);
    }
}

#[test]
fn a_disk_that_an_unseen_process_has_claimed_stays() {
    let attached = Attached::new();
    let claim = attached.claim_unseen();
    let because = "a process that /proc does not show";
    attached.require_refused(attached.detach(), because);
    attached.require_refused(attached.abandon(), because);
    drop(claim);
    assert!(attached.detach().unwrap().safe_to_unmap);
}

#[test]
fn a_disk_that_went_offline_under_its_file_system_stays() {
    let attached = Attached::new();
    let devno = attached.disk.devno.to_string();
    attached.kernel().enter_mount(&devno, "/tmp/lunbd-offline");
    attached.put_offline();
    attached.require_refused(attached.detach(), "mounted on /tmp/lunbd-offline");
    attached.require_refused(attached.abandon(), "mounted on /tmp/lunbd-offline");
    attached.kernel().leave_mount(&devno);
    let flush = attached.detach().unwrap().flush;
    assert!(matches!(flush, Some(Flush::Unreachable(_))), "{flush:?}");
}

#[test]
fn a_disk_whose_node_leads_to_another_device_is_not_taken_for_one_that_cannot_be_opened() {
    let attached = Attached::new();
    let node = fs::read_to_string(attached.node()).unwrap();
    let devno = attached.disk.devno.to_string();
    fs::write(attached.node(), node.replace(&devno, "8:240")).unwrap();
    let short = Deadline::after(Duration::from_secs(1));
    let failure = attached.engine.detach(source(), short).unwrap_err();
    assert_eq!(attached.kernel().devices(), [ADDRESS], "{failure}");
    fs::write(attached.node(), node).unwrap();
    assert!(attached.detach().unwrap().safe_to_unmap);
}

#[test]
fn a_caller_that_abandons_unwritten_data_continues_though_the_writes_fail() {
    let attached = Attached::new();
    attached.kernel().write_to(attached.node());
    attached.fail_writes(true);
    let detached = attached.abandon().unwrap();
    assert!(
        matches!(detached.flush, Some(Flush::Abandoned(_))),
        "{detached:?}"
    );
    assert!(!detached.safe_to_unmap);
    assert_eq!(attached.kernel().devices(), [] as [&str; 0]);
}

#[test]
fn an_abandoned_flush_that_succeeds_does_not_hide_the_earlier_loss() {
    let attached = Attached::new();
    attached.kernel().write_to(attached.node());
    attached.fail_writes(true);
    let failure = attached.detach().unwrap_err();
    assert_eq!(failure.stage(), Some(Stage::Flush), "{failure}");
    attached.fail_writes(false);
    // The caller abandons the data, and ends before the disk is deleted.
    let cancel = Cancel::new();
    let limit = soon().cancelled_by(&cancel);
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Delete {
            cancel.cancel();
        }
    });
    let request = DetachRequest::new(source()).abandon_unwritten();
    let cancelled = attached.engine.detach(request.observe(observer), limit);
    assert_eq!(cancelled.unwrap_err().kind(), ErrorKind::Cancelled);
    let failure = attached.detach().unwrap_err();
    assert!(
        failure.to_string().contains("an earlier flush of"),
        "{failure}"
    );
    assert_eq!(attached.kernel().devices(), [ADDRESS]);
}

#[test]
fn a_process_that_begins_to_write_during_a_long_flush_is_refused() {
    let attached = Attached::new();
    let (kernel, node) = (Arc::clone(attached.kernel()), attached.node().clone());
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Flush {
            kernel.enter_opener(&node, true);
            // The flush takes longer than a look at the users stays valid.
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(200) {
                thread::park_timeout(Duration::from_millis(50));
            }
        }
    });
    let request = DetachRequest::new(source()).observe(observer);
    let detached = attached.engine.detach(request, soon());
    attached.require_refused(detached, "open for writing in process");
}

#[test]
fn a_caller_that_abandons_unwritten_data_does_not_wait_for_a_hanging_flush() {
    let attached = Attached::new();
    let kernel = Arc::clone(attached.kernel());
    let observer = StageObserver::new(move |stage| {
        if stage == Stage::Flush {
            kernel.change(|state| state.swallows = true);
        }
    });
    let request = DetachRequest::new(source()).observe(observer);
    let limit = Deadline::after(Duration::from_secs(6));
    let failure = attached.engine.detach(request, limit).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::TimedOut, "{failure}");
    attached.kernel().change(|state| state.swallows = false);
    // The flush still has the disk open.
    attached.kernel().enter_opener(attached.node(), false);
    let failure = attached.detach().unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::Quarantined, "{failure}");
    let detached = attached.abandon().unwrap();
    assert!(
        matches!(detached.flush, Some(Flush::Abandoned(_))),
        "{detached:?}"
    );
    assert_eq!(attached.kernel().devices(), [] as [&str; 0]);
}

#[test]
fn an_abandoned_flush_that_hangs_leaves_half_of_the_time_for_the_delete() {
    let attached = Attached::new();
    let kernel = Arc::clone(attached.kernel());
    let observer = StageObserver::new(move |stage| match stage {
        Stage::Flush => kernel.change(|state| state.swallows = true),
        Stage::Delete => kernel.change(|state| state.swallows = false),
        _ => {}
    });
    let request = DetachRequest::new(source()).abandon_unwritten();
    let limit = Deadline::after(Duration::from_secs(6));
    let detached = attached.engine.detach(request.observe(observer), limit);
    let flush = detached.unwrap().flush;
    assert!(matches!(flush, Some(Flush::Abandoned(_))), "{flush:?}");
    assert_eq!(attached.kernel().devices(), [] as [&str; 0]);
}
