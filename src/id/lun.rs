//! A logical unit number in its three spellings.

use std::fmt;
use std::str::FromStr;

use super::text::{ParseIdError, decimal};

/// A 64-bit logical unit number (SAM-5, 4.7).
///
/// The kernel packs the eight wire bytes into a `u64`, low 16-bit word first
/// (`drivers/scsi/scsi_common.c`, `scsilun_to_int`). It prints that in decimal as the last
/// part of `H:C:T:L` in sysfs. So the LUN that an array calls 300 is `300` if the array
/// uses peripheral addressing and `16684` (`0x412c`) if it uses flat space addressing.
/// These are two addresses; [`Lun::flat`] makes the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lun(u64);

/// How the first level of a LUN is addressed (SAM-5, 4.7.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Addressing {
    /// Peripheral device addressing: a bus and a LUN below 256.
    Peripheral {
        /// The bus identifier, 0 for the unit itself.
        bus: u8,
        /// The unit on that bus.
        lun: u8,
    },
    /// Flat space addressing: a number below 16,384.
    Flat(u16),
    /// Logical unit addressing: target and bus behind a bridge.
    LogicalUnit {
        /// The target behind the bridge.
        target: u8,
        /// The bus behind the bridge.
        bus: u8,
        /// The unit of that target.
        lun: u8,
    },
    /// Extended addressing, which well-known units use.
    Extended(u16),
}

impl Lun {
    /// The LUN that sysfs prints as `number`.
    #[must_use]
    pub const fn from_kernel(number: u64) -> Self {
        Self(number)
    }

    /// The number that sysfs prints.
    #[must_use]
    pub const fn kernel(self) -> u64 {
        self.0
    }

    /// The flat space address of unit `number`, which is at most 16,383.
    #[must_use]
    pub fn flat(number: u16) -> Option<Self> {
        (number < 0x4000).then(|| Self(u64::from(0x4000 | number)))
    }

    /// The unit's number, if the LUN has one level in peripheral (bus 0) or flat
    /// addressing. A target may have a unit below 256 at both addresses: 1 and 16385.
    pub(crate) fn plain_number(self) -> Option<u16> {
        let [_, below @ ..] = self.levels();
        match self.addressing() {
            _ if below != [0; 3] => None,
            Addressing::Peripheral { bus: 0, lun } => Some(u16::from(lun)),
            Addressing::Flat(number) => Some(number),
            _ => None,
        }
    }

    /// A LUN of up to four levels, first level first. Each level is its two wire bytes in
    /// big-endian order.
    #[must_use]
    pub fn from_levels(levels: [u16; 4]) -> Self {
        Self(
            levels
                .iter()
                .rev()
                .fold(0, |lun, &level| (lun << 16) | u64::from(level)),
        )
    }

    /// The levels, first level first; unused levels are 0.
    #[must_use]
    pub fn levels(self) -> [u16; 4] {
        // The mask leaves 16 bits.
        [0, 16, 32, 48].map(|shift| u16::try_from((self.0 >> shift) & 0xffff).unwrap_or(0))
    }

    /// The LUN with these eight wire bytes, as in REPORT LUNS.
    #[must_use]
    pub fn from_wire(wire: [u8; 8]) -> Self {
        let (words, _) = wire.as_chunks::<2>();
        let lun = words.iter().rev().fold(0, |lun, &word| {
            (lun << 16) | u64::from(u16::from_be_bytes(word))
        });
        Self(lun)
    }

    /// The eight wire bytes.
    #[must_use]
    pub fn wire(self) -> [u8; 8] {
        let mut wire = [0; 8];
        let (words, _) = wire.as_chunks_mut::<2>();
        for (word, level) in words.iter_mut().zip(self.levels()) {
            *word = level.to_be_bytes();
        }
        wire
    }

    /// How the first level is addressed.
    #[must_use]
    pub fn addressing(self) -> Addressing {
        let [first, second, ..] = self.wire();
        let below_method = first & 0x3f;
        match first >> 6 {
            0 => Addressing::Peripheral {
                bus: below_method,
                lun: second,
            },
            1 => Addressing::Flat(u16::from_be_bytes([below_method, second])),
            2 => Addressing::LogicalUnit {
                target: below_method,
                bus: second >> 5,
                lun: second & 0x1f,
            },
            _ => Addressing::Extended(u16::from_be_bytes([below_method, second])),
        }
    }

    /// The spelling in udev's by-path links: decimal below 256, else `0x` and the first two
    /// levels (`udev-builtin-path_id.c`, `format_lun_number`).
    #[must_use]
    pub fn by_path(self) -> String {
        if self.0 < 256 {
            return self.0.to_string();
        }
        let [first, second, ..] = self.levels();
        format!("0x{first:04x}{second:04x}00000000")
    }

    /// The third token for a host's `scan` file, in plain decimal. `None` if it has more
    /// than 16 characters, which the kernel refuses (`scsi_sysfs.c`, `store_scan`). Only
    /// LUNs of four levels are that long.
    pub(crate) fn scan_token(self) -> Option<String> {
        let token = self.0.to_string();
        (token.len() <= 16).then_some(token)
    }
}

impl fmt::Display for Lun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Lun {
    type Err = ParseIdError;

    /// Parses the kernel's decimal number, `flat-N` for flat space address N, or `0x` and
    /// the 16 hex digits of the wire bytes.
    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let parse = || {
            if let Some(hex) = text.strip_prefix("0x") {
                let all_hex = hex.len() == 16 && hex.bytes().all(|b| b.is_ascii_hexdigit());
                let wire = all_hex.then(|| u64::from_str_radix(hex, 16).ok())??;
                return Some(Self::from_wire(wire.to_be_bytes()));
            }
            match text.strip_prefix("flat-") {
                Some(number) => Self::flat(decimal(number)?),
                None => decimal(text).map(Self),
            }
        };
        parse().ok_or_else(|| {
            ParseIdError::new(
                "a LUN",
                "the kernel's decimal number, flat-N with N below 16384, or 0x and 16 hex digits",
                text,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_300_is_16684_to_the_kernel_and_41_2c_on_the_wire() {
        let lun = Lun::flat(300).unwrap();
        assert_eq!(lun.kernel(), 16684);
        assert_eq!(lun.wire(), [0x41, 0x2c, 0, 0, 0, 0, 0, 0]);
        assert_eq!(lun.by_path(), "0x412c000000000000");
        assert_eq!(lun.addressing(), Addressing::Flat(300));
        assert_eq!(Lun::flat(16384), None);
    }

    #[test]
    fn a_lun_below_256_is_spelt_in_decimal_everywhere() {
        let lun = Lun::from_kernel(255);
        assert_eq!(lun.wire(), [0, 255, 0, 0, 0, 0, 0, 0]);
        assert_eq!(lun.by_path(), "255");
        assert_eq!(
            lun.addressing(),
            Addressing::Peripheral { bus: 0, lun: 255 }
        );
    }

    #[test]
    fn the_second_level_is_the_second_word() {
        let lun = Lun::from_levels([0x0105, 0x0002, 0, 0]);
        assert_eq!(lun.kernel(), 0x0002_0105);
        assert_eq!(lun.wire(), [1, 5, 0, 2, 0, 0, 0, 0]);
        assert_eq!(lun.by_path(), "0x0105000200000000");
        assert_eq!(lun.levels(), [0x0105, 2, 0, 0]);
    }

    #[test]
    fn a_token_that_the_kernel_would_refuse_is_not_made() {
        assert_eq!(
            Lun::from_kernel(9_999_999_999_999_999)
                .scan_token()
                .as_deref(),
            Some("9999999999999999")
        );
        assert_eq!(Lun::from_kernel(10_000_000_000_000_000).scan_token(), None);
    }

    #[test]
    fn what_the_kernel_would_read_as_octal_is_not_a_lun() {
        for text in ["010", "+1", " 1", "", "-", "0x1", "flat-16384", "flat-"] {
            assert!(text.parse::<Lun>().is_err(), "{text:?}");
        }
    }
}
