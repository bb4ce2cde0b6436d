//! Reads past the page cache.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What a disk stores at this byte.
///
/// # Panics
/// If it cannot be read.
#[must_use]
pub fn stored(node: &Path, at: usize, length: usize) -> Vec<u8> {
    let mut page = memmap2::MmapMut::map_anon(length).expect("memory");
    let mut direct = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(node)
        .expect("the disk");
    direct.seek(SeekFrom::Start(at as u64)).expect("the place");
    direct.read_exact(&mut page).expect("the data");
    page.to_vec()
}
