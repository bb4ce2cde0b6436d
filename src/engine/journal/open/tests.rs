//! Files of a journal that the process may not read or rename.

use std::os::unix::fs::PermissionsExt as _;

use nix::unistd::{Uid, setfsuid};

use super::*;
use crate::engine::AttachRequest;
use crate::engine::journal::spec::VolumeSpec;
use crate::id::Source;

/// A journal's directory with a lock that any user may open, and the file of one record.
struct Directory {
    root: tempfile::TempDir,
    record: PathBuf,
}

impl Directory {
    fn with(bytes: &[u8]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let directory = Self {
            record: root.path().join("pvc-1.json"),
            root,
        };
        let lock = directory.root.path().join(LOCK);
        fs::write(&lock, "").unwrap();
        fs::write(&directory.record, bytes).unwrap();
        set_mode(&lock, 0o666);
        directory
    }

    /// Opens or reads the journal as a user who owns nothing in it.
    fn as_another(&self, problems: fn(&Path) -> Vec<Problem>) -> Vec<Problem> {
        as_another_user(|| problems(self.root.path()))
    }

    fn open_as_another(&self) -> Vec<Problem> {
        self.as_another(|directory| open(directory).unwrap().problems)
    }
}

fn as_another_user<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let act = || {
        // Only this thread becomes another user.
        setfsuid(Uid::from_raw(65_534));
        act()
    };
    std::thread::scope(|scope| scope.spawn(act).join().unwrap())
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn record() -> Record {
    let source: Source = "scsi:1:0:0:1".parse().unwrap();
    Record {
        volume: "pvc-1".parse().unwrap(),
        spec: VolumeSpec::of(&AttachRequest::new(source)),
        intent: None,
        outcome: None,
        boot: None,
        detached: None,
    }
}

#[test]
fn a_record_that_cannot_be_read_stays_in_its_place_and_a_later_start_reads_it() {
    let directory = Directory::with(&record().to_bytes().unwrap());
    set_mode(directory.root.path(), 0o777);
    set_mode(&directory.record, 0);
    let problems = directory.open_as_another();
    let [problem] = &*problems else {
        panic!("{problems:?}");
    };
    assert_eq!(problem.kind, FaultKind::Unreadable);
    assert_eq!(problem.file, directory.record);
    set_mode(&directory.record, 0o600);
    let found = open(directory.root.path()).unwrap();
    assert!(found.problems.is_empty(), "{:?}", found.problems);
    assert_eq!(found.records.into_values().collect::<Vec<_>>(), [record()]);
}

#[test]
fn a_view_by_a_user_who_may_only_list_the_directory_names_each_record_as_a_problem() {
    let directory = Directory::with(&record().to_bytes().unwrap());
    set_mode(directory.root.path(), 0o744);
    let problems = directory.as_another(|directory| read_view(directory).unwrap().problems);
    let [problem] = &*problems else {
        panic!("{problems:?}");
    };
    assert_eq!(problem.file, directory.record);
}

#[test]
fn a_user_who_may_not_look_for_the_directory_is_not_shown_an_empty_journal() {
    let root = tempfile::tempdir().unwrap();
    let journal = root.path().join("journal");
    fs::create_dir(&journal).unwrap();
    set_mode(root.path(), 0o700);
    let error = as_another_user(|| read_view(&journal).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
    assert_eq!(error.path(), Some(&*journal));
}

#[test]
fn a_torn_record_that_cannot_be_set_aside_is_reported_in_its_place() {
    let whole = record().to_bytes().unwrap();
    let directory = Directory::with(&whole[..whole.len() - 1]);
    set_mode(directory.root.path(), 0o555);
    let problems = directory.open_as_another();
    let [problem] = &*problems else {
        panic!("{problems:?}");
    };
    assert_eq!(problem.kind, FaultKind::Torn);
    assert_eq!(problem.file, directory.record);
    assert!(problem.text.contains("cannot set aside"), "{problem:?}");
}

#[test]
fn a_directory_of_other_files_is_not_read_as_a_journal() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("pvc-1.json"), "{}").unwrap();
    let error = read_view(directory.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(
        read_view(&directory.path().join("not-there"))
            .unwrap()
            .problems
            .is_empty()
    );
}
