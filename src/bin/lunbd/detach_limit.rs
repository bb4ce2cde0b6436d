//! The limit on how many volumes one change of the file may detach.

use std::str::FromStr;

use lunbd::engine::journal::Record;
use lunbd::id::VolumeId;
use lunbd::reconcile::{Desired, Plan, Step, StepKind};
use lunbd::{Error, ErrorKind, Result};

/// With fewer volumes than this, all may be detached at once.
const FEW: usize = 4;

/// How many volumes a plan may detach; without a limit from the caller it is half of
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DetachLimit {
    /// This many volumes.
    Count(usize),
    /// Every volume.
    All,
}

impl FromStr for DetachLimit {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if text == "all" {
            return Ok(Self::All);
        }
        let count = text.parse().map(Self::Count);
        count.map_err(|_| "expected a number of volumes, or all".to_owned())
    }
}

/// Refuses a plan that detaches more of the `known` volumes than `limit` allows. It does not
/// count a volume whose detach was begun, or that the plan `before` this change also detaches.
///
/// # Errors
/// `InvalidInput`, naming the volumes.
pub(crate) fn check(
    plan: &Plan,
    desired: &Desired,
    before: &Plan,
    known: usize,
    limit: Option<DetachLimit>,
) -> Result<()> {
    let is_going = |step: &&Step| match step.kind {
        StepKind::Finish => desired.get(&step.volume).is_none(),
        StepKind::Detach => {
            let before = before.step(&step.volume);
            before.is_some_and(|before| before.kind == StepKind::Detach)
        }
        _ => false,
    };
    let going = plan.steps.iter().filter(is_going).count();
    let known = known.saturating_sub(going);
    let steps = plan.steps.iter().filter(|step| !is_going(step));
    let detached = steps.filter(|step| step.kind == StepKind::Detach);
    check_names(detached.map(|step| step.volume.as_str()), known, limit)
}

/// What is wanted if nothing may be detached: each volume that `plan` detaches stays as its
/// record says, and a wanted volume that excludes one of these is left out.
///
/// # Errors
/// `InUse` if two records exclude each other.
pub(crate) fn without_detaches(
    plan: &Plan,
    desired: &Desired,
    records: &[Record],
) -> Result<Desired> {
    let mut kept = Desired::default();
    let is_detached = |volume: &VolumeId| {
        let step = plan.step(volume);
        step.is_some_and(|step| step.kind == StepKind::Detach)
    };
    for record in records.iter().filter(|record| is_detached(&record.volume)) {
        kept.insert(record.volume.clone(), &record.spec.request()?)?;
        kept.set_min_size(&record.volume, desired.min_size(&record.volume))?;
    }
    for (volume, spec) in desired.iter().filter(|(volume, _)| !is_detached(volume)) {
        match kept.insert(volume.clone(), &spec.request()?) {
            Err(error) if error.kind() == ErrorKind::InUse => {}
            inserted => {
                inserted?;
                kept.set_min_size(volume, desired.min_size(volume))?;
            }
        }
    }
    Ok(kept)
}

fn check_names<'a>(
    detached: impl Iterator<Item = &'a str>,
    known: usize,
    limit: Option<DetachLimit>,
) -> Result<()> {
    let names: Vec<&str> = detached.collect();
    let most = match limit {
        Some(DetachLimit::All) => return Ok(()),
        Some(DetachLimit::Count(count)) => count,
        None if known < FEW => return Ok(()),
        None => known / 2,
    };
    if names.len() <= most {
        return Ok(());
    }
    let message = format!(
        "the file would detach {} of {known} volumes: {}; if that is meant, give \
         --allow-detach {} or --allow-detach all",
        names.len(),
        names.join(", "),
        names.len()
    );
    Err(Error::new(ErrorKind::InvalidInput, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(count: usize, known: usize, limit: Option<DetachLimit>) -> Result<()> {
        let names: Vec<String> = (0..count).map(|number| format!("v{number}")).collect();
        check_names(names.iter().map(String::as_str), known, limit)
    }

    #[test]
    fn more_than_half_of_at_least_four_volumes_are_refused_and_named() {
        for (count, known) in [(0, 0), (3, 3), (2, 4), (2, 5), (50, 100)] {
            assert!(check(count, known, None).is_ok(), "{count} of {known}");
        }
        for (count, known) in [(3, 4), (4, 4), (3, 5), (51, 100)] {
            let error = check(count, known, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains("v0, v1, v2"), "{error}");
        }
    }

    #[test]
    fn a_caller_says_how_many_volumes_may_be_detached() {
        let limit = |text: &str| Some(text.parse::<DetachLimit>().unwrap());
        assert!(check(4, 4, limit("all")).is_ok());
        assert!(check(4, 4, limit("4")).is_ok());
        assert!(check(4, 4, limit("3")).is_err());
        assert!(check(1, 1, limit("0")).is_err());
        assert!("most".parse::<DetachLimit>().is_err());
    }
}
