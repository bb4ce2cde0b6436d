//! The plan: the steps from the present state to the wanted one.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;

use super::actual::Actual;
use super::desired::{Desired, Wanted};
use super::resource::Resource;
use crate::engine::journal::{AttachedSpec, Operation, VolumeSpec, must_be_detached_first};
use crate::engine::{Condition, VolumeStatus};
use crate::id::VolumeId;

/// The steps, in a possible order: no step comes before one for which it waits. No volume has
/// two steps; a volume that must be detached and attached again gets the second in the next
/// plan.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
#[serde(transparent)]
pub struct Plan {
    /// The steps by kind: detaches and unfinished operations, then heals, attaches, resizes,
    /// and devices to verify; each kind is sorted by the volumes' names.
    pub steps: Vec<Step>,
}

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
    Prove,
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

impl fmt::Display for Plan {
    /// Writes one line for each step.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps.iter().try_for_each(|step| writeln!(f, "{step}"))
    }
}

impl Plan {
    /// Whether every wanted volume is attached as wanted, and no other volume of the journal
    /// is attached.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The step of a volume.
    #[must_use]
    pub fn step(&self, volume: &VolumeId) -> Option<&Step> {
        self.steps.iter().find(|step| step.volume == *volume)
    }
}

/// The steps after which the wanted volumes, and no other volumes of the journal, are
/// attached. Devices that the journal does not know are not part of the plan.
///
/// | wanted | attached | step |
/// |---|---|---|
/// | yes | not at all, partly, or as another device | attach |
/// | | with other options | attach; detach first where the option cannot be changed in place |
/// | | from another source, under another id, as another unit | detach |
/// | | without a path that is there, or without a session that it logs in to | attach |
/// | | as an NBD device without its server | heal |
/// | | as wanted, and the device itself was not asked yet | prove |
/// | | as wanted, but smaller; a larger device is left as it is | resize |
/// | | as a SCSI unit without a working path | wait |
/// | | as the unit of another volume | refused |
/// | no | in any way | detach, or finish a detach that was begun |
#[must_use]
pub fn plan(desired: &Desired, actual: &Actual) -> Plan {
    let mut steps = Vec::new();
    // Both are sorted by name, so one pass covers both.
    let mut wanted = desired.all_wanted().peekable();
    let mut there = actual.volumes.iter().peekable();
    loop {
        let order = match (wanted.peek(), there.peek()) {
            (Some((wanted, _)), Some((there, _))) => wanted.cmp(there),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => break,
        };
        let wanted = if order.is_le() { wanted.next() } else { None };
        let there = if order.is_ge() { there.next() } else { None };
        if let Some((volume, wanted)) = wanted {
            steps.extend(step_for(
                volume,
                Some(wanted),
                there.map(|(_, there)| there),
            ));
        } else if let Some((volume, there)) = there {
            steps.extend(step_for(volume, None, Some(there)));
        }
    }
    let attaches = steps.iter().any(|step| step.kind == StepKind::Attach);
    if attaches && !actual.volumes.is_empty() {
        settle_claims(&mut steps, desired, actual);
    }
    // A detach waits for no other step, so it can come first.
    steps.sort_by_key(|step| step.kind);
    Plan { steps }
}

/// The step for one volume, without regard to the other volumes.
pub(super) fn step_for(
    volume: &VolumeId,
    wanted: Option<&Wanted>,
    there: Option<&VolumeStatus>,
) -> Option<Step> {
    let (kind, reason) = match (wanted, there) {
        (Some(wanted), Some(there)) => of_wanted(wanted, there)?,
        (Some(_), None) => (StepKind::Attach, "it is wanted and not attached".into()),
        (None, Some(there)) => match there.under_way {
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

type What = (StepKind, Cow<'static, str>);

fn of_wanted(as_wanted: &Wanted, there: &VolumeStatus) -> Option<What> {
    let wanted = &as_wanted.spec;
    if let Some(reason) = moved(wanted, there) {
        return Some((StepKind::Detach, reason.into()));
    }
    let attach = |reason: &'static str| Some((StepKind::Attach, reason.into()));
    if there.spec != *wanted {
        return attach("its wanted settings differ from the attached ones");
    }
    match there.under_way {
        Some(Operation::Attach) => return attach("its attach was begun"),
        Some(Operation::Detach { .. }) => {
            return attach("its detach was begun, and it is wanted");
        }
        Some(Operation::Resize { .. }) if there.condition == Condition::HalfAttached => {
            return Some((StepKind::Finish, "its resize was begun".into()));
        }
        _ => {}
    }
    let is_nbd = wanted.nbd.is_some();
    let verify_reason = |verify_reason: &String| (StepKind::Prove, verify_reason.clone().into());
    match there.condition {
        Condition::Complete | Condition::LinkDead if there.lacks_a_path() => {
            Some((StepKind::Attach, unscanned(there).into()))
        }
        Condition::Complete => match &there.verify_reason {
            Some(reason) => Some(verify_reason(reason)),
            None => small(as_wanted, there).map(|reason| (StepKind::Resize, reason.into())),
        },
        Condition::LinkDead if is_nbd => Some((StepKind::Heal, there.seen.clone().into())),
        Condition::LinkDead => match &there.verify_reason {
            Some(reason) => Some(verify_reason(reason)),
            None => Some((StepKind::Wait, there.seen.clone().into())),
        },
        Condition::Gone => attach("nothing of it is attached any more"),
        Condition::Changed => Some((StepKind::Attach, there.seen.clone().into())),
        Condition::HalfAttached | Condition::HalfDetached => attach("it is only partly attached"),
    }
}

/// Why to resize the volume.
fn small(wanted: &Wanted, there: &VolumeStatus) -> Option<String> {
    let least = wanted.min_size?;
    if wanted.is_large_enough(there.size) {
        return None;
    }
    let has = match there.size {
        Some(size) => format!("it has {size} bytes"),
        None => "its size is unknown".to_owned(),
    };
    Some(format!("{has}, and at least {least} are wanted"))
}

fn unscanned(there: &VolumeStatus) -> String {
    if there.unscanned.is_empty() {
        let portals = there.without_session.iter().map(ToString::to_string);
        let portals: Vec<String> = portals.collect();
        return format!("no session leads through {}", portals.join(" and "));
    }
    let paths: Vec<String> = there.unscanned.iter().map(ToString::to_string).collect();
    format!(
        "no device is at {}, where a path of it leads",
        paths.join(" and ")
    )
}

/// Why a volume must be detached before it can be attached as wanted.
fn moved(wanted: &VolumeSpec, there: &VolumeStatus) -> Option<String> {
    if there.spec == *wanted {
        return None;
    }
    let standing = AttachedSpec {
        spec: &there.spec,
        names: &there.names,
        nbd_index: there.nbd_index,
    };
    must_be_detached_first(standing, wanted).map(|bar| bar.why)
}

/// Makes attaches wait for the volumes that have what they want. Only an attach waits,
/// and only for a detach, so no two steps wait for each other.
fn settle_claims(steps: &mut [Step], desired: &Desired, actual: &Actual) {
    let mut owners: HashMap<Resource<'_>, &VolumeStatus> = HashMap::new();
    for there in actual.iter() {
        let names = there.names.iter().map(Resource::Unit);
        owners.extend(
            Resource::of(&there.spec)
                .chain(names)
                .map(|resource| (resource, there)),
        );
    }
    let find = |steps: &[Step], volume: &VolumeId| {
        steps.binary_search_by(|step| step.volume.cmp(volume)).ok()
    };
    for at in 0..steps.len() {
        let Some(step) = steps.get(at).filter(|s| s.kind == StepKind::Attach) else {
            continue;
        };
        let Some(wanted) = desired.get(&step.volume) else {
            continue;
        };
        let mut after: Vec<VolumeId> = Vec::new();
        let mut refused = None;
        for resource in Resource::of(wanted) {
            let owner = owners
                .get(&resource)
                .filter(|owner| owner.volume != step.volume);
            let Some(&owner) = owner else {
                continue;
            };
            let theirs = desired.get(&owner.volume);
            if theirs.is_some_and(|theirs| Resource::of(theirs).any(|wants| wants == resource))
                || (matches!(resource, Resource::Unit(_))
                    && theirs.is_some_and(|theirs| moved(theirs, owner).is_none()))
            {
                let volume = &owner.volume;
                refused = Some(format!(
                    "{resource} belongs to volume {volume}, and it also wants it"
                ));
            } else if !after.contains(&owner.volume) {
                after.push(owner.volume.clone());
            }
        }
        if let Some(reason) = refused {
            if let Some(step) = steps.get_mut(at) {
                (step.kind, step.reason) = (StepKind::Refused, reason.into());
            }
            continue;
        }
        for volume in &after {
            let owner = find(steps, volume).and_then(|at| steps.get_mut(at));
            if let Some(owner) = owner.filter(|owner| owner.kind != StepKind::Finish) {
                if owner.kind != StepKind::Detach {
                    owner.reason = "another volume is wanted at its place".into();
                }
                owner.kind = StepKind::Detach;
                owner.after.clear();
            }
        }
        if let Some(step) = steps.get_mut(at) {
            after.sort();
            step.after = after;
        }
    }
}

#[cfg(test)]
mod tests;
