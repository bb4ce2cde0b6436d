//! The step of one volume: its kind, and its reason.

use std::borrow::Cow;
use std::fmt;

use super::desired::Wanted;
use crate::engine::journal::{AttachedSpec, Operation, VolumeSpec, must_be_detached_first};
use crate::engine::{Condition, VolumeStatus};
use crate::id::VolumeId;

/// The step for one volume.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Step {
    /// The volume.
    pub volume: VolumeId,
    /// The kind of the step.
    pub kind: StepKind,
    /// The reason, in words.
    pub reason: Cow<'static, str>,
    /// The volumes whose steps come first, since they have what this volume wants.
    pub after: Vec<VolumeId>,
}

/// The kinds of steps.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    serde::Serialize,
    strum::Display,
    strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StepKind {
    // The order of the variants is the order in a plan.
    /// Detaches the volume.
    Detach,
    /// Finishes an operation that was begun: a detach, or a resize.
    Finish,
    /// Connects an NBD device to its server again.
    Heal,
    /// Attaches the volume, with all its proofs; also one that is attached already, for a path
    /// that came back or another option.
    Attach,
    /// Takes over the size that the array reports.
    Resize,
    /// Asks the device itself: a SCSI unit for its identity, an NBD device whether its server
    /// is there, and heals it where it is not.
    Verify,
    /// Nothing can be done now: it waits for an outside change.
    Wait,
    /// Nothing is done: what is wanted conflicts with another volume.
    Refused,
}

impl StepKind {
    /// Whether the step does anything.
    #[must_use]
    pub fn acts(self) -> bool {
        !matches!(self, Self::Wait | Self::Refused)
    }

    /// The name used in messages and in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.kind, self.volume, self.reason)?;
        for (place, volume) in self.after.iter().enumerate() {
            write!(f, "{} {volume}", if place == 0 { "; after" } else { "," })?;
        }
        Ok(())
    }
}

/// The step for one volume, without regard to the other volumes.
pub(super) fn step_for(
    volume: &VolumeId,
    wanted: Option<&Wanted>,
    status: Option<&VolumeStatus>,
) -> Option<Step> {
    let (kind, reason) = match (wanted, status) {
        (Some(wanted), Some(status)) => step_to_wanted(wanted, status)?,
        (Some(_), None) => (StepKind::Attach, "it is wanted and not attached".into()),
        (None, Some(status)) => match status.under_way {
            Some(Operation::Detach { .. }) => (
                StepKind::Finish,
                "it is not wanted, and its detach was begun".into(),
            ),
            _ => (StepKind::Detach, "it is not wanted".into()),
        },
        (None, None) => return None,
    };
    Some(Step {
        volume: volume.clone(),
        kind,
        reason,
        after: Vec::new(),
    })
}

/// The kind and the reason of the step to a wanted volume.
fn step_to_wanted(wanted: &Wanted, status: &VolumeStatus) -> Option<(StepKind, Cow<'static, str>)> {
    let spec = &wanted.spec;
    if let Some(reason) = detach_reason(spec, status) {
        return Some((StepKind::Detach, reason.into()));
    }
    let attach = |reason: &'static str| Some((StepKind::Attach, reason.into()));
    if status.spec != *spec {
        return attach("its wanted settings differ from the attached ones");
    }
    match status.under_way {
        Some(Operation::Attach) => return attach("its attach was begun"),
        Some(Operation::Detach { .. }) => {
            return attach("its detach was begun, and it is wanted");
        }
        Some(Operation::Resize { .. }) if status.condition == Condition::HalfAttached => {
            return Some((StepKind::Finish, "its resize was begun".into()));
        }
        _ => {}
    }
    let is_nbd = spec.nbd.is_some();
    let verify = |reason: &String| Some((StepKind::Verify, reason.clone().into()));
    match status.condition {
        Condition::Complete | Condition::LinkDead if status.lacks_a_path() => {
            Some((StepKind::Attach, missing_path_reason(status).into()))
        }
        Condition::Complete => match &status.verify_reason {
            Some(reason) => verify(reason),
            None => resize_reason(wanted, status).map(|reason| (StepKind::Resize, reason.into())),
        },
        Condition::LinkDead if is_nbd => Some((StepKind::Heal, status.seen.clone().into())),
        Condition::LinkDead => match &status.verify_reason {
            Some(reason) => verify(reason),
            None => Some((StepKind::Wait, status.seen.clone().into())),
        },
        Condition::Gone => attach("nothing of it is attached any more"),
        Condition::Changed => Some((StepKind::Attach, status.seen.clone().into())),
        Condition::HalfAttached | Condition::HalfDetached => attach("it is only partly attached"),
    }
}

/// Why to resize the volume.
fn resize_reason(wanted: &Wanted, status: &VolumeStatus) -> Option<String> {
    let least = wanted.min_size?;
    if wanted.is_large_enough(status.size) {
        return None;
    }
    let has = match status.size {
        Some(size) => format!("it has {size} bytes"),
        None => "its size is unknown".to_owned(),
    };
    Some(format!("{has}, and at least {least} are wanted"))
}

/// Why to attach a volume that lacks a path.
fn missing_path_reason(status: &VolumeStatus) -> String {
    if status.unscanned.is_empty() {
        let portals = status.without_session.iter().map(ToString::to_string);
        let portals: Vec<String> = portals.collect();
        return format!("no session leads through {}", portals.join(" and "));
    }
    let paths: Vec<String> = status.unscanned.iter().map(ToString::to_string).collect();
    format!(
        "no device is at {}, where a path of it leads",
        paths.join(" and ")
    )
}

/// Why a volume must be detached before it can be attached as wanted.
pub(super) fn detach_reason(wanted: &VolumeSpec, status: &VolumeStatus) -> Option<String> {
    if status.spec == *wanted {
        return None;
    }
    let attached = AttachedSpec {
        spec: &status.spec,
        names: &status.names,
        nbd_index: status.nbd_index,
    };
    must_be_detached_first(attached, wanted).map(|conflict| conflict.why)
}
