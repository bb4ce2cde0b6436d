//! The result that each failing or hanging call must have.
//!
//! A table has one row for every act with every fault. An act without a row, or with two, fails
//! the sweep. So does a failed call whose command succeeds, unless the table says why that is
//! right.

use nix::errno::Errno;

use super::inject::Fault;
use super::rotation::Part;

/// `EIO`.
pub const EIO: Fault = Fault::Fails(Errno::EIO);
/// `EBUSY`.
pub const EBUSY: Fault = Fault::Fails(Errno::EBUSY);
/// `ENODEV`.
pub const ENODEV: Fault = Fault::Fails(Errno::ENODEV);
/// `ETIMEDOUT`.
pub const ETIMEDOUT: Fault = Fault::Fails(Errno::ETIMEDOUT);
/// The ways in which an act fails.
pub const FAULTS: [Fault; 5] = [EIO, EBUSY, ENODEV, ETIMEDOUT, Fault::Hangs];
/// The faults in which the act returns.
pub const ERRORS: &[Fault] = &[EIO, EBUSY, ENODEV, ETIMEDOUT];
/// The fault in which the act does not return.
pub const HANGS: &[Fault] = &[Fault::Hangs];
/// All faults but the one that reports a missing device.
pub const ALL_BUT_ENODEV: &[Fault] = &[EIO, EBUSY, ETIMEDOUT, Fault::Hangs];
/// All faults but the one that reports a device in use.
pub const ALL_BUT_EBUSY: &[Fault] = &[EIO, ENODEV, ETIMEDOUT, Fault::Hangs];

/// The result that some acts with some faults must have.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    acts: &'static str,
    faults: &'static [Fault],
    expected: Expected,
}

/// How the command must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// With an error of this stage and one of these kinds; an empty list means the fault's own
    /// kind.
    Refused {
        /// The stage's name.
        stage: &'static str,
        /// The kinds' names.
        kinds: &'static [&'static str],
    },
    /// With success. A detach also says that the volume is safe to unmap.
    Succeeds {
        /// Why that is right.
        because: &'static str,
    },
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended<'a> {
    /// With an error of this stage and this kind.
    Refused(&'a str, &'a str),
    /// With success.
    Succeeded,
    /// With the success of a detach that does not say that the volume is safe to unmap.
    SucceededInDoubt,
}

impl Row {
    /// `acts` are an operation and an act, as in `attach write scan:1`; a `*` in the place of
    /// the number stands for every number. They are refused at `stage`, with the fault's own
    /// kind.
    #[must_use]
    pub const fn refused(
        acts: &'static str,
        faults: &'static [Fault],
        stage: &'static str,
    ) -> Self {
        let kinds = &[];
        let expected = Expected::Refused { stage, kinds };
        Self {
            acts,
            faults,
            expected,
        }
    }

    /// They are refused with one of these kinds instead of the fault's own.
    #[must_use]
    pub const fn refused_as(
        acts: &'static str,
        faults: &'static [Fault],
        stage: &'static str,
        kinds: &'static [&'static str],
    ) -> Self {
        let expected = Expected::Refused { stage, kinds };
        Self {
            acts,
            faults,
            expected,
        }
    }

    /// The command succeeds despite the fault.
    #[must_use]
    pub const fn succeeds(
        acts: &'static str,
        faults: &'static [Fault],
        because: &'static str,
    ) -> Self {
        let expected = Expected::Succeeds { because };
        Self {
            acts,
            faults,
            expected,
        }
    }

    fn is_of(&self, act: &str, fault: Fault) -> bool {
        let is_named = match self.acts.strip_suffix('*') {
            Some(start) => {
                let number = act.strip_prefix(start);
                number.is_some_and(|number| number.parse::<u32>().is_ok())
            }
            None => self.acts == act,
        };
        is_named && self.faults.contains(&fault)
    }
}

impl Expected {
    /// What is wrong with the end of a command.
    ///
    /// # Errors
    /// What was expected, if the command ended otherwise.
    pub fn compare(self, fault: Fault, ended: Ended<'_>) -> Result<(), String> {
        let fits = match (self, ended) {
            (Self::Succeeds { .. }, ended) => ended == Ended::Succeeded,
            (Self::Refused { stage, kinds: [] }, ended) => {
                ended == Ended::Refused(stage, kind_of(fault))
            }
            (Self::Refused { stage, kinds }, Ended::Refused(at, kind)) => {
                at == stage && kinds.contains(&kind)
            }
            (Self::Refused { .. }, _) => false,
        };
        if fits {
            Ok(())
        } else {
            Err(format!("{ended:?}, where the table has {self:?}"))
        }
    }
}

/// The error kind that a fault has by itself.
fn kind_of(fault: Fault) -> &'static str {
    match fault {
        Fault::Fails(Errno::EBUSY) => "in_use",
        Fault::Fails(Errno::ENODEV) => "vanished",
        Fault::Fails(_) => "io",
        Fault::Hangs => "timed_out",
    }
}

/// The one row of an act, such as `attach write scan:1`.
///
/// # Errors
/// If the act has no row or several.
pub fn expected(table: &[Row], act: &str, fault: Fault) -> Result<Expected, String> {
    let rows: Vec<&Row> = table.iter().filter(|row| row.is_of(act, fault)).collect();
    match rows[..] {
        [row] => Ok(row.expected),
        [] => Err(format!("no row for {act}, {fault}")),
        _ => Err(format!("several rows for {act}, {fault}: {rows:?}")),
    }
}

/// The acts of an operation that a run injects a fault into: a fifth of the acts, each with one
/// fault. Five consecutive parts cover every act, and 25 cover every act with every fault. At
/// least one act hangs.
#[must_use]
pub fn faults_of(part: Part, seed: u64, operation: &str, acts: &[String]) -> Vec<(String, Fault)> {
    let mut mine = Vec::new();
    for act in acts {
        let name = format!("{operation} {act}");
        let faults = (0..).zip(FAULTS);
        let faults = faults.filter(|(number, _)| part.has_variant(&name, *number));
        mine.extend(faults.map(|(_, fault)| (act.clone(), fault)));
    }
    let count = u64::try_from(acts.len()).unwrap_or(1).max(1);
    let one = usize::try_from(seed % count).ok();
    if !mine.iter().any(|(_, fault)| *fault == Fault::Hangs) {
        let hangs = one.and_then(|at| acts.get(at));
        mine.extend(hangs.map(|act| (act.clone(), Fault::Hangs)));
    }
    mine
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn five_consecutive_seeds_meet_every_act_and_25_every_fault_and_each_has_a_hang() {
        for count in [1, 2, 3, 10, 33] {
            let acts: Vec<String> = (0..count).map(|act| format!("ioctl {act}:1")).collect();
            let mut met = BTreeSet::new();
            for first in [40, 45, 50, 55, 60] {
                let mut in_five = BTreeSet::new();
                for seed in first..first + 5 {
                    let mine = faults_of(Part::of_seed(seed), seed, "attach", &acts);
                    let hangs = mine.iter().filter(|(_, fault)| *fault == Fault::Hangs);
                    assert!(hangs.count() > 0, "{count} acts, seed {seed}");
                    in_five.extend(mine.iter().map(|(act, _)| act.clone()));
                    met.extend(mine.iter().map(|(act, fault)| format!("{act} {fault}")));
                }
                assert_eq!(in_five.len(), count);
            }
            assert_eq!(met.len(), 5 * count);
        }
        let none = faults_of(Part::of_seed(1), 1, "attach", &[]);
        assert_eq!(none, []);
    }

    const TABLE: &[Row] = &[
        Row::refused("detach fsync:*", &FAULTS, "flush"),
        Row::refused("detach write delete:1", ERRORS, "delete"),
        Row::succeeds("detach write delete:1", HANGS, "a test"),
        Row::refused("detach write twice:1", &FAULTS, "delete"),
        Row::refused("detach write twice:*", HANGS, "delete"),
    ];

    #[test]
    fn each_act_has_its_one_row_and_one_without_or_with_two_is_an_error() {
        let flush = Expected::Refused {
            stage: "flush",
            kinds: &[],
        };
        assert_eq!(expected(TABLE, "detach fsync:12", EIO), Ok(flush));
        let because = "a test";
        let succeeds = Ok(Expected::Succeeds { because });
        assert_eq!(
            expected(TABLE, "detach write delete:1", Fault::Hangs),
            succeeds
        );
        assert!(expected(TABLE, "detach write delete:1", EIO).is_ok());
        for (act, fault) in [
            ("attach fsync:1", EIO),
            ("detach fsync:x", EIO),
            ("detach fsync", EIO),
            ("detach write delete:2", EIO),
            ("detach write twice:1", Fault::Hangs),
        ] {
            assert!(expected(TABLE, act, fault).is_err(), "{act}");
        }
    }

    #[test]
    fn an_error_that_is_swallowed_does_not_fit_a_row_that_refuses() {
        let row = expected(TABLE, "detach fsync:1", EIO).unwrap();
        let refused = Ended::Refused;
        assert!(row.compare(EIO, Ended::Succeeded).is_err());
        assert!(row.compare(EIO, Ended::SucceededInDoubt).is_err());
        assert!(row.compare(EIO, refused("flush", "io")).is_ok());
        assert!(row.compare(EIO, refused("delete", "io")).is_err());
        assert!(row.compare(EIO, refused("flush", "timed_out")).is_err());
        let hangs = Fault::Hangs;
        assert!(row.compare(hangs, refused("flush", "timed_out")).is_ok());
    }

    #[test]
    fn a_success_that_is_in_doubt_fits_no_row() {
        let succeeds = Expected::Succeeds { because: "a test" };
        assert!(succeeds.compare(EIO, Ended::Succeeded).is_ok());
        assert!(succeeds.compare(EIO, Ended::SucceededInDoubt).is_err());
        let refused = Ended::Refused("flush", "io");
        assert!(succeeds.compare(EIO, refused).is_err());
    }
}
