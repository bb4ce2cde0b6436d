//! The content of a disk with two partitions: a file system and a swap area.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;

const SECTOR: usize = 512;
const MIB: usize = 1 << 20;

/// The offset of the first partition; it has 8 MiB of ext4.
pub const FIRST: usize = MIB;
/// The offset of the second partition; it has a swap area of 4 MiB.
pub const SECOND: usize = 9 * MIB;
/// The length of the content.
pub const LENGTH: usize = 13 * MIB;

/// The content; the same bytes at each call.
#[must_use]
pub fn content() -> &'static [u8] {
    static CONTENT: OnceLock<Vec<u8>> = OnceLock::new();
    CONTENT.get_or_init(make)
}

/// Writes the content to a disk or a file.
pub fn write_to(node: &Path) {
    let mut disk = OpenOptions::new().write(true).open(node).expect("a disk");
    disk.write_all(content()).expect("its content");
    disk.sync_all().expect("its content");
}

fn make() -> Vec<u8> {
    let path = format!("/tmp/partitioned-{}", std::process::id());
    fs::write(&path, table()).expect("a file");
    let offset = format!("offset={FIRST}");
    super::run(&["mkfs.ext4", "-q", "-F", "-E", &offset, &path, "8192k"]);
    let mut content = fs::read(&path).expect("the file");
    content.resize(LENGTH, 0);
    fs::remove_file(&path).expect("the file");
    // `struct swap_header` (`include/linux/swap.h`): version 1, and the last page.
    content[SECOND + 1024..][..4].copy_from_slice(&1_u32.to_le_bytes());
    let last_page = u32::try_from((LENGTH - SECOND) / 4096 - 1).expect("a number");
    content[SECOND + 1028..][..4].copy_from_slice(&last_page.to_le_bytes());
    content[SECOND + 4086..][..10].copy_from_slice(b"SWAPSPACE2");
    content
}

/// An MBR with both partitions.
fn table() -> Vec<u8> {
    let mut table = vec![0; LENGTH];
    for (entry, kind, begin, end) in [(0, 0x83, FIRST, SECOND), (1, 0x82, SECOND, LENGTH)] {
        let at = 446 + 16 * entry;
        table[at + 4] = kind;
        for (at, bytes) in [(at + 8, begin), (at + 12, end - begin)] {
            let sectors = u32::try_from(bytes / SECTOR).expect("a number of sectors");
            table[at..at + 4].copy_from_slice(&sectors.to_le_bytes());
        }
    }
    table[510..512].copy_from_slice(&[0x55, 0xaa]);
    table
}
