//! The evidence that a device's unit is gone.

use std::fmt;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::scsi_path::first_identity;
use crate::error::Result;
use crate::id::{DiskSeq, Hctl, Lun};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::sg::Presence;
use crate::scsi::{self, Comparison, Identity, ScsiDevice, State};

/// How long one device may take to answer, since the others wait for it.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The target's own statement that a LUN is not the unit that the kernel scanned there.
#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Evidence {
    /// The target refused a command for the LUN with LOGICAL UNIT NOT SUPPORTED (sense
    /// key ILLEGAL REQUEST, 25h/00h).
    NotSupported {
        /// The refused command.
        command: &'static str,
    },
    /// The target's INQUIRY data for the LUN say that no unit is there: peripheral
    /// qualifier 011b, or 001b with no device type. 001b with a type is no proof: a path
    /// in the ALUA state offline reports that of an existing unit.
    NoUnit {
        /// The peripheral qualifier.
        qualifier: u8,
        /// The peripheral device type.
        device_type: u8,
    },
    /// The target's list of LUNs, read through another device of the target, has other
    /// LUNs and not this one, under neither of its addresses. The list counts only where
    /// that device is in it and all its entries are plain LUNs.
    NotListed {
        /// The device that returned the list.
        through: Hctl,
        /// The number of LUNs in the list.
        listed: usize,
    },
    /// Another unit answers at the LUN: [unique](crate::id::Wwid::is_unique) names of
    /// both differ.
    Replaced {
        /// The unit that answers.
        now: Identity,
    },
}

impl Evidence {
    /// The name of the kind, as in `--json`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        self.into()
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSupported { command } => write!(
                f,
                "its target refuses {command} for it: LOGICAL UNIT NOT SUPPORTED"
            ),
            Self::NoUnit {
                qualifier,
                device_type,
            } => write!(
                f,
                "its target answers INQUIRY for it with peripheral qualifier {qualifier:03b}b and \
                 device type {device_type:02x}h: no unit is there"
            ),
            Self::NotListed { through, listed } => write!(
                f,
                "its target, asked through {through}, reports {listed} LUNs and not this one"
            ),
            Self::Replaced { now } => write!(f, "another unit answers there now: {now}"),
        }
    }
}

/// The result of checking one device.
pub(in crate::engine) enum LunCheck {
    /// A unit answers, and nothing shows that it is another one.
    Present,
    /// The device went away during the check.
    Removed,
    Stale(Box<StaleProof>),
    Unproven {
        disk: Option<BlockDevice>,
        why: String,
    },
}

/// A stale device and the evidence for it.
pub(super) struct StaleProof {
    pub(in crate::engine) disk: BlockDevice,
    pub(in crate::engine) diskseq: Option<DiskSeq>,
    /// The unit that the kernel scanned.
    pub(in crate::engine) was: Identity,
    pub(in crate::engine) evidence: Evidence,
}

/// Asks the device itself, and where it does not answer, its target through another
/// device.
pub(super) fn check_lun(engine: &Engine, device: &ScsiDevice, deadline: Deadline) -> LunCheck {
    let disk = device.disk().ok().flatten();
    let check = match disk.clone() {
        Some(disk) => find_evidence(engine, device, disk, deadline),
        None => device.qualifier().map(|qualifier| LunCheck::Unproven {
            disk: None,
            why: why_no_disk(qualifier),
        }),
    };
    match check {
        _ if !device.is_there() => LunCheck::Removed,
        Ok(check) => check,
        Err(error) => LunCheck::Unproven {
            disk,
            why: error.to_string(),
        },
    }
}

fn find_evidence(
    engine: &Engine,
    device: &ScsiDevice,
    disk: BlockDevice,
    deadline: Deadline,
) -> Result<LunCheck> {
    let (roots, scheduler) = (engine.roots(), &engine.scheduler);
    let mut was = device.cached_identity()?;
    let answer = match device.state()? {
        Some(State::Running) => {
            scsi::ask_presence(roots, scheduler, device, &disk, answer_limit(deadline))
                .map_err(|error| error.to_string())
        }
        Some(state) => Err(format!("it is in state {state}")),
        None => return Ok(LunCheck::Removed),
    };
    let evidence = match answer {
        Ok(Presence::Present) => {
            let limit = answer_limit(deadline);
            let now = scsi::read_identity(roots, scheduler, device, &disk, limit)?;
            let Some(earlier) = proven_earlier_identity(engine, &was, device, &disk, &now)? else {
                return Ok(match was.compare(&now) {
                    Comparison::Different(why) => LunCheck::Unproven {
                        disk: Some(disk),
                        why: format!("it reports another name now, and no name is unique: {why}"),
                    },
                    _ => LunCheck::Present,
                });
            };
            was = earlier;
            Evidence::Replaced { now }
        }
        Ok(Presence::NotSupported(command)) => Evidence::NotSupported { command },
        Ok(Presence::NoUnit(first)) => Evidence::NoUnit {
            qualifier: first >> 5,
            device_type: first & 0x1f,
        },
        Err(why) => {
            let Some(evidence) = ask_target(engine, device, deadline) else {
                let disk = Some(disk);
                return Ok(LunCheck::Unproven { disk, why });
            };
            evidence
        }
    };
    Ok(LunCheck::Stale(Box::new(StaleProof {
        diskseq: disk.diskseq()?,
        disk,
        was,
        evidence,
    })))
}

/// The unit that the kernel scanned, where `now` is certainly another one: from the
/// kernel's copy or, where some process made the kernel read that again, from the names
/// that the disk had first.
fn proven_earlier_identity(
    engine: &Engine,
    cached: &Identity,
    device: &ScsiDevice,
    disk: &BlockDevice,
    now: &Identity,
) -> Result<Option<Identity>> {
    if cached.compare(now).is_proven_different() {
        return Ok(Some(cached.clone()));
    }
    let first = first_identity(engine, device, disk)?;
    Ok(first.compare(now).is_proven_different().then_some(first))
}

/// Asks the target for its list of LUNs through its other devices, until one returns
/// it.
fn ask_target(engine: &Engine, device: &ScsiDevice, deadline: Deadline) -> Option<Evidence> {
    for sibling in device.siblings().unwrap_or_default() {
        let runs = matches!(sibling.state(), Ok(Some(State::Running)));
        let Some(disk) = sibling.disk().ok().flatten().filter(|_| runs) else {
            continue;
        };
        let limit = answer_limit(deadline);
        let list = scsi::report_luns(engine.roots(), &engine.scheduler, &sibling, &disk, limit);
        let through = sibling.hctl();
        match list {
            Ok(list) => {
                let gone = is_not_listed(device.hctl().lun, through.lun, &list);
                let listed = list.len();
                return gone.then_some(Evidence::NotListed { through, listed });
            }
            Err(error) => tracing::debug!(%through, %error, "no list of LUNs"),
        }
    }
    None
}

fn why_no_disk(qualifier: u8) -> String {
    let without = "it has no disk to query or claim";
    if qualifier == 0 {
        return without.to_owned();
    }
    let qualifier = scsi::describe_qualifier(qualifier);
    format!(
        "{without}: at its scan the target said that no unit is connected there ({qualifier}); an \
         attach scans it again, and a detach of its address deletes it"
    )
}

fn answer_limit(deadline: Deadline) -> Deadline {
    deadline.at_most(ANSWER_LIMIT.min(deadline.remaining() / 4))
}

/// Whether a target's list proves that it does not have `lun`: all entries are plain
/// addresses, and the device that was asked is among them. A unit below 256 may be listed
/// under its other address (1 and 16385).
fn is_not_listed(lun: Lun, asked: Lun, list: &[Lun]) -> bool {
    let listed: Option<Vec<u16>> = list.iter().map(|lun| lun.plain_number()).collect();
    match (lun.plain_number(), asked.plain_number(), listed) {
        (Some(lun), Some(asked), Some(listed)) => listed.contains(&asked) && !listed.contains(&lun),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lun_is_missing_only_from_a_list_that_could_name_it() {
        let plain = |number| Lun::from_kernel(number);
        let flat = |number| Lun::flat(number).unwrap();
        let list = [plain(0), plain(3), flat(300)];
        assert!(is_not_listed(plain(7), plain(3), &list));
        assert!(is_not_listed(flat(301), plain(3), &list));
        assert!(
            !is_not_listed(flat(3), plain(0), &list),
            "its other address"
        );
        assert!(!is_not_listed(plain(3), plain(0), &list));
        assert!(!is_not_listed(plain(7), plain(8), &list), "who was asked");
        assert!(!is_not_listed(plain(7), plain(3), &[]));
        // LUNs on a bus behind the unit, of two levels, and well-known.
        for odd in [plain(300), plain(7 << 16), plain(0xc101)] {
            assert!(!is_not_listed(odd, plain(3), &list), "{odd}");
            let list = [plain(3), odd];
            assert!(!is_not_listed(plain(7), plain(3), &list), "{odd}");
        }
    }
}
