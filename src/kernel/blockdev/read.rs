//! Reads of a block device, past the page cache.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use memmap2::MmapMut;
use nix::fcntl::OFlag;

use super::BlockDevice;
use crate::error::{Error, Result};
use crate::kernel::{Roots, sysfs};

impl BlockDevice {
    /// Reads the first logical block from the device itself, past the page cache; at least
    /// 4,096 bytes. **Blocks** for as long as the device does.
    ///
    /// # Errors
    /// `Io` if the device answers with an error.
    pub(crate) fn read_first_block(&self, roots: &Roots) -> Result<()> {
        self.read(roots, 0, |_, _| 0).map(drop)
    }

    /// Like [`read_first_block`](Self::read_first_block), but reads the last block.
    pub(crate) fn read_last_block(&self, roots: &Roots) -> Result<()> {
        self.read(roots, 0, u64::saturating_sub).map(drop)
    }

    /// Like [`read_first_block`](Self::read_first_block), but reads at least `length`
    /// bytes if the device has as many.
    pub(crate) fn read_first_bytes(&self, roots: &Roots, length: usize) -> Result<Vec<u8>> {
        self.read(roots, length, |_, _| 0)
    }

    /// Reads `length` bytes at each of these offsets, past the page cache; `None` where the
    /// device answers with an error. All are whole pages and logical blocks. **Blocks** for as
    /// long as the device does.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub(crate) fn read_at_each(
        &self,
        roots: &Roots,
        offsets: &[u64],
        length: usize,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let node = self.node(roots);
        let failed = |error: &std::io::Error| Error::io("cannot read", &node, error);
        let mut buffer = MmapMut::map_anon(length).map_err(|error| failed(&error))?;
        let file = open_past_cache(&node).map_err(|error| failed(&error))?;
        let read_at = |offset: &u64| {
            let read = file.read_exact_at(&mut buffer, *offset);
            read.ok().map(|()| buffer.to_vec())
        };
        Ok(offsets.iter().map(read_at).collect())
    }

    /// Reads at the offset that `place` returns for the device's size and the length to
    /// read.
    fn read(
        &self,
        roots: &Roots,
        length: usize,
        place: impl FnOnce(u64, u64) -> u64,
    ) -> Result<Vec<u8>> {
        // A partition has no queue in sysfs; its blocks are no longer than a page.
        let block = sysfs::parse(&self.dir.join("queue/logical_block_size"));
        let length = length_of_read(block.unwrap_or(0), length);
        let node = self.node(roots);
        let failed = |error: &std::io::Error| Error::io("cannot read", &node, error);
        let mut buffer = MmapMut::map_anon(length).map_err(|error| failed(&error))?;
        let file = open_past_cache(&node).map_err(|error| failed(&error))?;
        let size = self.size()?;
        let wanted = length.min(usize::try_from(size).unwrap_or(length));
        let (block, _) = buffer.split_at_mut(wanted);
        let at = place(size, u64::try_from(wanted).unwrap_or(0));
        file.read_exact_at(block, at)
            .map_err(|error| failed(&error))?;
        Ok(block.to_vec())
    }
}

fn open_past_cache(node: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(OFlag::O_DIRECT.bits());
    options.open(node)
}

/// The length of a read past the page cache: whole logical blocks, whatever the page size,
/// and at least 4 KiB.
fn length_of_read(logical_block: usize, wanted: usize) -> usize {
    let block = logical_block.max(4096);
    wanted.next_multiple_of(block).max(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_whole_logical_blocks_and_at_least_4_kib() {
        for (block, wanted, length) in [
            (512, 0, 4096),
            (4096, 0, 4096),
            (4096, 68 << 10, 68 << 10),
            // A kernel with pages of 64 KiB made these blocks; the pages of this machine
            // do not matter.
            (65_536, 0, 65_536),
            (65_536, 68 << 10, 128 << 10),
            (0, 0, 4096),
        ] {
            assert_eq!(length_of_read(block, wanted), length, "{block} {wanted}");
        }
    }
}
