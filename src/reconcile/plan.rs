//! From what stands to what is wanted.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;

use super::actual::Actual;
use super::desired::{Desired, Wanted};
use crate::engine::journal::{AttachedSpec, Operation, VolumeSpec, must_be_detached_first};
use crate::engine::{Condition, VolumeStatus};
use crate::id::{BackendId, Source, VolumeId, Wwid};

/// What is to be done, in an order in which it can be: no step comes before one
/// that it waits for. No volume has two steps; one that has to be detached and
/// attached anew has the second in the plan after that.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
#[serde(transparent)]
pub struct Plan {
    /// The steps: first what goes, then what stands without its server, then what
    /// comes, then what grows, then what is only to be asked; each by the volumes'
    /// names.
    pub steps: Vec<Step>,
}

/// What is to be done about one volume.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Step {
    /// The volume.
    pub volume: VolumeId,
    /// What.
    pub kind: StepKind,
    /// Why, in words.
    pub reason: Cow<'static, str>,
    /// The volumes whose steps come first, since they have what this one wants.
    pub after: Vec<VolumeId>,
}

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StepKind {
    // In the order of a plan.
    /// Detaches it.
    Detach,
    /// Finishes what was begun: a detach, or a resize.
    Finish,
    /// Brings an NBD device a new connection to its server.
    Heal,
    /// Attaches it, with all its proofs; also what stands already, for a path
    /// that came back or another option.
    Attach,
    /// Takes in the size that the array has given it.
    Resize,
    /// Asks the device itself: a SCSI unit who it is, an NBD device whether its
    /// server is there, which is healed where it is not.
    Prove,
    /// Nothing can be done now: what it waits for is outside.
    Wait,
    /// Nothing is done: what is wanted contradicts what another volume is.
    Refused,
}

impl StepKind {
    /// Whether something is done.
    #[must_use]
    pub fn acts(self) -> bool {
        !matches!(self, Self::Wait | Self::Refused)
    }

    /// The name used in messages and in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Detach => "detach",
            Self::Finish => "finish",
            Self::Attach => "attach",
            Self::Heal => "heal",
            Self::Resize => "resize",
            Self::Prove => "prove",
            Self::Wait => "wait",
            Self::Refused => "refused",
        }
    }
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
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
    /// A line each.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps.iter().try_for_each(|step| writeln!(f, "{step}"))
    }
}

impl Plan {
    /// Whether all that is wanted stands, and nothing else does.
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

/// What is to be done so that what is wanted stands and nothing else of the
/// journal does. Devices that the journal does not know are no part of it.
///
/// | wanted | stands | step |
/// |---|---|---|
/// | yes | nothing, or half of it, or as another device | attach |
/// | | with other options | attach; what cannot be changed in place is detached first |
/// | | from another source, under another id, as another unit | detach |
/// | | a path is there and not taken in, or a session is to be logged in | attach |
/// | | an NBD device without its server | heal |
/// | | as it is wanted, and nobody has asked the device itself | prove |
/// | | the same, and smaller than it is wanted; larger it is left alone | resize |
/// | | a SCSI unit without a path that works | wait |
/// | | what another volume's unit is | refused |
/// | no | anything | detach, or finish one that was begun |
#[must_use]
pub fn plan(desired: &Desired, actual: &Actual) -> Plan {
    let mut steps = Vec::new();
    // Both are in the order of the names: one walk along both.
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
    // Nothing that goes waits for anything.
    steps.sort_by_key(|step| step.kind);
    Plan { steps }
}

/// What is to be done about one volume, whatever the others want.
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

/// Why its size is to be taken in.
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

/// Why a volume has to be detached before it can be attached as it is wanted.
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

/// What one volume alone can have, as it is found in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Has<'a> {
    Source(&'a Source),
    Backend(&'a BackendId),
    Unit(&'a Wwid),
}

impl<'a> Has<'a> {
    fn of(spec: &'a VolumeSpec) -> impl Iterator<Item = Self> {
        let sources = spec.sources.iter().map(Self::Source);
        let backend = spec.nbd.iter().map(|nbd| Self::Backend(&nbd.backend));
        sources
            .chain(backend)
            .chain(spec.expect.iter().map(Self::Unit))
    }
}

/// Has attaches wait for the volumes that have what they want. Waits lead from an
/// attach to a detach alone, so that none is for each other.
fn settle_claims(steps: &mut [Step], desired: &Desired, actual: &Actual) {
    let mut owners: HashMap<Has<'_>, &VolumeStatus> = HashMap::new();
    for there in actual.iter() {
        let names = there.names.iter().map(Has::Unit);
        owners.extend(Has::of(&there.spec).chain(names).map(|has| (has, there)));
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
        for has in Has::of(wanted) {
            let owner = owners.get(&has).filter(|owner| owner.volume != step.volume);
            let Some(&owner) = owner else {
                continue;
            };
            let theirs = desired.get(&owner.volume);
            if theirs.is_some_and(|theirs| Has::of(theirs).any(|wants| wants == has))
                || (matches!(has, Has::Unit(_)) && theirs == Some(&owner.spec))
            {
                let what = match has {
                    Has::Source(source) => format!("source {source}"),
                    Has::Backend(backend) => format!("backend id {backend}"),
                    Has::Unit(name) => format!("unit {name}"),
                };
                let volume = &owner.volume;
                refused = Some(format!(
                    "{what} belongs to volume {volume}, and it also wants it"
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
