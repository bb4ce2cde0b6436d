//! The request sizes that a server accepts, and the block size that the kernel gets.

use std::fmt;

use super::violation::violation;
use crate::error::{Error, ErrorKind, Result};

/// The kernel's smallest block size (`drivers/block/nbd.c`).
const SECTOR: u32 = 512;
/// The protocol's default for a server's preferred size.
const DEFAULT_PREFERRED: u32 = 4096;
/// The protocol's limit for a server's minimum.
const LARGEST_MINIMUM: u32 = 64 * 1024;

/// The request sizes that a server accepts, in bytes (`NBD_INFO_BLOCK_SIZE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct BlockSizes {
    /// Offsets and lengths must be multiples of this power of two.
    pub minimum: u32,
    /// The server works slower with requests below this power of two.
    pub preferred: u32,
    /// The longest request; `u32::MAX` if the server sets no limit.
    pub maximum: u32,
}

impl Default for BlockSizes {
    /// The values that the protocol has a client assume if the server announces none.
    fn default() -> Self {
        Self {
            minimum: SECTOR,
            preferred: DEFAULT_PREFERRED,
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
    /// Checks the sizes that a server announced.
    ///
    /// # Errors
    /// `Protocol`, with the size that breaks the protocol.
    pub(super) fn new(minimum: u32, preferred: u32, maximum: u32) -> Result<Self> {
        if !minimum.is_power_of_two() || minimum > LARGEST_MINIMUM {
            let expected = "a power of two of at most 65536";
            return Err(violation("minimum block size", minimum, expected));
        }
        if !preferred.is_power_of_two() || preferred < minimum {
            let expected = format!("a power of two of at least the minimum, {minimum}");
            return Err(violation("preferred block size", preferred, &expected));
        }
        Ok(Self {
            minimum,
            preferred,
            maximum,
        })
    }

    /// Checks that the maximum is not below the preferred size. Only an export that is
    /// smaller itself may have such a maximum.
    pub(super) fn check_maximum(&self, size: u64) -> Result<()> {
        let least = u64::from(self.preferred).min(size);
        if u64::from(self.maximum) < least {
            let expected = format!("at least {least}");
            return Err(violation("maximum block size", self.maximum, &expected));
        }
        Ok(())
    }
}

/// The geometry that the kernel gets for an export: `size` is a multiple of
/// `block_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Geometry {
    /// The logical block size in bytes: a power of two from 512 to a page.
    pub block_size: u32,
    /// The device's size in bytes.
    pub size: u64,
    /// How many bytes at the export's end the device lacks.
    pub lost_tail: u64,
}

impl Geometry {
    /// The logical block size is `wanted` or, without `wanted`, the server's minimum,
    /// but at least 512 bytes. nbd-client and qemu-nbd choose the same. Partition
    /// tables count in logical blocks, so a larger block would move every partition of
    /// an image that was made with 512-byte sectors. The preferred size only says how a
    /// server works fastest, and the driver has no place for it.
    ///
    /// If the export is no multiple of a block, its tail is lost. The kernel would
    /// round the size down by itself, in another way in each version.
    ///
    /// # Errors
    /// `InvalidInput` if `wanted` is no power of two of at least 512 bytes;
    /// `NotSupported` if the server's minimum is above `wanted` or above a page,
    /// `wanted` is above a page, or the export is smaller than one block.
    pub(super) fn choose(
        sizes: BlockSizes,
        size: u64,
        page_size: u32,
        wanted: Option<u32>,
    ) -> Result<Self> {
        let unsupported = |message| Err(Error::new(ErrorKind::NotSupported, message));
        if let Some(wanted) = wanted
            && !(wanted.is_power_of_two() && wanted >= SECTOR)
        {
            let message = format!(
                "a block size of {wanted} bytes is wanted: it must be a power of two of at least 512"
            );
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        let smallest = sizes.minimum.max(SECTOR);
        if smallest > page_size {
            return unsupported(format!(
                "the NBD server's minimum block size is {smallest}: this kernel takes at most {page_size}"
            ));
        }
        let block_size = wanted.unwrap_or(smallest);
        if block_size > page_size {
            return unsupported(format!(
                "a block size of {block_size} bytes is wanted: this kernel takes at most {page_size}"
            ));
        }
        if block_size < smallest {
            return unsupported(format!(
                "a block size of {block_size} bytes is wanted: the NBD server's minimum is {smallest}"
            ));
        }
        let lost_tail = size % u64::from(block_size);
        if lost_tail == size {
            return unsupported(format!(
                "the NBD export has {size} bytes: less than one block of {block_size} bytes"
            ));
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

    fn choose(sizes: BlockSizes, size: u64, wanted: Option<u32>) -> Result<Geometry> {
        Geometry::choose(sizes, size, 4096, wanted)
    }

    fn block_size(minimum: u32, preferred: u32, page_size: u32) -> u32 {
        let sizes = sizes(minimum, preferred);
        let geometry = Geometry::choose(sizes, GIB, page_size, None);
        geometry.unwrap().block_size
    }

    #[test]
    fn the_block_size_is_the_servers_minimum_and_at_least_512_whatever_it_prefers() {
        assert_eq!(block_size(1, 512, 4096), 512);
        assert_eq!(block_size(1, 1, 4096), 512);
        assert_eq!(block_size(512, 4096, 4096), 512);
        assert_eq!(block_size(1, 65536, 65536), 512);
        assert_eq!(block_size(4096, 4096, 4096), 4096);
        assert_eq!(block_size(16384, 32768, 65536), 16384);
    }

    #[test]
    fn the_block_size_does_not_change_with_the_size_of_the_export() {
        let sizes = BlockSizes::default();
        let block_size = |size| choose(sizes, size, None).unwrap().block_size;
        assert_eq!(block_size(GIB), block_size(GIB + 512));
        assert_eq!(block_size(GIB), block_size(GIB + 513));
    }

    #[test]
    fn a_wanted_block_size_is_taken_where_server_and_kernel_take_it() {
        let wanted = |minimum, wanted| choose(sizes(minimum, 4096), GIB, Some(wanted));
        assert_eq!(wanted(1, 4096).unwrap().block_size, 4096);
        assert_eq!(wanted(512, 1024).unwrap().block_size, 1024);
        for (minimum, size, kind, said) in [
            (
                4096,
                512,
                ErrorKind::NotSupported,
                "the NBD server's minimum is 4096",
            ),
            (
                1,
                8192,
                ErrorKind::NotSupported,
                "this kernel takes at most 4096",
            ),
            (
                1,
                256,
                ErrorKind::InvalidInput,
                "a power of two of at least 512",
            ),
            (
                1,
                1000,
                ErrorKind::InvalidInput,
                "a power of two of at least 512",
            ),
            (
                1,
                0,
                ErrorKind::InvalidInput,
                "a power of two of at least 512",
            ),
        ] {
            let error = wanted(minimum, size).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(said), "{error}");
        }
    }

    #[test]
    fn a_minimum_above_a_page_is_refused() {
        let error = choose(sizes(8192, 8192), GIB, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported);
        assert!(error.to_string().contains("minimum block size is 8192"));
    }

    #[test]
    fn the_tail_of_a_size_that_is_no_multiple_is_lost_and_reported() {
        let odd = choose(sizes(1, 4096), GIB + 513, None).unwrap();
        assert_eq!(
            (odd.block_size, odd.size, odd.lost_tail),
            (512, GIB + 512, 1)
        );
        let odd = choose(sizes(2048, 4096), GIB + 512, None).unwrap();
        assert_eq!((odd.block_size, odd.size, odd.lost_tail), (2048, GIB, 512));
    }

    #[test]
    fn an_export_below_one_block_is_refused() {
        let error = choose(BlockSizes::default(), 511, None).unwrap_err();
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
        fn the_kernel_takes_every_geometry_and_there_is_one_where_a_block_fits_a_page_and_the_export(
            low in 0..=16_u32,
            more in 0..16_u32,
            size in prop_oneof![any::<u64>(), 0..100_000_u64, (0..1000_u64).prop_map(|n| n << 12)],
            page in 12..=16_u32,
            wanted in prop_oneof![Just(None), any::<Option<u32>>(), (0..20_u32).prop_map(|n| Some(1 << n))],
        ) {
            let sizes = sizes(1 << low, 1 << (low + more).min(31));
            let smallest = u64::from(sizes.minimum.max(SECTOR));
            let block = wanted.map_or(smallest, u64::from);
            let is_valid = block.is_power_of_two() && (smallest..=1 << page).contains(&block);
            let chosen = Geometry::choose(sizes, size, 1 << page, wanted);
            prop_assert_eq!(chosen.is_ok(), is_valid && size >= block);
            if let Ok(geometry) = chosen {
                let Geometry { block_size, size: used, lost_tail } = geometry;
                prop_assert!(block_size.is_power_of_two());
                prop_assert!((512..=1 << page).contains(&block_size));
                prop_assert!(block_size >= sizes.minimum);
                prop_assert!(wanted.is_none_or(|wanted| wanted == block_size));
                prop_assert!(used > 0 && used % u64::from(block_size) == 0);
                prop_assert_eq!(used + lost_tail, size);
                prop_assert!(lost_tail < u64::from(block_size));
            }
        }
    }
}
