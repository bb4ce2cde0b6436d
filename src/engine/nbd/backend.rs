//! The NBD device of a backend id.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::lock::device_lock::DeviceLock;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::BackendId;
use crate::nbd::NbdDevice;

/// Locks the device of this id for an attach, a detach or a resize.
pub(in crate::engine) fn lock_backend(
    engine: &Engine,
    backend: &BackendId,
    deadline: Deadline,
) -> Result<DeviceLock> {
    DeviceLock::take(engine.roots(), &DeviceLock::of_backend(backend), deadline)
}

/// The connected device of this id.
pub(in crate::engine) fn device_of_backend(
    engine: &Engine,
    backend: &BackendId,
) -> Result<Option<NbdDevice>> {
    let mut found = engine.backends.lock().of_backend(engine.roots(), backend)?;
    if found.len() > 1 {
        let names: Vec<String> = found.iter().map(|d| d.index().name()).collect();
        let message = format!("{} all have backend id {backend}", names.join(" and "));
        return Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Resolve));
    }
    if found.is_empty() {
        engine
            .nbd_offers
            .close_those_of_gone_devices(engine.roots());
    }
    Ok(found.pop())
}
