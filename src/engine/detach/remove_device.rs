//! Removes one SCSI device: claim, flush, delete, confirm, in the order that loses no
//! data.

use crate::deadline::Deadline;
use crate::engine::call::CallContext;
use crate::engine::detach::receipt::Flush;
use crate::engine::usage::claim::{Claim, FlushPolicy, claim_replaced};
use crate::engine::usage::failed_flush::FailedFlush;
use crate::engine::usage::refuse_users_of_diskless;
use crate::engine::usage::write_back::claim_and_flush;
use crate::engine::{Engine, first_names};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{self, Identity, ScsiDevice};
use crate::uevent::{self, Watch};

/// Removes a device that nothing uses. The claim is held until the delete has
/// returned, so that no process can mount the device in between.
pub(in crate::engine) fn remove_device(
    engine: &Engine,
    device: &ScsiDevice,
    watch: &mut Watch,
    call: &mut CallContext,
) -> Result<Flush> {
    let Some(disk) = device.disk()? else {
        call.enter(Stage::Delete);
        delete_diskless(engine, device, watch, call.deadline)?;
        return Ok(Flush::NoDisk);
    };
    let claimed = claim_and_flush(engine, &disk, FlushPolicy::Require, watch, call)?;
    call.enter(Stage::Delete);
    delete_disk(engine, device, &disk, claimed.claim, watch, call.deadline)?;
    Ok(claimed.flush)
}

/// Removes the stale device at an address where the unit `now` answers, as
/// [`remove_unwritten`].
pub(in crate::engine) fn remove_replaced(
    engine: &Engine,
    device: &ScsiDevice,
    now: &Identity,
    watch: &mut Watch,
    call: &mut CallContext,
) -> Result<Flush> {
    tracing::info!(hctl = %device.hctl(), %now, "another unit answers: deleting the stale device");
    remove_unwritten(engine, device, watch, call)?;
    let hctl = device.hctl();
    Ok(Flush::Replaced(format!("{now} answers at {hctl} now")))
}

/// Removes a device that leads to no unit, or not to its own. The call writes nothing to it, so it
/// refuses while any process has the device open.
pub(in crate::engine) fn remove_unwritten(
    engine: &Engine,
    device: &ScsiDevice,
    watch: &mut Watch,
    call: &mut CallContext,
) -> Result<()> {
    let deadline = call.deadline;
    let Some(disk) = device.disk()? else {
        call.enter(Stage::Delete);
        return delete_diskless(engine, device, watch, deadline);
    };
    call.enter(Stage::Claim);
    let held = claim_replaced(engine, &disk, watch, deadline)?;
    call.enter(Stage::Delete);
    delete_disk(engine, device, &disk, held, watch, deadline)
}

/// Deletes a device that had no disk when the caller looked at it, and that has no user.
///
/// # Errors
/// `Vanished` where its disk has appeared since, which is not claimed: nothing is
/// done. `InUse`, which names the users. Else those of a delete.
pub(in crate::engine) fn delete_diskless(
    engine: &Engine,
    device: &ScsiDevice,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<()> {
    if let Some(disk) = device.disk()? {
        let message = format!("{} is now the disk of {}", disk.name(), device.hctl());
        return Err(Error::new(ErrorKind::Vanished, message).at(Stage::Delete));
    }
    refuse_users_of_diskless(engine, device, deadline)?;
    first_names::forget(engine.roots(), device.hctl());
    scsi::delete(device, &engine.scheduler, watch, deadline)
}

/// Deletes the device under the claim `held` and returns when udev has handled the
/// removal.
pub(in crate::engine) fn delete_disk(
    engine: &Engine,
    device: &ScsiDevice,
    disk: &BlockDevice,
    held: Claim,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<()> {
    let (roots, mode) = (engine.roots(), engine.hub().mode());
    let removed_device = uevent::RemovedDevice::of(roots, disk)?;
    let mark = FailedFlush::of(roots, disk)?;
    first_names::forget_if_deleted(roots, device.hctl(), deadline, || {
        scsi::delete(device, &engine.scheduler, watch, deadline)
    })?;
    drop(held);
    mark.clear_unless_cache_unflushed();
    uevent::settle_removal(watch, mode, roots, &removed_device, deadline)
}
