//! The UUIDs of file systems, and of the devices of a btrfs.

use super::bytes::Bytes;
use crate::id::ContentName;

/// ext2, ext3 and ext4: Linux, `fs/ext4/ext4.h`, `struct ext4_super_block` at byte 1024.
/// In it, `s_magic` is at 0x38, little-endian, and `s_uuid` at 0x68.
pub(super) fn name_of_ext(first: Bytes<'_>) -> Option<ContentName> {
    let is_ext = first.has(1024 + 0x38, &0xef53_u16.to_le_bytes());
    is_ext.then(|| ContentName::file_system(first.array(1024 + 0x68)?))?
}

/// Linux, `fs/xfs/libxfs/xfs_format.h`, `struct xfs_dsb` at byte 0. It begins with `XFSB`,
/// and `sb_uuid` is at 32.
pub(super) fn name_of_xfs(first: Bytes<'_>) -> Option<ContentName> {
    let is_xfs = first.has(0, b"XFSB");
    is_xfs.then(|| ContentName::file_system(first.array(32)?))?
}

/// Linux, `include/uapi/linux/btrfs_tree.h`, `struct btrfs_super_block` at 64 KiB
/// (`BTRFS_SUPER_INFO_OFFSET`). In it, `fsid` is at 0x20, the magic at 0x40, and the `uuid` of
/// `dev_item` at 0x10b.
pub(super) fn names_of_btrfs(first: Bytes<'_>) -> [Option<ContentName>; 2] {
    const AT: usize = 64 * 1024;
    if !first.has(AT + 0x40, b"_BHRfS_M") {
        return [None, None];
    }
    let uuid = |at| first.array(AT + at);
    [
        uuid(0x20).and_then(ContentName::file_system),
        uuid(0x10b).and_then(ContentName::btrfs_device),
    ]
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_file_system_has_the_uuid_of_its_superblock() {
        let uuid: [u8; 16] = std::array::from_fn(|place| u8::try_from(place).unwrap() + 0x10);
        let written = |magic_at: usize, magic: &[u8], uuid_at: usize| {
            let mut bytes = vec![0; 68 * 1024];
            bytes[magic_at..magic_at + magic.len()].copy_from_slice(magic);
            bytes[uuid_at..uuid_at + 16].copy_from_slice(&uuid);
            bytes
        };
        let expected = "fs.10111213-1415-1617-1819-1a1b1c1d1e1f";
        for bytes in [
            written(0x438, &[0x53, 0xef], 0x468),
            written(0, b"XFSB", 32),
            written(0x1_0040, b"_BHRfS_M", 0x1_0020),
        ] {
            let names = crate::nbd::content::names(&bytes);
            assert_eq!(names, [expected.parse().unwrap()]);
        }
    }

    #[test]
    fn the_devices_of_one_btrfs_have_its_uuid_and_each_has_its_own() {
        let names = [1, 2].map(|device| {
            let mut bytes = vec![0; 68 * 1024];
            bytes[0x1_0040..0x1_0048].copy_from_slice(b"_BHRfS_M");
            bytes[0x1_0020..0x1_0030].fill(7);
            bytes[0x1_010b..0x1_011b].fill(device);
            let names = crate::nbd::content::names(&bytes);
            names.iter().map(ToString::to_string).collect::<Vec<_>>()
        });
        let fs = "fs.07070707-0707-0707-0707-070707070707";
        let [one, other] = [
            "btrfs.01010101-0101-0101-0101-010101010101",
            "btrfs.02020202-0202-0202-0202-020202020202",
        ];
        assert_eq!(names, [[fs, one], [fs, other]]);
    }
}
