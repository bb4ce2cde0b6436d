//! The files of a journal: their names, and how each is replaced or removed atomically.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::crash::crash_point;
use crate::engine::journal::format::digest;
use crate::error::{Error, Result};
use crate::id::VolumeId;

/// The ending of a record's name.
pub(super) const RECORD: &str = ".json";

/// A further ending of a record's name while it is being written.
pub(super) const BEING_WRITTEN: &str = ".new";

/// The ending of the name of a file that was set aside; a number follows it.
pub(super) const SET_ASIDE: &str = ".set-aside-";

/// The characters that are not encoded in a file's name.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// The name of a volume's file. Letters, digits, `-`, `_` and `.` stay and other bytes
/// are percent-encoded, so that no id leads out of the directory and no two ids share a
/// file. A long name keeps its beginning and the SHA-256 of the whole, after a `~`, which
/// no encoded text contains.
pub(super) fn name_of(volume: &VolumeId) -> String {
    /// A file's name has at most 255 bytes, including the endings.
    const LONGEST: usize = 160;
    const BEGINNING: usize = 80;
    let mut name = utf8_percent_encode(volume.as_str(), PLAIN).to_string();
    if name.starts_with('.') {
        name.replace_range(..1, "%2E");
    }
    if name.len() > LONGEST {
        // The text is pure ASCII, so every index is a character boundary.
        name.truncate(BEGINNING);
        name = format!("{name}~{}", digest(volume.as_str().as_bytes()));
    }
    name + RECORD
}

/// Replaces the file `name` by `bytes`, whole or not at all even where the machine stops:
/// it writes another file beside it, syncs that to the disk, and renames it. Only a
/// [`sync`] makes the rename survive a stop. **Blocks** for as long as the file system
/// does.
pub(super) fn replace(directory: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let path = directory.join(name);
    let beside = directory.join(format!("{name}{BEING_WRITTEN}"));
    let write = || {
        crash_point!(JournalToWrite);
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&beside)?;
        crash_point!(JournalCreated);
        file.write_all(bytes)?;
        crash_point!(JournalWritten);
        file.sync_all()?;
        crash_point!(JournalSynced);
        fs::rename(&beside, &path)
    };
    write().map_err(|error| {
        // The incomplete file has no use, and the disk may be full.
        let _ = fs::remove_file(&beside);
        Error::io("cannot write the intent", &path, &error)
    })?;
    crash_point!(JournalRenamed);
    Ok(())
}

/// Removes the file `name`. Only a [`sync`] makes the removal survive a stop of the
/// machine. **Blocks** for as long as the file system does.
pub(super) fn remove(directory: &Path, name: &str) -> Result<()> {
    let path = directory.join(name);
    crash_point!(JournalToRemove);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Error::io("cannot remove the record", &path, &error));
        }
        _ => {}
    }
    crash_point!(JournalRemoved);
    Ok(())
}

/// Renames a file that is no record, to the first free name.
pub(super) fn set_aside(path: &Path) -> Result<PathBuf> {
    let mut number = 0_u64;
    loop {
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!("{SET_ASIDE}{number}"));
        let aside = PathBuf::from(aside);
        if fs::symlink_metadata(&aside).is_err() {
            crash_point!(JournalToSetAside);
            fs::rename(path, &aside)
                .map_err(|error| Error::io("cannot set aside", path, &error))?;
            crash_point!(JournalSetAside);
            return Ok(aside);
        }
        number += 1;
    }
}

/// Syncs a directory's names to the disk.
pub(super) fn sync(directory: &Path) -> Result<()> {
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| Error::io("cannot write back", directory, &error))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn name(id: &str) -> String {
        name_of(&id.parse().unwrap())
    }

    #[test]
    fn an_id_is_its_files_name_where_it_can_be_and_never_a_way_out() {
        assert_eq!(name("pvc-1_a.B"), "pvc-1_a.B.json");
        assert_eq!(name(".."), "%2E..json");
        assert_eq!(name("../../etc/passwd"), "%2E.%2F..%2Fetc%2Fpasswd.json");
        assert_eq!(name("/dev/sda"), "%2Fdev%2Fsda.json");
        assert_eq!(name("50% \u{e9}"), "50%25%20%C3%A9.json");
    }

    #[test]
    fn ids_that_look_alike_have_files_of_their_own() {
        let long = "x".repeat(252);
        let ids = [
            "a",
            "A",
            ".",
            "..",
            "%2E",
            "%2E.",
            "a/b",
            "a%2Fb",
            "a.json",
            "a.json.new",
            "a.set-aside-0",
            "journal.lock",
            &"naa.5000c500a1b2c3d4".repeat(4)[..68],
            &format!("{long}1"),
            &format!("{long}2"),
            &"\u{1f980}".repeat(63),
            &format!("{}~{}", "x".repeat(80), digest(long.as_bytes())),
        ];
        let names: BTreeSet<String> = ids.iter().map(|id| name(id)).collect();
        assert_eq!(names.len(), ids.len());
    }

    proptest! {
        #[test]
        fn every_id_has_a_name_that_is_one_file_in_the_directory(
            one in "\\PC{1,60}", two in "\\PC{1,60}"
        ) {
            let (Ok(one), Ok(two)) = (one.parse::<VolumeId>(), two.parse::<VolumeId>()) else {
                return Ok(());
            };
            for name in [name_of(&one), name_of(&two)] {
                prop_assert!(name.len() <= 200 && !name.starts_with('.') && !name.contains('/'));
                prop_assert!(name.ends_with(RECORD) && name.is_ascii());
            }
            prop_assert_eq!(name_of(&one) == name_of(&two), one == two);
        }
    }
}
