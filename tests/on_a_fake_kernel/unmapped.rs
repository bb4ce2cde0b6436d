//! A LUN that the target does not have any more, on the kernel of `tests/fake_kernel`.

use std::sync::Arc;
use std::time::Duration;

use crate::fake_kernel::{Address, FakeKernel, Unit, access};
use lunbd::engine::Flush;
use lunbd::{AttachRequest, Deadline, Engine, ErrorKind, Source};

const NONE: [&str; 0] = [];

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn request() -> AttachRequest {
    let source: Source = "scsi:0:0:0:1".parse().unwrap();
    AttachRequest::new(source)
}

/// A machine with an attached disk whose LUN the target has no more.
fn unmapped() -> (FakeKernel, Arc<Engine>, lunbd::Attachment) {
    let fake = FakeKernel::with_hosts(1);
    let at = Address::of(0, 1);
    fake.kernel()
        .change(|state| state.units.insert(at, Unit::disk(1)));
    let engine = access::engine(fake.root());
    let attached = engine.attach(&request(), soon()).unwrap();
    fake.kernel().settle();
    fake.kernel().change(|state| {
        state.refuses_inquiry = true;
        state.units.remove(&at);
    });
    (fake, engine, attached)
}

#[test]
fn an_attach_removes_the_idle_device_of_a_lun_that_its_target_has_no_more() {
    let (fake, engine, attached) = unmapped();
    let reader = fake.kernel().enter_opener(&attached.node, false);
    let error = engine.attach(&request(), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let said = error.to_string();
    assert!(said.contains("it has no unit at this LUN"), "{said}");
    assert_eq!(fake.kernel().devices(), ["0:0:0:1"]);
    fake.kernel().leave_opener(reader);
    let error = engine.attach(&request(), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(fake.kernel().devices(), NONE);
}

#[test]
fn a_detach_removes_the_only_path_unflushed_if_its_target_has_no_unit_there() {
    let (fake, engine, _) = unmapped();
    let source: Source = "scsi:0:0:0:1".parse().unwrap();
    let detached = engine.detach(source, soon()).unwrap();
    let flush = &detached.flush;
    assert!(matches!(flush, Some(Flush::Replaced(_))), "{detached:?}");
    assert!(!detached.safe_to_unmap);
    assert_eq!(fake.kernel().devices(), NONE);
}
