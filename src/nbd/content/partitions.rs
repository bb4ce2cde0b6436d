//! The disk GUID of a GPT, or the disk signature of an MBR.
//!
//! GPT: UEFI 2.10, 5.3.2 (table 5.5): the header is in the second sector, begins with
//! `EFI PART` and has the disk GUID at byte 56, of which the first three fields are
//! little-endian (appendix A). MBR: UEFI 2.10, 5.2.1 (tables 5.1 and 5.2): the signature is
//! at byte 440, four records of 16 bytes are at 446, and 0x55 0xAA at 510.
//!
//! The same table counts as for `blkid` and Linux (util-linux, `libblkid/src/partitions/dos.c`
//! and `gpt.c`; `block/partitions/efi.c`), because names are compared with those of udev. A GPT
//! counts only if the MBR has a record of type 0xEE, which protects it. The MBR's signature
//! counts only without such a record.

use super::bytes::Bytes;
use crate::id::ContentName;

/// The sector sizes in which a table may count: those of the disk that it was made on.
const SECTORS: [usize; 2] = [512, 4096];

/// The names of the partition table: one, or several if there are GPT headers of two sector
/// sizes.
pub(super) fn names(first: Bytes<'_>) -> Vec<ContentName> {
    let Some(records) = records(first) else {
        return Vec::new();
    };
    if records.iter().any(|record| record[4] == 0xee) {
        let headers = SECTORS.into_iter().filter(|at| first.has(*at, b"EFI PART"));
        return headers.filter_map(|at| gpt(first, at)).collect();
    }
    mbr(first, records).into_iter().collect()
}

/// The records of the MBR, or what a boot sector has in their place.
fn records(first: Bytes<'_>) -> Option<[[u8; 16]; 4]> {
    if !first.has(510, &[0x55, 0xaa]) {
        return None;
    }
    let record = |at| first.array::<16>(at);
    Some([record(446)?, record(462)?, record(478)?, record(494)?])
}

fn gpt(first: Bytes<'_>, at: usize) -> Option<ContentName> {
    let mut guid: [u8; 16] = first.array(at + 56)?;
    for field in [0..4, 4..6, 6..8] {
        guid.get_mut(field)?.reverse();
    }
    ContentName::gpt(guid)
}

/// Checks the records too: the boot sector of a file system ends like an MBR, and may have
/// code in their place. The first byte of a record is 0 or 0x80.
fn mbr(first: Bytes<'_>, records: [[u8; 16]; 4]) -> Option<ContentName> {
    let is_table = records.iter().all(|record| matches!(record[0], 0 | 0x80));
    if !is_table || is_boot_sector_of_a_file_system(first) {
        return None;
    }
    ContentName::mbr(u32::from_le_bytes(first.array(440)?))
}

/// util-linux, `libblkid/src/superblocks/vfat.c` (the kind of FAT at 54 or 82), `exfat.c` and
/// `ntfs.c` (the name at 3).
fn is_boot_sector_of_a_file_system(first: Bytes<'_>) -> bool {
    let marks: [(usize, &[u8]); 6] = [
        (3, b"NTFS    "),
        (3, b"EXFAT   "),
        (54, b"FAT"),
        (54, b"MSDOS"),
        (82, b"FAT32"),
        (82, b"MSWIN"),
    ];
    marks.iter().any(|(at, mark)| first.has(*at, mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_of(bytes: &[u8]) -> Vec<String> {
        let names = names(Bytes(bytes));
        names.iter().map(ToString::to_string).collect()
    }

    fn with_mbr(length: usize, kind: u8) -> Vec<u8> {
        let mut bytes = vec![0; length];
        bytes[440..444].copy_from_slice(&0x1a2b_3c4d_u32.to_le_bytes());
        bytes[446 + 4] = kind;
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        bytes
    }

    const PROTECTS: u8 = 0xee;
    const LINUX: u8 = 0x83;

    fn add_gpt(bytes: &mut [u8], at: usize) {
        bytes[at..at + 8].copy_from_slice(b"EFI PART");
        // C12A7328-F81F-11D2-BA4B-00A0C93EC93B, the GUID of an EFI system partition as the
        // specification writes it.
        let guid = [
            0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e,
            0xc9, 0x3b,
        ];
        bytes[at + 56..at + 72].copy_from_slice(&guid);
    }

    #[test]
    fn a_gpt_of_either_sector_size_has_its_guid_and_the_mbr_that_protects_it_has_no_name() {
        let mut bytes = with_mbr(8192, PROTECTS);
        assert!(names_of(&bytes).is_empty());
        let expected = "gpt.c12a7328-f81f-11d2-ba4b-00a0c93ec93b";
        for at in SECTORS {
            let mut bytes = bytes.clone();
            add_gpt(&mut bytes, at);
            assert_eq!(names_of(&bytes), [expected]);
        }
        // The disk was made anew with the other sector size.
        for at in SECTORS {
            add_gpt(&mut bytes, at);
        }
        bytes[512 + 56] = 0x29;
        let other = "gpt.c12a7329-f81f-11d2-ba4b-00a0c93ec93b";
        assert_eq!(names_of(&bytes), [other, expected]);
    }

    #[test]
    fn a_gpt_without_a_protective_mbr_does_not_count_and_the_mbr_does() {
        for at in SECTORS {
            let mut bytes = with_mbr(8192, LINUX);
            add_gpt(&mut bytes, at);
            assert_eq!(names_of(&bytes), ["mbr.1a2b3c4d"]);
            bytes[510] = 0;
            assert!(names_of(&bytes).is_empty());
        }
    }

    #[test]
    fn an_mbr_has_its_signature_also_without_a_partition_and_a_boot_sector_has_none() {
        for kind in [LINUX, 0] {
            let bytes = with_mbr(512, kind);
            assert_eq!(names_of(&bytes), ["mbr.1a2b3c4d"]);
            assert!(names_of(&bytes[..511]).is_empty());
            for (at, text) in [
                (3, "NTFS    "),
                (3, "EXFAT   "),
                (54, "FAT16   "),
                (82, "FAT32   "),
                // Code in the place of a record.
                (462, "N"),
            ] {
                let mut of_file_system = bytes.clone();
                of_file_system[at..at + text.len()].copy_from_slice(text.as_bytes());
                assert!(names_of(&of_file_system).is_empty(), "{text}");
            }
        }
    }
}
