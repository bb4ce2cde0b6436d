//! What proves that a device's unit is gone.

use std::fmt;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::error::Result;
use crate::id::{Addressing, DiskSeq, Hctl, Lun, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::sg::Presence;
use crate::scsi::{self, Identity, ScsiDevice, State};

/// How long one device may take for an answer: the others wait for it.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The target's own word that a LUN is not what the kernel scanned there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Evidence {
    /// It refused a command for the LUN with LOGICAL UNIT NOT SUPPORTED (sense
    /// key ILLEGAL REQUEST, 25h/00h).
    NotSupported {
        /// The command.
        command: &'static str,
    },
    /// Its INQUIRY data for the LUN say that no unit is there: peripheral
    /// qualifier 011b, or 001b with no device type. 001b with a type is no
    /// proof: a path in the ALUA state offline says that of a unit that stands.
    NoUnit {
        /// The peripheral qualifier.
        qualifier: u8,
        /// The peripheral device type.
        device_type: u8,
    },
    /// Its list of LUNs has others and not this one, under neither of its
    /// addresses. It is asked for through another device of the target, and
    /// counts where that one is in it, and where all of it are plain LUNs.
    NotListed {
        /// That other device.
        through: Hctl,
        /// How many LUNs are in the list.
        listed: usize,
    },
    /// Another unit answers at the LUN: both have names that no other unit can
    /// have, and share none of these.
    Replaced {
        /// Who answers.
        now: Identity,
    },
}

impl Evidence {
    /// The name of its kind, as in `--json`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::NotSupported { .. } => "not_supported",
            Self::NoUnit { .. } => "no_unit",
            Self::NotListed { .. } => "not_listed",
            Self::Replaced { .. } => "replaced",
        }
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

/// What can be said of one device.
pub(super) enum Verdict {
    /// A unit answers, and nothing says that it is another one.
    Stands,
    /// It went away while it was looked at.
    Left,
    Gone(Box<Case>),
    Unproven {
        disk: Option<BlockDevice>,
        why: String,
    },
}

/// A phantom.
pub(super) struct Case {
    pub(super) disk: BlockDevice,
    pub(super) diskseq: Option<DiskSeq>,
    /// What it was scanned as.
    pub(super) was: Identity,
    pub(super) evidence: Evidence,
}

impl Engine {
    /// Asks the device itself, and its target through another one where that
    /// brought nothing.
    pub(super) fn is_phantom(&self, device: &ScsiDevice, deadline: Deadline) -> Verdict {
        let disk = device.disk().ok().flatten();
        let verdict = match disk.clone() {
            Some(disk) => self.look_for_proof(device, disk, deadline),
            None => Ok(Verdict::Unproven {
                disk: None,
                why: "it has no disk, through which it could be asked and claimed".to_owned(),
            }),
        };
        match verdict {
            _ if !device.is_there() => Verdict::Left,
            Ok(verdict) => verdict,
            Err(error) => Verdict::Unproven {
                disk,
                why: error.to_string(),
            },
        }
    }

    fn look_for_proof(
        &self,
        device: &ScsiDevice,
        disk: BlockDevice,
        deadline: Deadline,
    ) -> Result<Verdict> {
        let (roots, lanes) = (self.roots(), &self.lanes);
        let mut was = device.cached_identity()?;
        let answer = match device.state()? {
            Some(State::Running) => {
                scsi::ask_presence(roots, lanes, device, &disk, answer_limit(deadline))
                    .map_err(|error| error.to_string())
            }
            Some(state) => Err(format!("it is in state {state}")),
            None => return Ok(Verdict::Left),
        };
        let evidence = match answer {
            Ok(Presence::Present) => {
                let limit = answer_limit(deadline);
                let now = scsi::read_identity(roots, lanes, device, &disk, limit)?;
                let Some(earlier) = self.scanned_as_other(&was, &disk, &now)? else {
                    return Ok(Verdict::Stands);
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
                let Some(evidence) = self.ask_the_target(device, deadline) else {
                    let disk = Some(disk);
                    return Ok(Verdict::Unproven { disk, why });
                };
                evidence
            }
        };
        Ok(Verdict::Gone(Box::new(Case {
            diskseq: disk.diskseq()?,
            disk,
            was,
            evidence,
        })))
    }

    /// What the device was scanned as, where `now` is certainly another unit: by
    /// the kernel's copy, or, where somebody had the kernel read that again, by
    /// udev's record of the disk's birth.
    fn scanned_as_other(
        &self,
        cached: &Identity,
        disk: &BlockDevice,
        now: &Identity,
    ) -> Result<Option<Identity>> {
        if is_other(&cached.names, &now.names) {
            return Ok(Some(cached.clone()));
        }
        let names: Vec<Wwid> = self.born_as(disk)?.into_iter().collect();
        let serial = None;
        Ok(is_other(&names, &now.names).then_some(Identity { names, serial }))
    }

    /// Asks the other devices of the target for its list, until one gives it.
    fn ask_the_target(&self, device: &ScsiDevice, deadline: Deadline) -> Option<Evidence> {
        for sibling in device.siblings().unwrap_or_default() {
            let runs = matches!(sibling.state(), Ok(Some(State::Running)));
            let Some(disk) = sibling.disk().ok().flatten().filter(|_| runs) else {
                continue;
            };
            let limit = answer_limit(deadline);
            let list = scsi::report_luns(self.roots(), &self.lanes, &sibling, &disk, limit);
            let through = sibling.hctl();
            match list {
                Ok(list) => {
                    let gone = is_missing(device.hctl().lun, through.lun, &list);
                    let listed = list.len();
                    return gone.then_some(Evidence::NotListed { through, listed });
                }
                Err(error) => tracing::debug!(%through, %error, "no list of LUNs"),
            }
        }
        None
    }
}

fn answer_limit(deadline: Deadline) -> Deadline {
    Deadline::after(ANSWER_LIMIT.min(deadline.remaining() / 4))
}

/// Whether both have names that no other unit can have, and share none.
fn is_other(was: &[Wwid], now: &[Wwid]) -> bool {
    let registered = |names: &[Wwid]| -> Vec<Wwid> {
        let names = names.iter().filter(|name| name.is_registered());
        names.cloned().collect()
    };
    let (was, now) = (registered(was), registered(now));
    !was.is_empty() && !now.is_empty() && !was.iter().any(|name| now.contains(name))
}

/// Whether a target's list proves that it does not have `lun`: all of it are plain
/// addresses, that of the device that was asked among them. A unit below 256 may
/// be listed under its other address (1 and 16385).
fn is_missing(lun: Lun, asked: Lun, list: &[Lun]) -> bool {
    let listed: Option<Vec<u16>> = list.iter().map(|lun| number(*lun)).collect();
    match (number(lun), number(asked), listed) {
        (Some(lun), Some(asked), Some(listed)) => listed.contains(&asked) && !listed.contains(&lun),
        _ => false,
    }
}

/// The unit's number, of a LUN of one level that is addressed in the two plain
/// ways.
fn number(lun: Lun) -> Option<u16> {
    let [_, below @ ..] = lun.levels();
    match lun.addressing() {
        _ if below != [0; 3] => None,
        Addressing::Peripheral { bus: 0, lun } => Some(u16::from(lun)),
        Addressing::Flat(number) => Some(number),
        _ => None,
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
        assert!(is_missing(plain(7), plain(3), &list));
        assert!(is_missing(flat(301), plain(3), &list));
        assert!(!is_missing(flat(3), plain(0), &list), "its other address");
        assert!(!is_missing(plain(3), plain(0), &list));
        assert!(!is_missing(plain(7), plain(8), &list), "who was asked");
        assert!(!is_missing(plain(7), plain(3), &[]));
        // On a bus behind the unit, of two levels, and well-known.
        for odd in [plain(300), plain(7 << 16), plain(0xc101)] {
            assert!(!is_missing(odd, plain(3), &list), "{odd}");
            let list = [plain(3), odd];
            assert!(!is_missing(plain(7), plain(3), &list), "{odd}");
        }
    }

    #[test]
    fn two_units_differ_only_by_names_that_none_other_can_have() {
        let names = |names: &[&str]| -> Vec<Wwid> {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        let [a, b] = ["naa.5000c500a1b2c3d4", "naa.5000c500a1b2c3d5"];
        assert!(is_other(&names(&[a, "t10.x"]), &names(&[b, "t10.x"])));
        assert!(!is_other(&names(&[a, "t10.x"]), &names(&[a, "t10.y"])));
        assert!(!is_other(&names(&[a]), &names(&[b, a])));
        assert!(!is_other(&names(&["t10.x"]), &names(&["t10.y"])));
        assert!(!is_other(&names(&[a]), &[]));
        assert!(!is_other(&[], &names(&[a])));
    }
}
