//! The plan: the steps from the present state to the wanted one.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use super::actual::Actual;
use super::desired::Desired;
use super::resource::Resource;
use super::step::{Step, StepKind, detach_reason, step_for};
use crate::engine::VolumeStatus;
use crate::engine::journal::VolumeSpec;
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
/// | | as wanted, and the device itself was not asked yet | verify |
/// | | as wanted, but smaller; a larger device is left as it is | resize |
/// | | as a SCSI unit without a working path | wait |
/// | | as the unit of another volume | refused |
/// | no | in any way | detach, or finish a detach that was begun |
#[must_use]
pub fn plan(desired: &Desired, actual: &Actual) -> Plan {
    // Both are sorted by name, so one pass covers both.
    let mut wanted = desired.all_wanted().peekable();
    let mut attached = actual.volumes.iter().peekable();
    let mut steps: Vec<Step> = Vec::new();
    loop {
        let next_wanted = wanted.peek().map(|(volume, _)| *volume);
        let next_attached = attached.peek().map(|(volume, _)| *volume);
        let Some(volume) = next_wanted.into_iter().chain(next_attached).min() else {
            break;
        };
        let wanted = wanted.next_if(|(next, _)| *next == volume);
        let status = attached.next_if(|(next, _)| *next == volume);
        let wanted = wanted.map(|(_, wanted)| wanted);
        steps.extend(step_for(volume, wanted, status.map(|(_, status)| status)));
    }
    let has_attach = steps.iter().any(|step| step.kind == StepKind::Attach);
    if has_attach && !actual.volumes.is_empty() {
        order_by_resources(&mut steps, desired, actual);
    }
    // A detach waits for no other step, so it can come first.
    steps.sort_by_key(|step| step.kind);
    Plan { steps }
}

/// The volume that has each resource.
type Owners<'a> = HashMap<Resource<'a>, &'a VolumeStatus>;

/// Makes attaches wait for the volumes that have what they want. Only an attach waits,
/// and only for a detach, so no two steps wait for each other.
fn order_by_resources(steps: &mut [Step], desired: &Desired, actual: &Actual) {
    let owners: Owners<'_> = actual.iter().flat_map(owned).collect();
    for at in 0..steps.len() {
        let Some(step) = steps.get_mut(at) else {
            continue;
        };
        let wanted = desired.get(&step.volume);
        let Some(wanted) = wanted.filter(|_| step.kind == StepKind::Attach) else {
            continue;
        };
        match owners_of(&step.volume, wanted, desired, &owners) {
            Err(reason) => (step.kind, step.reason) = (StepKind::Refused, reason.into()),
            Ok(owners) => {
                step.after = owners.iter().copied().cloned().collect();
                for owner in owners {
                    turn_into_detach(steps, owner);
                }
            }
        }
    }
}

/// What an attached volume has.
fn owned(status: &VolumeStatus) -> impl Iterator<Item = (Resource<'_>, &VolumeStatus)> {
    let names = status.names.iter().map(Resource::Unit);
    let resources = Resource::of(&status.spec).chain(names);
    resources.map(move |resource| (resource, status))
}

/// The other volumes that have what this one wants.
///
/// # Errors
/// Why its step is refused, where another volume also wants what it has.
fn owners_of<'a>(
    volume: &VolumeId,
    wanted: &VolumeSpec,
    desired: &Desired,
    owners: &Owners<'a>,
) -> Result<BTreeSet<&'a VolumeId>, String> {
    let mut others = BTreeSet::new();
    let mut refused = None;
    for resource in Resource::of(wanted) {
        let owner = owners.get(&resource);
        let Some(&owner) = owner.filter(|owner| owner.volume != *volume) else {
            continue;
        };
        let keeps_it = |theirs: &VolumeSpec| {
            Resource::of(theirs).any(|theirs| theirs == resource)
                || matches!(resource, Resource::Unit(_)) && detach_reason(theirs, owner).is_none()
        };
        let other = &owner.volume;
        if desired.get(other).is_some_and(keeps_it) {
            refused = Some(format!(
                "{resource} belongs to volume {other}, and it also wants it"
            ));
        } else {
            others.insert(other);
        }
    }
    refused.map_or(Ok(others), Err)
}

/// Makes the step of a volume a detach, since an attach waits for it.
fn turn_into_detach(steps: &mut [Step], volume: &VolumeId) {
    let at = steps.binary_search_by(|step| step.volume.cmp(volume));
    let Some(step) = at.ok().and_then(|at| steps.get_mut(at)) else {
        return;
    };
    match step.kind {
        StepKind::Finish => return,
        StepKind::Detach => {}
        _ => step.reason = "another volume is wanted at its place".into(),
    }
    step.kind = StepKind::Detach;
    step.after.clear();
}

#[cfg(test)]
mod tests;
