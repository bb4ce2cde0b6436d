//! The names that udev recorded for a device's content. Its `blkid` reads the device when
//! it is connected, and again whenever a process that had it open for writing closes it
//! (systemd, `rules.d/60-block.rules`, `OPTIONS+="watch"`).

use std::collections::BTreeMap;

use crate::id::ContentName;

/// The names in the properties of udev's record, sorted. It returns only the formats that
/// [`content`](super) knows, because both are compared with one another.
pub(in crate::nbd) fn names(properties: &BTreeMap<String, String>) -> Vec<ContentName> {
    let value = |key: &str| properties.get(key).map(String::as_str);
    let table = value("ID_PART_TABLE_UUID").unwrap_or_default();
    let table = match value("ID_PART_TABLE_TYPE") {
        Some("gpt") => format!("gpt.{table}"),
        Some("dos") => format!("mbr.{table}"),
        _ => String::new(),
    };
    let uuid = value("ID_FS_UUID").unwrap_or_default();
    let content = match value("ID_FS_TYPE") {
        Some("crypto_LUKS") => format!("luks.{uuid}"),
        Some("LVM2_member") => format!("lvm.{uuid}"),
        Some("ext2" | "ext3" | "ext4" | "xfs" | "btrfs") => format!("fs.{uuid}"),
        _ => String::new(),
    };
    let device = match (value("ID_FS_TYPE"), value("ID_FS_UUID_SUB")) {
        (Some("btrfs"), Some(uuid)) => format!("btrfs.{uuid}"),
        _ => String::new(),
    };
    let names = [table, content, device].into_iter();
    let mut names: Vec<ContentName> = names.filter_map(|name| name.parse().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udevs_properties_have_the_names_that_the_first_bytes_have_and_no_others() {
        let uuid = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9";
        let lvm = "AbcDef-0123-4567-89Ab-cdEF-ghIJ-klMNop";
        for (kind, uuid, expected) in [
            ("ext4", uuid, format!("fs.{uuid}")),
            ("xfs", uuid, format!("fs.{uuid}")),
            ("crypto_LUKS", uuid, format!("luks.{uuid}")),
            ("LVM2_member", lvm, format!("lvm.{lvm}")),
            ("vfat", "0A1B-2C3D", String::new()),
            ("swap", uuid, String::new()),
        ] {
            let properties = [("ID_FS_TYPE", kind), ("ID_FS_UUID", uuid)];
            let found: Vec<String> = names_of(&properties);
            let expected: Vec<String> = Some(expected)
                .filter(|n| !n.is_empty())
                .into_iter()
                .collect();
            assert_eq!(found, expected, "{kind}");
        }
        for (kind, uuid, expected) in [
            ("gpt", uuid, format!("gpt.{uuid}")),
            ("dos", "1a2b3c4d", "mbr.1a2b3c4d".to_owned()),
        ] {
            let properties = [("ID_PART_TABLE_TYPE", kind), ("ID_PART_TABLE_UUID", uuid)];
            assert_eq!(names_of(&properties), [expected], "{kind}");
        }
        assert!(names_of(&[("ID_PART_TABLE_TYPE", "dos")]).is_empty());
        // udev also has an `ID_FS_UUID_SUB` of other formats, which do not count.
        let device = "1a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9";
        for (kind, expected) in [
            (
                "btrfs",
                vec![format!("fs.{uuid}"), format!("btrfs.{device}")],
            ),
            ("zfs_member", Vec::new()),
        ] {
            let found = names_of(&[
                ("ID_FS_TYPE", kind),
                ("ID_FS_UUID", uuid),
                ("ID_FS_UUID_SUB", device),
            ]);
            assert_eq!(found, expected, "{kind}");
        }
    }

    fn names_of(properties: &[(&str, &str)]) -> Vec<String> {
        let owned = properties.iter();
        let owned = owned.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let names = names(&owned.collect());
        names.iter().map(ToString::to_string).collect()
    }
}
