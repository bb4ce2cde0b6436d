//! The names that identify the content of a volume, from its first blocks.
//!
//! Each format has a file of its own, with the offsets that it needs and the source of
//! them. The code reads nothing else of a format and verifies no checksum: a damaged name
//! is another name.

mod bytes;
mod file_systems;
mod luks;
mod lvm;
mod partitions;
mod udev;

use crate::id::ContentName;
use bytes::Bytes;
pub(super) use udev::names as names_by_udev;

/// How many bytes hold all of the names. The last names are those of btrfs, behind 64 KiB.
pub(crate) const LENGTH: u32 = 68 * 1024;

/// The names in the first bytes of a volume, sorted; none if the volume is blank or of an
/// unknown format. `first` is shorter than [`LENGTH`] if the volume is.
pub(crate) fn names(first: &[u8]) -> Vec<ContentName> {
    let first = Bytes(first);
    let found = [
        luks::name(first),
        lvm::name(first),
        file_systems::name_of_ext(first),
        file_systems::name_of_xfs(first),
    ];
    let found = found.into_iter().chain(file_systems::names_of_btrfs(first));
    let mut names = partitions::names(first);
    names.extend(found.flatten());
    names.sort();
    names.dedup();
    names
}

/// The text of names, for errors.
pub(crate) fn describe_content_names(names: &[ContentName]) -> String {
    if names.is_empty() {
        return "no name that is known".to_owned();
    }
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    names.join(" and ")
}

/// Whether a volume that has the names `now` is another than the one that had the names
/// `before`: they have no name in common, or they are two devices of a btrfs, which have its
/// UUID in common. A volume that was blank before may have got any name.
pub(crate) fn content_names_differ(now: &[ContentName], before: &[ContentName]) -> bool {
    if let (Some(now), Some(before)) = (btrfs_device(now), btrfs_device(before)) {
        return now != before;
    }
    !before.is_empty() && !before.iter().any(|name| now.contains(name))
}

fn btrfs_device(names: &[ContentName]) -> Option<&ContentName> {
    names.iter().find(|name| name.is_btrfs_device())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_blank_volume_and_one_of_few_bytes_have_no_name() {
        for length in [0, 1, 512, 1024, 4096, usize::try_from(LENGTH).unwrap()] {
            assert_eq!(names(&vec![0; length]), []);
        }
    }

    #[test]
    fn a_volume_has_every_name_that_is_found() {
        let mut first = vec![0; 4096];
        first[1080..1082].copy_from_slice(&[0x53, 0xef]);
        first[1128..1144].copy_from_slice(&[7; 16]);
        first[440..444].copy_from_slice(&[4, 3, 2, 1]);
        first[446 + 4] = 0x83;
        first[510..512].copy_from_slice(&[0x55, 0xaa]);
        let expected = ["mbr.01020304", "fs.07070707-0707-0707-0707-070707070707"];
        let expected = expected.map(|name| name.parse::<ContentName>().unwrap());
        assert_eq!(names(&first), expected);
    }

    #[test]
    fn a_blank_volume_may_get_any_name_and_a_named_one_has_to_keep_one() {
        let name = |kind: &str| format!("{kind}.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9");
        let [fs, luks, gpt] = ["fs", "luks", "gpt"].map(|kind| name(kind).parse().unwrap());
        let one = std::slice::from_ref::<ContentName>;
        assert!(!content_names_differ(one(&fs), &[]));
        assert!(!content_names_differ(
            &[fs.clone(), luks.clone()],
            &[fs.clone(), gpt]
        ));
        assert!(content_names_differ(one(&luks), one(&fs)));
        assert!(content_names_differ(&[], one(&fs)));
    }

    #[test]
    fn another_device_of_the_same_btrfs_is_another_volume_where_both_devices_are_known() {
        let name = |kind: &str, uuid: u8| -> ContentName {
            let name = format!("{kind}.{uuid:08x}-4e5f-6071-8293-a4b5c6d7e8f9");
            name.parse().unwrap()
        };
        let member = |device| [name("fs", 1), name("btrfs", device)];
        assert!(content_names_differ(&member(3), &member(2)));
        assert!(!content_names_differ(&member(2), &member(2)));
        // A journal of an earlier version, and a caller, have the file system alone.
        let of_file_system = [name("fs", 1)];
        assert!(!content_names_differ(&member(3), &of_file_system));
        assert!(!content_names_differ(&of_file_system, &member(2)));
        // `btrfstune` gives the file system another UUID.
        let renamed = [name("fs", 9), name("btrfs", 2)];
        assert!(!content_names_differ(&renamed, &member(2)));
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_and_length_are_read_to_their_end(
            bytes in prop::collection::vec(any::<u8>(), 0..4096),
            start in prop::sample::select(vec![
                &b"LUKS\xba\xbe\0\x02"[..], b"XFSB", b"LABELONE", b"EFI PART", b"",
            ]),
        ) {
            let mut first = start.to_vec();
            first.extend(bytes);
            let _any = names(&first);
        }
    }
}
