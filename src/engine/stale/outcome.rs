//! What becomes of a phantom.

use std::collections::BTreeSet;
use std::time::Duration;

use super::evidence::{Case, Verdict};
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::timing::Phases;
use crate::engine::usage::{Act, Extent};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, VolumeId};
use crate::kernel::blockdev::BlockDevice;
use crate::scsi::{Identity, ScsiDevice};

/// How long another process may take with the address: the other phantoms of the
/// host wait for it.
const LEASE_LIMIT: Duration = Duration::from_secs(10);

/// What became of a phantom, or would.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(
    feature = "serde",
    serde(tag = "fate", content = "error", rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum Fate {
    /// sysfs shows it no more, and udev has handled that.
    Reaped,
    /// A dry run: nobody is seen to use it. Whether somebody has claimed it, only
    /// the claim of a reap can prove.
    Reapable,
    /// It stands, for this reason: `InUse` names the users.
    Kept(Error),
}

impl Fate {
    /// A word for logs and labels.
    pub(in crate::engine) fn as_str(&self) -> &'static str {
        match self {
            Self::Reaped => "reaped",
            Self::Reapable => "reapable",
            Self::Kept(_) => "kept",
        }
    }
}

/// It is a volume of the journal.
pub(in crate::engine) fn left_to(volume: &VolumeId) -> Fate {
    let message = format!("it is volume {volume}, which is left to its detach");
    Fate::Kept(Error::new(ErrorKind::InUse, message).at(Stage::Claim))
}

impl Engine {
    /// What would become of it.
    pub(in crate::engine) fn foresee(&self, disk: &BlockDevice, deadline: Deadline) -> Fate {
        match self.refuse_users(disk, deadline) {
            Ok(()) => Fate::Reapable,
            Err(error) => Fate::Kept(error),
        }
    }

    /// # Errors
    /// `InUse`, naming all that are seen: a refused claim would name some of them.
    /// `NotPermitted` where some cannot be seen.
    fn refuse_users(&self, disk: &BlockDevice, deadline: Deadline) -> Result<()> {
        let users = self.users_of(disk, Extent::All, deadline)?;
        users.refuse_busy(self.roots(), disk, Act::TakeUnflushed)?;
        users.refuse_blind(disk)
    }

    pub(super) fn take_phantom(
        &self,
        device: &ScsiDevice,
        case: &Case,
        owner: Owner<'_>,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Fate {
        match self.take(device, case, owner, phases, deadline) {
            Ok(()) => Fate::Reaped,
            Err(_) if !device.is_there() => Fate::Reaped,
            Err(error) => Fate::Kept(error),
        }
    }

    #[tracing::instrument(
        name = "phantom",
        skip_all,
        fields(hctl = %device.hctl(), disk = case.disk.name())
    )]
    fn take(
        &self,
        device: &ScsiDevice,
        case: &Case,
        owner: Owner<'_>,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<()> {
        let hctl = device.hctl();
        phases.enter(Stage::Lock);
        let limit = deadline.at_most(LEASE_LIMIT.min(deadline.remaining() / 4));
        let _address = self.lease_addresses(BTreeSet::from([hctl]), limit)?;
        let _unit = self.lease_unit(&case.was.names, limit)?;
        // An attach that had it meanwhile has written down whose it is.
        if let Some(volume) = owner(&case.was, hctl) {
            let message = format!("it has become volume {volume}");
            return Err(Error::new(ErrorKind::InUse, message).at(Stage::Lock));
        }
        phases.enter(Stage::Claim);
        self.refuse_users(&case.disk, deadline)?;
        let mut watch = self.hub().watch(&hctl.to_string());
        let claim = self.claim(&case.disk, false, &mut watch, deadline)?;
        // The array may have taken it back while it was waited for.
        phases.enter(Stage::Identify);
        match self.is_phantom(device, deadline) {
            Verdict::Gone(_) => {}
            Verdict::Left => return Ok(()),
            Verdict::Stands => return Err(no_proof("it answers again")),
            Verdict::Unproven { why, .. } => return Err(no_proof(&why)),
        }
        phases.enter(Stage::Delete);
        self.delete(device, &case.disk, claim, &mut watch, deadline)
    }
}

fn no_proof(why: &str) -> Error {
    let message = format!("the proof did not hold under the claim: {why}");
    Error::new(ErrorKind::NotReady, message).at(Stage::Identify)
}

/// Whose a unit is.
pub(super) type Owner<'a> = &'a (dyn Fn(&Identity, Hctl) -> Option<VolumeId> + Sync);
