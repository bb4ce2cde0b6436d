//! The disk GUID of a GPT, or the disk signature of an MBR.
//!
//! GPT: UEFI 2.10, 5.3.2 (table 5.5): the header is in the second sector, begins with
//! `EFI PART` and has the disk GUID at byte 56, of which the first three fields are
//! little-endian (appendix A). MBR: UEFI 2.10, 5.2.1 (tables 5.1 and 5.2): the signature is
//! at byte 440, four records of 16 bytes are at 446, and 0x55 0xAA at 510.

use super::bytes::Bytes;
use crate::id::ContentName;

/// The sector sizes in which a table may count: those of the disk that it was made on.
const SECTORS: [usize; 2] = [512, 4096];

pub(super) fn name(first: Bytes<'_>) -> Option<ContentName> {
    let mut headers = SECTORS.into_iter().filter(|at| first.has(*at, b"EFI PART"));
    match headers.next() {
        Some(at) => gpt(first, at),
        None => mbr(first),
    }
}

fn gpt(first: Bytes<'_>, at: usize) -> Option<ContentName> {
    let mut guid: [u8; 16] = first.array(at + 56)?;
    for field in [0..4, 4..6, 6..8] {
        guid.get_mut(field)?.reverse();
    }
    ContentName::gpt(guid)
}

/// Checks the records too, because the boot sector of a FAT file system ends like an MBR
/// but has code in their place. The first byte of a record is 0 or 0x80, and one type is
/// not 0.
fn mbr(first: Bytes<'_>) -> Option<ContentName> {
    let records = [446, 462, 478, 494].map(|at| first.array::<16>(at));
    let is_record = |record: &Option<[u8; 16]>| {
        let status = record.map(|record| record[0]);
        matches!(status, Some(0 | 0x80))
    };
    let is_used = |record: &Option<[u8; 16]>| record.is_some_and(|record| record[4] != 0);
    let is_mbr = first.has(510, &[0x55, 0xaa])
        && records.iter().all(is_record)
        && records.iter().any(is_used);
    if !is_mbr {
        return None;
    }
    ContentName::mbr(u32::from_le_bytes(first.array(440)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(bytes: &[u8]) -> Option<String> {
        name(Bytes(bytes)).map(|name| name.to_string())
    }

    fn with_mbr(length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        bytes[440..444].copy_from_slice(&0x1a2b_3c4d_u32.to_le_bytes());
        bytes[446 + 4] = 0x83;
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        bytes
    }

    #[test]
    fn the_guid_of_a_gpt_of_either_sector_size_is_found_before_the_mbr_that_protects_it() {
        for at in SECTORS {
            let mut bytes = with_mbr(8192);
            bytes[at..at + 8].copy_from_slice(b"EFI PART");
            // C12A7328-F81F-11D2-BA4B-00A0C93EC93B, the GUID of an EFI system partition as
            // the specification writes it.
            let guid = [
                0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e,
                0xc9, 0x3b,
            ];
            bytes[at + 56..at + 72].copy_from_slice(&guid);
            let expected = "gpt.c12a7328-f81f-11d2-ba4b-00a0c93ec93b";
            assert_eq!(name_of(&bytes).as_deref(), Some(expected));
        }
    }

    #[test]
    fn an_mbr_has_its_signature_and_a_boot_sector_without_records_has_none() {
        let bytes = with_mbr(512);
        assert_eq!(name_of(&bytes).as_deref(), Some("mbr.1a2b3c4d"));
        let mut of_fat = bytes.clone();
        of_fat[462] = b'N';
        assert_eq!(name_of(&of_fat), None);
        let mut empty = bytes.clone();
        empty[446 + 4] = 0;
        assert_eq!(name_of(&empty), None);
        assert_eq!(name_of(&bytes[..511]), None);
    }
}
