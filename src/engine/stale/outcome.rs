//! The outcome for a stale LUN.

use std::collections::BTreeSet;
use std::time::Duration;

use super::evidence::{LunCheck, StaleProof};
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::usage::claim::FlushPolicy;
use crate::engine::usage::{Extent, Removal};
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

impl Engine {
    /// The outcome of a dry run.
    pub(in crate::engine) fn dry_run_outcome(
        &self,
        disk: &BlockDevice,
        deadline: Deadline,
    ) -> ReapOutcome {
        match self.refuse_users(disk, deadline) {
            Ok(()) => ReapOutcome::Reapable,
            Err(error) => ReapOutcome::Skipped(error),
        }
    }

    /// # Errors
    /// `InUse`, naming all users that are seen: a refused claim would name only some of
    /// them. `NotPermitted` if some cannot be seen.
    fn refuse_users(&self, disk: &BlockDevice, deadline: Deadline) -> Result<()> {
        let users = self.users_of(disk, Extent::All, deadline)?;
        users.refuse_busy(self.roots(), disk, Removal::UnflushedDisk)?;
        users.refuse_unless_all_seen(disk)
    }

    pub(super) fn remove_stale_lun(
        &self,
        device: &ScsiDevice,
        proof: &StaleProof,
        owner: Owner<'_>,
        call: &mut CallContext,
    ) -> ReapOutcome {
        match self.lock_and_delete(device, proof, owner, call) {
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
        &self,
        device: &ScsiDevice,
        proof: &StaleProof,
        owner: Owner<'_>,
        call: &mut CallContext,
    ) -> Result<()> {
        let deadline = call.deadline;
        let hctl = device.hctl();
        call.enter(Stage::Lock);
        let limit = deadline.at_most(LOCK_LIMIT.min(deadline.remaining() / 4));
        let _address = self.lock_addresses(BTreeSet::from([hctl]), limit)?;
        let _unit = self.lock_unit(&proof.was.names, limit)?;
        // An attach that held the locks meanwhile has written the volume's record.
        if let Some(volume) = owner(&proof.was, hctl)? {
            let message = format!("it belongs to volume {volume} now");
            return Err(Error::new(ErrorKind::InUse, message).at(Stage::Lock));
        }
        call.enter(Stage::Claim);
        self.refuse_users(&proof.disk, deadline)?;
        let mut watch = self.hub().watch(&hctl.to_string());
        let claim = self.claim(&proof.disk, FlushPolicy::Require, &mut watch, deadline)?;
        // The array may have mapped the unit again during the wait for the locks.
        call.enter(Stage::Identify);
        match self.check_lun(device, deadline) {
            LunCheck::Stale(_) => {}
            LunCheck::Removed => return Ok(()),
            LunCheck::Present => return Err(no_proof("it answers again")),
            LunCheck::Unproven { why, .. } => return Err(no_proof(&why)),
        }
        call.enter(Stage::Delete);
        self.delete(device, &proof.disk, claim, &mut watch, deadline)
    }
}

fn no_proof(why: &str) -> Error {
    let message = format!("the proof did not hold under the claim: {why}");
    Error::new(ErrorKind::NotReady, message).at(Stage::Identify)
}

/// Returns the volume to which a unit belongs.
pub(super) type Owner<'a> = &'a (dyn Fn(&Identity, Hctl) -> Result<Option<VolumeId>> + Sync);
