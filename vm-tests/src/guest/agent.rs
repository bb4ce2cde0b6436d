//! What an agent that links `lunbd` does, on the target of a test.

use std::time::Duration;

use lunbd::engine::DetachFailure;
use lunbd::id::{Hctl, HostNo, Lun};
use lunbd::{AttachRequest, Attachment, Deadline, Detachment, Engine, Roots, Source};

use super::ScsiDebug;

/// An engine on the guest.
#[must_use]
pub fn engine() -> Engine {
    super::enter();
    Engine::start(Roots::default()).expect("an engine")
}

/// More than anything takes here that is not meant to time out.
#[must_use]
pub fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// A LUN of target 0 of the first host.
#[must_use]
pub fn at(target: &ScsiDebug, lun: Lun) -> Hctl {
    Hctl {
        host: HostNo(target.host()),
        channel: 0,
        target: 0,
        lun,
    }
}

/// The same, by the kernel's number.
#[must_use]
pub fn unit(target: &ScsiDebug, lun: u64) -> Source {
    at(target, Lun::from_kernel(lun)).into()
}

/// Attaches it; panics where that fails.
#[allow(
    clippy::must_use_candidate,
    reason = "some tests want the device and not the answer"
)]
pub fn attach(engine: &Engine, target: &ScsiDebug, lun: u64) -> Attachment {
    let request = AttachRequest::new(unit(target, lun));
    engine.attach(&request, soon()).expect("an attach")
}

/// Detaches it.
pub fn detach(engine: &Engine, target: &ScsiDebug, lun: u64) -> Result<Detachment, DetachFailure> {
    engine.detach(unit(target, lun), soon())
}
