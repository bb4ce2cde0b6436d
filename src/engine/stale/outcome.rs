//! The outcome for a stale LUN.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::addresses::lock_addresses;
use crate::engine::call::CallContext;
use crate::engine::detach::remove_device::delete_disk;
use crate::engine::stale::evidence::{LunCheck, StaleProof, check_lun};
use crate::engine::unit::lock_unit;
use crate::engine::usage::claim::{FlushPolicy, claim_disk};
use crate::engine::usage::{Extent, Removal, users_of};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, VolumeId};
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{Identity, ScsiDevice};

/// How long another process may hold the address: the other stale LUNs of the host wait
/// meanwhile.
const LOCK_LIMIT: Duration = Duration::from_secs(10);

/// What became of a stale LUN, or in a dry run what would.
#[derive(Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(
    feature = "serde",
    serde(tag = "outcome", content = "error", rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum ReapOutcome {
    /// sysfs no longer shows it, and udev has handled its removal.
    Reaped,
    /// In a dry run: no user of it was seen. Only the claim of a reap can prove that no
    /// process has claimed it.
    Reapable,
    /// It is still there, for this reason: `InUse` names the users.
    Skipped(Error),
}

impl ReapOutcome {
    /// A word for logs and labels.
    pub(in crate::engine) fn as_str(&self) -> &'static str {
        self.into()
    }
}

/// The outcome for a device of a journal's volume.
pub(in crate::engine) fn skipped_for(volume: &VolumeId) -> ReapOutcome {
    let message = format!("it belongs to volume {volume}: detach that volume");
    ReapOutcome::Skipped(Error::new(ErrorKind::InUse, message).at(Stage::Claim))
}

/// The outcome of a dry run.
pub(in crate::engine) fn dry_run_outcome(
    engine: &Engine,
    disk: &BlockDevice,
    deadline: Deadline,
) -> ReapOutcome {
    match refuse_users(engine, disk, deadline) {
        Ok(()) => ReapOutcome::Reapable,
        Err(error) => ReapOutcome::Skipped(error),
    }
}

/// # Errors
/// `InUse`, naming all users that are seen: a refused claim would name only some of
/// them. `NotPermitted` if some cannot be seen.
fn refuse_users(engine: &Engine, disk: &BlockDevice, deadline: Deadline) -> Result<()> {
    let users = users_of(engine, disk, Extent::All, deadline)?;
    users.refuse_busy(engine.roots(), disk, Removal::UnflushedDisk)?;
    users.refuse_unless_all_seen(disk)
}

pub(super) fn remove_stale_lun(
    engine: &Engine,
    device: &ScsiDevice,
    proof: &StaleProof,
    owner: FindOwner<'_>,
    call: &mut CallContext,
) -> ReapOutcome {
    match lock_and_delete(engine, device, proof, owner, call) {
        Ok(()) => ReapOutcome::Reaped,
        Err(_) if !device.is_there() => ReapOutcome::Reaped,
        Err(error) => ReapOutcome::Skipped(error),
    }
}

#[tracing::instrument(
    name = "stale_lun",
    skip_all,
    fields(hctl = %device.hctl(), disk = proof.disk.name())
)]
fn lock_and_delete(
    engine: &Engine,
    device: &ScsiDevice,
    proof: &StaleProof,
    owner: FindOwner<'_>,
    call: &mut CallContext,
) -> Result<()> {
    let deadline = call.deadline;
    let hctl = device.hctl();
    call.enter(Stage::Lock);
    let limit = deadline.at_most(LOCK_LIMIT.min(deadline.remaining() / 4));
    let _address = lock_addresses(engine, BTreeSet::from([hctl]), limit)?;
    let _unit = lock_unit(engine, &proof.was.names, limit)?;
    // An attach that held the locks meanwhile has written the volume's record.
    if let Some(volume) = owner(&proof.was, hctl)? {
        let message = format!("it belongs to volume {volume} now");
        return Err(Error::new(ErrorKind::InUse, message).at(Stage::Lock));
    }
    call.enter(Stage::Claim);
    refuse_users(engine, &proof.disk, deadline)?;
    let mut watch = engine.hub().watch(&hctl.to_string());
    let claim = claim_disk(
        engine,
        &proof.disk,
        FlushPolicy::Require,
        &mut watch,
        deadline,
    )?;
    // The array may have mapped the unit again during the wait for the locks.
    call.enter(Stage::Identify);
    match check_lun(engine, device, deadline) {
        LunCheck::Stale(_) => {}
        LunCheck::Removed => return Ok(()),
        LunCheck::Present => return Err(no_proof("it answers again")),
        LunCheck::Unproven { why, .. } => return Err(no_proof(&why)),
    }
    call.enter(Stage::Delete);
    delete_disk(engine, device, &proof.disk, claim, &mut watch, deadline)
}

fn no_proof(why: &str) -> Error {
    let message = format!("the proof did not hold under the claim: {why}");
    Error::new(ErrorKind::NotReady, message).at(Stage::Identify)
}

/// Returns the volume to which a unit belongs.
pub(super) type FindOwner<'a> = &'a (dyn Fn(&Identity, Hctl) -> Result<Option<VolumeId>> + Sync);
