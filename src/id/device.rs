//! Block devices by device number and by disk sequence number.

use std::fmt;
use std::str::FromStr;

use super::text::{ParseIdError, decimal};

/// A device number, printed `MAJOR:MINOR` as in `/sys/dev/block`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevNo {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for DevNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl FromStr for DevNo {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let parse = || {
            let (major, minor) = text.split_once(':')?;
            Some(Self {
                major: decimal(major)?,
                minor: decimal(minor)?,
            })
        };
        parse().ok_or_else(|| ParseIdError::new("a device number", "MAJOR:MINOR", text))
    }
}

/// The kernel's disk sequence number. The kernel reuses device names and numbers, but never
/// a DISKSEQ (`block/genhd.c`; Linux 5.15 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskSeq(pub u64);

impl fmt::Display for DiskSeq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for DiskSeq {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        decimal(text)
            .map(Self)
            .ok_or_else(|| ParseIdError::new("a disk sequence number", "a decimal number", text))
    }
}
