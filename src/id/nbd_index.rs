//! The number of an NBD device.

use std::fmt;
use std::str::FromStr;

use super::text::{ParseIdError, decimal};

/// The `N` of `/dev/nbdN`. The kernel reuses a free index at once, so it does not identify
/// a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NbdIndex(u32);

impl NbdIndex {
    /// `None` for 0xFFFFFFFF, which means "any free index" to the kernel
    /// (`drivers/block/nbd.c`, `nbd_genl_connect`).
    #[must_use]
    pub fn new(index: u32) -> Option<Self> {
        (index != u32::MAX).then_some(Self(index))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }

    /// The kernel's name of the disk, `nbdN`.
    #[must_use]
    pub fn name(self) -> String {
        format!("nbd{}", self.0)
    }

    /// The index of the disk `nbdN`; `None` for a partition or any other device.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        name.strip_prefix("nbd")?.parse().ok()
    }
}

impl fmt::Display for NbdIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for NbdIndex {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        decimal(text).and_then(Self::new).ok_or_else(|| {
            ParseIdError::new("an NBD index", "a decimal number below 4294967295", text)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_number_for_any_is_no_index() {
        assert!("4294967295".parse::<NbdIndex>().is_err());
        assert_eq!(NbdIndex::new(u32::MAX), None);
        assert_eq!("4294967294".parse(), Ok(NbdIndex(u32::MAX - 1)));
    }

    #[test]
    fn only_a_whole_disks_name_has_an_index() {
        assert_eq!(NbdIndex::of_name("nbd12"), Some(NbdIndex(12)));
        for name in ["nbd", "nbd1p1", "nbd01", "nbd+1", "sda", "nbd4294967295"] {
            assert_eq!(NbdIndex::of_name(name), None, "{name}");
        }
    }
}
