//! The kernel's state of a SCSI device.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// The kernel's state of a SCSI device, which decides what it may do
/// (`drivers/scsi/scsi_sysfs.c`, `sdev_states`).
#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
#[non_exhaustive]
pub enum State {
    /// The scan has created the device and does not show it yet.
    Created,
    /// The device serves I/O.
    Running,
    /// The device is being deleted.
    Cancel,
    /// The device has been deleted, and a process still holds a reference to it.
    Deleted,
    /// The device accepts only its driver's own I/O, for a suspend or a domain validation.
    Quiesce,
    /// The kernel has given the device up after errors, or a process has set this state.
    /// Only a write of `running` brings it back.
    Offline,
    /// The device's transport has given it up; a path that returns brings it back.
    TransportOffline,
    /// The device's transport lost the path a moment ago, and I/O waits.
    Blocked,
    /// The device was blocked before it was running.
    CreatedBlocked,
    /// A state of a newer kernel.
    Other(String),
}

impl State {
    /// Whether the device serves I/O, or is about to.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        matches!(self, Self::Running | Self::Created)
    }

    /// The kernel's word for the state.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Other(text) => text,
            known => known.into(),
        }
    }
}

impl FromStr for State {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let known = [
            Self::Created,
            Self::Running,
            Self::Cancel,
            Self::Deleted,
            Self::Quiesce,
            Self::Offline,
            Self::TransportOffline,
            Self::Blocked,
            Self::CreatedBlocked,
        ];
        let found = known.into_iter().find(|state| state.as_str() == text);
        Ok(found.unwrap_or_else(|| Self::Other(text.to_owned())))
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for State {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_comes_back_from_the_kernels_word_for_it() {
        let Ok(state) = "transport-offline".parse::<State>();
        assert_eq!(state, State::TransportOffline);
        assert!(!state.is_usable());
        let Ok(state) = "resting".parse::<State>();
        assert_eq!(state.to_string(), "resting");
        assert!(!state.is_usable());
        let Ok(state) = "running".parse::<State>();
        assert!(state.is_usable());
    }
}
