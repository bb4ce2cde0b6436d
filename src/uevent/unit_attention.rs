//! The meaning of a target's unit attention.

use std::fmt;

/// A unit attention (`scsi_evt_emit` of `drivers/scsi/scsi_lib.c`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum UnitAttention {
    /// The target's logical units changed (asc 3Fh, ascq 0Eh). One logical unit
    /// reports it for its whole target, in its next answer.
    LunsChanged,
    /// The capacity changed (asc 2Ah, ascq 09h). The kernel keeps the old size
    /// until the device is rescanned.
    CapacityChanged,
    /// The INQUIRY data changed (asc 3Fh, ascq 03h). The kernel itself has
    /// rescanned the device.
    InquiryChanged,
    /// The preferred paths changed (ALUA: asc 2Ah, ascq 06h).
    AccessStateChanged,
    /// A thin volume fills up (asc 38h, ascq 07h).
    SoftThresholdReached,
    /// The mode parameters changed (asc 2Ah, ascq 01h).
    ModeParametersChanged,
    /// The unit was switched on or reset (asc 29h; Linux 5.3).
    PoweredOnOrReset,
    /// A unit attention without a name in this version: the kernel's text.
    Other(String),
}

impl UnitAttention {
    pub(super) fn parse(sdev_ua: &str) -> Self {
        match sdev_ua {
            "REPORTED_LUNS_DATA_HAS_CHANGED" => Self::LunsChanged,
            "CAPACITY_DATA_HAS_CHANGED" => Self::CapacityChanged,
            "INQUIRY_DATA_HAS_CHANGED" => Self::InquiryChanged,
            "ASYMMETRIC_ACCESS_STATE_CHANGED" => Self::AccessStateChanged,
            "THIN_PROVISIONING_SOFT_THRESHOLD_REACHED" => Self::SoftThresholdReached,
            "MODE_PARAMETERS_CHANGED" => Self::ModeParametersChanged,
            "POWER_ON_RESET_OCCURRED" => Self::PoweredOnOrReset,
            other => Self::Other(other.to_owned()),
        }
    }
}

impl fmt::Display for UnitAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LunsChanged => "the target's logical units have changed",
            Self::CapacityChanged => "the capacity has changed",
            Self::InquiryChanged => "the INQUIRY data have changed",
            Self::AccessStateChanged => "the access states of the paths have changed",
            Self::SoftThresholdReached => "a thin volume fills up",
            Self::ModeParametersChanged => "the mode parameters have changed",
            Self::PoweredOnOrReset => "the unit was switched on or reset",
            Self::Other(word) => word,
        })
    }
}
