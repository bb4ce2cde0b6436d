//! The sizes of requests that a server takes, and the block size that the
//! kernel is told.

use std::fmt;

use super::handshake::broken;
use crate::error::{Error, ErrorKind, Result};

/// The kernel's smallest block size (`drivers/block/nbd.c`).
const SECTOR: u32 = 512;
/// What every file system can use, and the protocol's default.
const USUAL: u32 = 4096;
/// The protocol's limit for a server's minimum.
const LARGEST_MINIMUM: u32 = 64 * 1024;

/// The sizes of requests that a server takes, in bytes
/// (`NBD_INFO_BLOCK_SIZE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct BlockSizes {
    /// Offsets and lengths must be multiples of this power of two.
    pub minimum: u32,
    /// Below this power of two the server works slower.
    pub preferred: u32,
    /// The longest request; `u32::MAX` where the server sets no limit.
    pub maximum: u32,
}

impl Default for BlockSizes {
    /// What the protocol has a client assume where the server says nothing.
    fn default() -> Self {
        Self {
            minimum: SECTOR,
            preferred: USUAL,
            maximum: 32 << 20,
        }
    }
}

impl fmt::Display for BlockSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            minimum,
            preferred,
            maximum,
        } = self;
        write!(f, "{minimum}/{preferred}/{maximum}")
    }
}

impl BlockSizes {
    /// As the server says them.
    ///
    /// # Errors
    /// `Protocol`, naming the one that breaks the protocol.
    pub(super) fn new(minimum: u32, preferred: u32, maximum: u32) -> Result<Self> {
        if !minimum.is_power_of_two() || minimum > LARGEST_MINIMUM {
            let expected = "a power of two of at most 65536";
            return Err(broken("minimum block size", minimum, expected));
        }
        if !preferred.is_power_of_two() || preferred < minimum {
            let expected = format!("a power of two of at least the minimum, {minimum}");
            return Err(broken("preferred block size", preferred, &expected));
        }
        Ok(Self {
            minimum,
            preferred,
            maximum,
        })
    }

    /// Only an export that is smaller itself may have a maximum below the
    /// preferred size.
    pub(super) fn check_maximum(&self, size: u64) -> Result<()> {
        let least = u64::from(self.preferred).min(size);
        if u64::from(self.maximum) < least {
            let expected = format!("at least {least}");
            return Err(broken("maximum block size", self.maximum, &expected));
        }
        Ok(())
    }
}

/// What the kernel is told of an export: `block_size` times a whole number is
/// `size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Geometry {
    /// The logical block size in bytes: a power of two from 512 to a page.
    pub block_size: u32,
    /// The device's size in bytes.
    pub size: u64,
    /// How many bytes at the export's end the device does not reach.
    pub lost_tail: u64,
}

impl Geometry {
    /// The block size is what the server prefers, at most 4096 bytes, not below
    /// its minimum, and from 512 bytes to `page_size`, which is what the kernel
    /// takes. Where the export is no multiple of that it is the smallest that
    /// both take, and where it is no multiple of that either its tail is lost:
    /// the kernel would round the size down by itself, and in another way in
    /// each version.
    ///
    /// # Errors
    /// `NotSupported` where the server's minimum is above a page, or the export
    /// is smaller than one block.
    pub(super) fn choose(sizes: BlockSizes, size: u64, page_size: u32) -> Result<Self> {
        let smallest = sizes.minimum.max(SECTOR);
        if smallest > page_size {
            let message = format!(
                "the NBD server's minimum block size is {smallest}: this kernel takes at most {page_size}"
            );
            return Err(Error::new(ErrorKind::NotSupported, message));
        }
        let best = sizes.preferred.min(USUAL).clamp(smallest, page_size);
        let is_whole = size.is_multiple_of(u64::from(best));
        let block_size = if is_whole { best } else { smallest };
        let lost_tail = size % u64::from(block_size);
        if lost_tail == size {
            let message = format!(
                "the NBD export has {size} bytes: less than one block of {block_size} bytes"
            );
            return Err(Error::new(ErrorKind::NotSupported, message));
        }
        Ok(Self {
            block_size,
            size: size - lost_tail,
            lost_tail,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn sizes(minimum: u32, preferred: u32) -> BlockSizes {
        BlockSizes::new(minimum, preferred, u32::MAX).unwrap()
    }

    fn block_size(minimum: u32, preferred: u32, page_size: u32) -> u32 {
        let sizes = sizes(minimum, preferred);
        Geometry::choose(sizes, GIB, page_size).unwrap().block_size
    }

    #[test]
    fn the_preferred_size_is_taken_within_what_the_kernel_takes() {
        assert_eq!(block_size(1, 512, 4096), 512);
        assert_eq!(block_size(1, 1, 4096), 512);
        assert_eq!(block_size(512, 4096, 4096), 4096);
        assert_eq!(block_size(1, 65536, 4096), 4096);
        assert_eq!(block_size(1, 65536, 65536), 4096);
        assert_eq!(block_size(16384, 32768, 65536), 16384);
    }

    #[test]
    fn a_minimum_above_a_page_is_refused() {
        let error = Geometry::choose(sizes(8192, 8192), GIB, 4096).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported);
        assert!(error.to_string().contains("minimum block size is 8192"));
    }

    #[test]
    fn a_size_that_is_no_multiple_has_smaller_blocks_and_a_lost_tail_is_said() {
        let odd = Geometry::choose(sizes(1, 4096), GIB + 512, 4096).unwrap();
        assert_eq!(
            (odd.block_size, odd.size, odd.lost_tail),
            (512, GIB + 512, 0)
        );
        let odd = Geometry::choose(sizes(1, 4096), GIB + 513, 4096).unwrap();
        assert_eq!(
            (odd.block_size, odd.size, odd.lost_tail),
            (512, GIB + 512, 1)
        );
        let odd = Geometry::choose(sizes(2048, 4096), GIB + 512, 4096).unwrap();
        assert_eq!((odd.block_size, odd.size, odd.lost_tail), (2048, GIB, 512));
    }

    #[test]
    fn an_export_below_one_block_is_refused() {
        let error = Geometry::choose(BlockSizes::default(), 511, 4096).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported);
    }

    #[test]
    fn sizes_that_break_the_protocol_are_named() {
        for (minimum, preferred, field) in [
            (0, 4096, "minimum"),
            (3, 4096, "minimum"),
            (131_072, 131_072, "minimum"),
            (1, 0, "preferred"),
            (1, 4095, "preferred"),
            (1024, 512, "preferred"),
        ] {
            let error = BlockSizes::new(minimum, preferred, u32::MAX).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(field), "{error}");
        }
    }

    #[test]
    fn a_maximum_below_the_preferred_size_is_for_exports_that_are_smaller() {
        let sizes = BlockSizes::new(1, 4096, 2048).unwrap();
        let error = sizes.check_maximum(4096).unwrap_err();
        assert!(error.to_string().contains("maximum"), "{error}");
        assert!(sizes.check_maximum(2048).is_ok());
    }

    proptest! {
        #[test]
        fn the_kernel_takes_every_geometry(low in 0..=16_u32, more in 0..16_u32, size: u64, page in 12..=16_u32) {
            let sizes = sizes(1 << low, 1 << (low + more).min(31));
            if let Ok(geometry) = Geometry::choose(sizes, size, 1 << page) {
                let Geometry { block_size, size: used, lost_tail } = geometry;
                prop_assert!(block_size.is_power_of_two());
                prop_assert!((512..=1 << page).contains(&block_size));
                prop_assert!(block_size >= sizes.minimum);
                prop_assert!(used > 0 && used % u64::from(block_size) == 0);
                prop_assert_eq!(used + lost_tail, size);
                prop_assert!(lost_tail < u64::from(block_size));
            }
        }
    }
}
