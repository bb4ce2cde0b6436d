//! The places of a volume that are compared, and the bytes that one side serves there.

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::id::ContentName;
use crate::kernel::Roots;
use crate::kernel::blockdev::BlockDevice;
use crate::nbd::{self, Connection, Export, FirstBytes};

/// How many blocks are chosen. A copy that differs in one block of ten agrees in all of them
/// once in twelve times.
const CHOSEN: usize = 24;

/// The first bytes of a volume, which hold its names; and if its server allows several
/// connections, a block at its end and blocks that are chosen at random.
#[derive(Debug, Clone)]
pub(in crate::engine) struct Places {
    block: u32,
    offsets: Vec<u64>,
}

impl Places {
    /// Chooses places that both the export and a device of `size` bytes have.
    ///
    /// # Errors
    /// `Io` if the kernel has no random numbers.
    pub(super) fn choose(export: &Export, size: u64) -> Result<Self> {
        let minimum = export.block_sizes.map_or(1, |sizes| sizes.minimum);
        // No block size of a device exceeds a page.
        let block = minimum.max(nbd::page_size()?);
        let count = size.min(export.size) / u64::from(block);
        let mut offsets = Vec::new();
        if export.can_multi_conn() && count > 0 {
            let mut random = [[0; 8]; CHOSEN];
            getrandom::fill(random.as_flattened_mut()).map_err(|error| {
                let message = format!("the kernel has no random numbers: {error}");
                Error::new(ErrorKind::Io, message)
            })?;
            let chosen = random.map(|bytes| u64::from_ne_bytes(bytes) % count);
            offsets.push(count - 1);
            offsets.extend(chosen);
            for offset in &mut offsets {
                *offset *= u64::from(block);
            }
        }
        Ok(Self { block, offsets })
    }

    /// Reads the places over a connection that the kernel does not have yet.
    ///
    /// # Errors
    /// Those of [`Connection::first_bytes`].
    pub(super) fn read_over(&self, connection: &Connection, deadline: Deadline) -> Result<Sample> {
        let first = connection.first_bytes(deadline)?;
        let first_error = first.as_ref().err().copied();
        let mut served = vec![first.ok()];
        for offset in &self.offsets {
            let block = connection.bytes_at(*offset, self.block, deadline)?;
            served.push(block.ok());
        }
        Ok(Sample {
            served,
            first_error,
        })
    }

    /// A read of the places from a device, past the page cache. It fails if the first bytes
    /// cannot be read.
    pub(super) fn read_of_device(
        &self,
    ) -> impl FnOnce(&BlockDevice, &Roots) -> Result<Sample> + Send + 'static {
        let places = self.clone();
        let in_memory = |bytes: u32| usize::try_from(bytes).unwrap_or(usize::MAX);
        move |disk: &BlockDevice, roots: &Roots| {
            let first = disk.read_first_bytes(roots, in_memory(nbd::CONTENT_LENGTH))?;
            let mut served = vec![Some(first)];
            served.extend(disk.read_at_each(roots, &places.offsets, in_memory(places.block))?);
            Ok(Sample {
                served,
                first_error: None,
            })
        }
    }

    /// Where a place begins in the volume.
    fn offset_of(&self, place: usize) -> u64 {
        let before = place.checked_sub(1);
        let offset = before.and_then(|before| self.offsets.get(before));
        offset.copied().unwrap_or(0)
    }
}

/// The bytes of each place as one side served them; `None` if it answered with an error.
pub(super) struct Sample {
    served: Vec<Option<Vec<u8>>>,
    /// The protocol's error to a read of the first place.
    first_error: Option<u32>,
}

impl Sample {
    pub(super) fn count(&self) -> usize {
        self.served.len()
    }

    fn at(&self, place: usize) -> Option<&[u8]> {
        self.served.get(place)?.as_deref()
    }

    pub(super) fn has(&self, place: usize) -> bool {
        self.at(place).is_some()
    }

    /// Whether both sides serve the same bytes, or neither serves any.
    pub(super) fn agrees_at(&self, other: &Self, place: usize) -> bool {
        match (self.at(place), other.at(place)) {
            (Some(one), Some(other)) => first_difference(one, other).is_none(),
            (None, None) => true,
            _ => false,
        }
    }

    pub(super) fn agrees(&self, other: &Self) -> bool {
        (0..self.count().max(other.count())).all(|place| self.agrees_at(other, place))
    }

    /// What is kept of the first bytes.
    pub(super) fn first_bytes(&self) -> FirstBytes {
        FirstBytes::of(self.at(0).unwrap_or_default())
    }

    /// The names in the first bytes.
    pub(super) fn names(&self) -> Vec<ContentName> {
        nbd::content_names(self.at(0).unwrap_or_default())
    }

    /// # Errors
    /// `refuse` if the server answered the read of the first bytes with an error.
    pub(super) fn require_first(self, refuse: impl FnOnce(u32) -> Error) -> Result<Self> {
        match self.first_error {
            Some(error) => Err(refuse(error)),
            None => Ok(self),
        }
    }
}

/// The first byte of the volume in which both sides are known to differ.
pub(super) fn first_difference_of(places: &Places, one: &Sample, other: &Sample) -> Option<u64> {
    let differences = (0..one.count()).filter_map(|place| {
        let at = first_difference(one.at(place)?, other.at(place)?)?;
        Some(places.offset_of(place) + u64::try_from(at).ok()?)
    });
    differences.min()
}

/// The first position at which the bytes that both have differ.
fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    one.iter().zip(other).position(|(one, other)| one != other)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::nbd::{BlockSizes, ExportFlags};

    impl Sample {
        /// A sample with the first bytes and these blocks.
        pub(in crate::engine::nbd::same_volume) fn of(first: &[u8], blocks: &[Option<u8>]) -> Self {
            let block = |with: &Option<u8>| with.map(|with| vec![with; 4096]);
            let mut served = vec![Some(first.to_vec())];
            served.extend(blocks.iter().map(block));
            Self {
                served,
                first_error: None,
            }
        }
    }

    const ONE: ExportFlags = ExportFlags::HAS_FLAGS;
    const SEVERAL: ExportFlags = ONE.union(ExportFlags::CAN_MULTI_CONN);

    fn export(size: u64, minimum: u32, flags: ExportFlags) -> Export {
        let sizes = BlockSizes {
            minimum,
            preferred: minimum.max(4096),
            maximum: 32 << 20,
        };
        Export {
            name: "a".to_owned(),
            size,
            flags,
            block_sizes: Some(sizes),
        }
    }

    #[test]
    fn the_places_are_whole_blocks_that_both_sides_have_and_differ_each_time() {
        for (size, minimum, of_device) in [(1 << 40, 1, 1 << 30), (1 << 30, 65_536, 1 << 40)] {
            let export = export(size, minimum, SEVERAL);
            let choose = || Places::choose(&export, of_device).unwrap();
            let places = choose();
            let block = u64::from(places.block);
            assert_eq!(places.offsets.len(), CHOSEN + 1);
            assert_eq!(places.offsets[0], (1 << 30) - block);
            for offset in &places.offsets {
                assert!(offset % block == 0 && offset + block <= 1 << 30, "{offset}");
            }
            assert!(block >= u64::from(minimum.max(4096)));
            assert_ne!(choose().offsets, places.offsets);
        }
    }

    #[test]
    fn only_the_first_bytes_count_without_a_shared_cache_and_on_a_volume_below_one_block() {
        for export in [export(1 << 30, 1, ONE), export(4095, 1, SEVERAL)] {
            let places = Places::choose(&export, u64::MAX).unwrap();
            assert!(places.offsets.is_empty(), "{places:?}");
        }
    }

    #[test]
    fn the_first_different_byte_is_reported_by_its_place_in_the_volume() {
        let places = Places {
            block: 4096,
            offsets: vec![1 << 20, 8192],
        };
        let one = Sample::of(&[1; 16], &[Some(1), Some(1)]);
        for (first, blocks, at) in [
            ([1; 16], [Some(1), Some(1)], None),
            ([1; 16], [Some(2), Some(1)], Some(1 << 20)),
            ([1; 16], [Some(2), Some(2)], Some(8192)),
            ([1; 16], [None, Some(1)], None),
            ([2; 16], [Some(2), Some(2)], Some(0)),
        ] {
            let other = Sample::of(&first, &blocks);
            assert_eq!(first_difference_of(&places, &one, &other), at);
        }
    }

    #[test]
    fn a_device_that_is_shorter_than_the_read_is_compared_up_to_its_end() {
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2], &[1, 3, 3]), Some(1));
    }
}
