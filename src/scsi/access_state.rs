//! The ALUA access state in which a target port serves a unit.

use std::fmt;

use super::designators;
use crate::kernel::sg::PortGroup;

/// The asymmetric logical unit access state of a path (SPC-5, 5.18), in the order in which
/// paths are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum AccessState {
    /// The port serves I/O at its best.
    ActiveOptimized,
    /// The port serves I/O, but another may be faster.
    ActiveNonOptimized,
    /// The port serves I/O, at its best for some blocks only.
    LogicalBlockDependent,
    /// The port changes its state, and serves no I/O meanwhile.
    Transitioning,
    /// The port serves no I/O until the target or the initiator makes it active.
    Standby,
    /// The port serves no I/O, and few other commands.
    Unavailable,
    /// The unit is not connected to this port.
    Offline,
    /// A state of a newer standard.
    Other(u8),
}

impl AccessState {
    fn of_number(number: u8) -> Self {
        match number {
            0x0 => Self::ActiveOptimized,
            0x1 => Self::ActiveNonOptimized,
            0x2 => Self::Standby,
            0x3 => Self::Unavailable,
            0x4 => Self::LogicalBlockDependent,
            0xe => Self::Offline,
            0xf => Self::Transitioning,
            other => Self::Other(other),
        }
    }

    /// The state that sysfs names so.
    pub(super) fn of_name(name: &str) -> Option<Self> {
        let mut all = (0..16).map(Self::of_number);
        all.find(|state| state.to_string() == name)
    }

    /// The state of the port that returned page 83h.
    pub(super) fn of_port(page_83: &[u8], groups: &[PortGroup]) -> Option<Self> {
        let own = designators::target_port(page_83);
        let is_own = |group: &&PortGroup| match own.group {
            Some(number) => group.number == number,
            None => own.port.is_some_and(|port| group.ports.contains(&port)),
        };
        let group = groups.iter().find(is_own)?;
        Some(Self::of_number(group.state))
    }

    /// Whether the port serves reads and writes.
    #[must_use]
    pub fn serves_io(self) -> bool {
        matches!(
            self,
            Self::ActiveOptimized | Self::ActiveNonOptimized | Self::LogicalBlockDependent
        )
    }
}

/// Prints the state as sysfs names it (`drivers/scsi/scsi_sysfs.c`, `sdev_access_states`).
impl fmt::Display for AccessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ActiveOptimized => "active/optimized",
            Self::ActiveNonOptimized => "active/non-optimized",
            Self::LogicalBlockDependent => "lba-dependent",
            Self::Transitioning => "transitioning",
            Self::Standby => "standby",
            Self::Unavailable => "unavailable",
            Self::Offline => "offline",
            Self::Other(number) => return write!(f, "{number:#x}"),
        })
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for AccessState {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(number: u16, state: u8, ports: &[u16]) -> PortGroup {
        PortGroup {
            number,
            state,
            ports: ports.to_vec(),
        }
    }

    /// A page 83h with these designators: (association and type, number).
    fn page(designators: &[(u8, u8)]) -> Vec<u8> {
        let mut page = vec![0, 0x83, 0, 0];
        for (kind, number) in designators {
            page.extend([1, *kind, 0, 4, 0, 0, 0, *number]);
        }
        page
    }

    #[test]
    fn the_state_is_that_of_the_group_of_the_port_that_answered() {
        let groups = [group(1, 2, &[7]), group(2, 0, &[8])];
        let state = |page: &[u8]| AccessState::of_port(page, &groups);
        assert_eq!(state(&page(&[(0x15, 1)])), Some(AccessState::Standby));
        assert_eq!(
            state(&page(&[(0x14, 8)])),
            Some(AccessState::ActiveOptimized)
        );
        // The group counts if the page has both.
        assert_eq!(
            state(&page(&[(0x14, 8), (0x15, 1)])),
            Some(AccessState::Standby)
        );
        assert_eq!(state(&page(&[(0x15, 3)])), None);
        // The unit's own designators do not name a port.
        assert_eq!(state(&page(&[(0x05, 1), (0x04, 7)])), None);
    }

    #[test]
    fn active_and_optimized_comes_first_and_then_all_that_serves_io() {
        let mut states: Vec<_> = (0..16).map(AccessState::of_number).collect();
        states.sort();
        assert_eq!(states[0], AccessState::ActiveOptimized);
        assert_eq!(states[1], AccessState::ActiveNonOptimized);
        let serving = states.iter().take_while(|state| state.serves_io()).count();
        assert_eq!(serving, 3);
        assert!(!states[serving..].iter().any(|state| state.serves_io()));
    }
}
