//! Decides whether two identities are of one unit. Attach, detach, recover, reap, resize
//! and the inventory all use this comparison.

use std::fmt;

use super::Identity;
use crate::id::{NameKind, Wwid};

/// The result of the comparison of two identities: whether they are of one logical unit.
///
/// These are the names in VPD page 83h that are of the unit itself (association 0), and
/// what each proves:
///
/// | designator | where it is | what makes it unique | equal | different |
/// |---|---|---|---|---|
/// | NAA 2, IEEE Extended | SPC-5 7.7.6.6.2 | IEEE, by the company id | same unit | another unit |
/// | NAA 5, IEEE Registered | SPC-5 7.7.6.6.4 | IEEE, by the company id | same unit | another unit |
/// | NAA 6, IEEE Registered Extended | SPC-5 7.7.6.6.5 | IEEE, by the company id | same unit | another unit |
/// | EUI-64 based | SPC-5 7.7.6.5 | IEEE, by the company id | same unit | another unit |
/// | SCSI name string, `iqn.` | SPC-5 7.7.6.11, RFC 7143 4.2.7 | the owner of the domain | same unit | another unit |
/// | UUID | SPC-5 7.7.6.12, RFC 4122 | the algorithm | same unit | another unit |
/// | NAA 3, Locally Assigned | SPC-5 7.7.6.6.3 | nothing: an administrator chooses it | supports | another unit, weakly |
/// | NAA 2, 5, 6, EUI-64 with company id 0 or `FFFFFFh`, UUID of zeros or ones | as above | nothing: the IEEE assigns no such id | supports | another unit, weakly |
/// | NAA 2 with company id `000347h`, as SPDK gives | SPDK `lib/scsi/scsi_bdev.c`, `bdev_scsi_set_naa_ieee_extended` | nothing: it is made of parts of the bdev's name, the same for `Malloc0` and `Malloc1` | supports | another unit, weakly |
/// | T10 vendor identification | SPC-5 7.7.6.4 | the vendor, where it appends a number | supports | another unit, weakly |
/// | unit serial number, page 80h | SPC-5 7.7.14 | the vendor, for one product | supports | another unit, weakly |
/// | vendor specific, and vendor, product and serial number | SPC-5 7.7.6.3 | nothing | supports where there is nothing else | another unit, weakly |
///
/// A SCSI name string of `naa.` or `eui.` counts as the name that it holds.
///
/// 1. Both have a kind of unique name, and share none of that kind: `Different`, whatever
///    else they share.
/// 2. Both have one unique name in common: `Same`, strongly. A T10 text that a new firmware
///    spells differently changes nothing, and neither does a different serial number alone.
///    If both have a T10 text and a serial number, and both differ: `Unknown`, since a
///    target may give one name to two units.
/// 3. Both have unique names, of different kinds: `Different`.
/// 4. Only one has a unique name: `Different` if the other data that both have differs,
///    else `Unknown`.
/// 5. Neither has a unique name: the data that both have decides. If all of it is equal and
///    includes a name: `Same`, weakly. If they share nothing of one kind: `Different`,
///    weakly. Else `Unknown`.
///
/// `Same` with [`Strength::Weak`] is no proof. Two targets may give their units the same
/// locally assigned names: tgt makes its NAA 3 of the numbers of target and LUN. Such an
/// equality alone never justifies the removal of a device, or the joining of two paths.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Comparison {
    /// They are of one unit, as far as these names can tell.
    Same(Strength),
    /// They are of two units.
    Different(Contradiction),
    /// They have too little in common to compare.
    Unknown,
}

/// The strength of an agreement or a contradiction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Strength {
    /// It rests on names that other units may have too.
    Weak,
    /// It rests on a name that a standard promises to no other unit.
    Strong,
}

/// The names in which two units differ.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Contradiction {
    /// How strong the contradiction is.
    pub strength: Strength,
    /// The name or serial number of the first unit.
    pub ours: String,
    /// The name or serial number of the second unit, of the same kind.
    pub theirs: String,
}

impl Comparison {
    /// Whether they are of one unit, even if only weakly.
    #[must_use]
    pub fn is_same(&self) -> bool {
        matches!(self, Self::Same(_))
    }

    /// Whether they are of two units, even if only weakly.
    #[must_use]
    pub fn is_different(&self) -> bool {
        matches!(self, Self::Different(_))
    }

    /// Whether a unique name proves that they are of one unit.
    #[must_use]
    pub fn is_proven_same(&self) -> bool {
        matches!(self, Self::Same(Strength::Strong))
    }

    /// Whether unique names prove that they are of two units.
    #[must_use]
    pub fn is_proven_different(&self) -> bool {
        matches!(self, Self::Different(why) if why.strength == Strength::Strong)
    }
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not {}", self.ours, self.theirs)
    }
}

impl Identity {
    /// Compares two identities, by the rules at [`Comparison`]. An identity without a name
    /// compares as `Unknown`.
    #[must_use]
    pub fn compare(&self, other: &Self) -> Comparison {
        if self.names.is_empty() || other.names.is_empty() {
            return Comparison::Unknown;
        }
        let (ours, theirs) = (self.names_by_strength(), other.names_by_strength());
        let unique = KindComparison::compare(&ours.unique, &theirs.unique);
        if let Some((ours, theirs)) = unique.differ {
            return different(Strength::Strong, ours, theirs);
        }
        let both_unique = !ours.unique.is_empty() && !theirs.unique.is_empty();
        if both_unique {
            let share = ours.unique.iter().any(|name| theirs.unique.contains(name));
            return match (share, ours.unique.first(), theirs.unique.first()) {
                (false, Some(ours), Some(theirs)) => {
                    different(Strength::Strong, ours.to_string(), theirs.to_string())
                }
                _ if self.differs_in_text_and_serial(other) => Comparison::Unknown,
                _ => Comparison::Same(Strength::Strong),
            };
        }
        let is_weak = ours.unique.is_empty() && theirs.unique.is_empty();
        let mut support = KindComparison::compare(&ours.support, &theirs.support);
        if ours.support.is_empty() && theirs.support.is_empty() && is_weak {
            support = KindComparison::compare(&ours.vendor_defined, &theirs.vendor_defined);
        }
        if let Some((ours, theirs)) = support.differ {
            return different(Strength::Weak, ours, theirs);
        }
        if let Some((ours, theirs)) = self.other_serial(other) {
            let serial = |number| format!("serial number {number}");
            return different(Strength::Weak, serial(ours), serial(theirs));
        }
        if is_weak && support.agree && !support.overlap {
            return Comparison::Same(Strength::Weak);
        }
        Comparison::Unknown
    }

    /// Whether both have a T10 text and a serial number, and both differ.
    pub(crate) fn differs_in_text_and_serial(&self, other: &Self) -> bool {
        let texts = |identity: &Self| -> Vec<Wwid> {
            let names = identity.names.iter();
            let texts = names.filter(|name| name.kind() == NameKind::T10);
            texts.cloned().collect()
        };
        let (ours, theirs) = (texts(self), texts(other));
        let one_has_none = ours.is_empty() || theirs.is_empty();
        let is_shared = |name| theirs.contains(name);
        !one_has_none && !ours.iter().any(is_shared) && self.other_serial(other).is_some()
    }

    /// The serial numbers, if both have one and they differ.
    fn other_serial<'a>(&'a self, other: &'a Self) -> Option<(&'a str, &'a str)> {
        let (ours, theirs) = (self.serial.as_deref()?, other.serial.as_deref()?);
        (ours != theirs).then_some((ours, theirs))
    }

    /// Whether it has names, but none that is [unique](Wwid::is_unique).
    #[must_use]
    pub fn is_weak(&self) -> bool {
        !self.names.is_empty() && !self.names.iter().any(Wwid::is_unique)
    }

    fn names_by_strength(&self) -> NamesByStrength<'_> {
        let mut split = NamesByStrength::default();
        for name in &self.names {
            match name.kind() {
                _ if name.is_unique() => &mut split.unique,
                _ if name.is_vendor_defined() => &mut split.vendor_defined,
                _ => &mut split.support,
            }
            .push(name);
        }
        split
    }
}

fn different(strength: Strength, ours: String, theirs: String) -> Comparison {
    Comparison::Different(Contradiction {
        strength,
        ours,
        theirs,
    })
}

/// The names of one unit, by what they prove.
#[derive(Default)]
struct NamesByStrength<'a> {
    unique: Vec<&'a Wwid>,
    support: Vec<&'a Wwid>,
    vendor_defined: Vec<&'a Wwid>,
}

/// The comparison of names, kind by kind.
#[derive(Default)]
struct KindComparison {
    /// For some kind all names are equal.
    agree: bool,
    /// For some kind some names are equal and some are not.
    overlap: bool,
    /// The first names of a kind in which none is equal.
    differ: Option<(String, String)>,
}

impl KindComparison {
    fn compare(ours: &[&Wwid], theirs: &[&Wwid]) -> Self {
        let mut comparison = Self::default();
        let mut kinds: Vec<NameKind> = ours.iter().map(|name| name.kind()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        for kind in kinds {
            let of_kind = |names: &[&'_ Wwid]| -> Vec<Wwid> {
                let names = names.iter().filter(|name| name.kind() == kind);
                names.map(|name| (*name).clone()).collect()
            };
            let (ours, theirs) = (of_kind(ours), of_kind(theirs));
            let [first, ..] = theirs.as_slice() else {
                continue;
            };
            let is_shared = |name: &Wwid| theirs.contains(name);
            if !ours.iter().any(is_shared) {
                let ours = ours.first().map(ToString::to_string).unwrap_or_default();
                comparison.differ.get_or_insert((ours, first.to_string()));
            } else if ours.len() == theirs.len() && ours.iter().all(is_shared) {
                comparison.agree = true;
            } else {
                comparison.overlap = true;
            }
        }
        comparison
    }
}

#[cfg(test)]
mod tests;
