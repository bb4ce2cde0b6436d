use std::fs::File;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;

use tempfile::TempDir;

use super::*;

const LIMIT: Duration = Duration::from_secs(20);
/// Longer than the rest that follows a change.
const NOTHING: Duration = Duration::from_millis(600);

/// The file's content at each change that the watch reported.
struct Followed(Receiver<Option<String>>);

impl Followed {
    fn start(path: &Path) -> Self {
        let mut watch = FileWatch::of(path).unwrap();
        let (sender, receiver) = mpsc::channel();
        let path = path.to_owned();
        thread::spawn(move || {
            while watch.wait(Duration::MAX).is_ok() {
                if sender.send(fs::read_to_string(&path).ok()).is_err() {
                    return;
                }
            }
        });
        Self(receiver)
    }

    #[track_caller]
    fn becomes(&self, text: &str) {
        let seen = self.0.recv_timeout(LIMIT).unwrap();
        assert_eq!(seen.as_deref(), Some(text));
        self.stays();
    }

    #[track_caller]
    fn stays(&self) {
        let seen = self.0.recv_timeout(NOTHING);
        assert_eq!(seen, Err(RecvTimeoutError::Timeout));
    }
}

fn directory_with(text: &str) -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("v.toml");
    fs::write(&path, text).unwrap();
    (directory, path)
}

#[test]
fn a_file_that_is_written_in_parts_is_read_once_its_writer_has_closed_it() {
    let (_directory, path) = directory_with("old");
    let followed = Followed::start(&path);
    written_in_parts_is_read_once_closed(&path, &followed);
}

fn written_in_parts_is_read_once_closed(path: &Path, followed: &Followed) {
    let mut file = File::create(path).unwrap();
    file.write_all(b"half").unwrap();
    followed.stays();
    file.write_all(b" whole").unwrap();
    drop(file);
    followed.becomes("half whole");
}

#[test]
fn a_file_that_is_removed_and_copied_anew_is_never_read_in_between() {
    let (_directory, path) = directory_with("old");
    let followed = Followed::start(&path);
    fs::remove_file(&path).unwrap();
    followed.stays();
    let mut file = File::create(&path).unwrap();
    followed.stays();
    file.write_all(b"new").unwrap();
    drop(file);
    followed.becomes("new");
}

#[test]
fn a_file_that_another_takes_the_place_of_is_read() {
    let (directory, path) = directory_with("old");
    let followed = Followed::start(&path);
    let other = directory.path().join("v.toml.new");
    fs::write(&other, "new").unwrap();
    followed.stays();
    fs::rename(&other, &path).unwrap();
    followed.becomes("new");
    fs::write(&other, "linked").unwrap();
    fs::remove_file(&path).unwrap();
    fs::hard_link(&other, &path).unwrap();
    followed.becomes("linked");
}

#[test]
fn several_changes_that_follow_one_another_are_one() {
    let (_directory, path) = directory_with("old");
    let mut watch = FileWatch::of(&path).unwrap();
    let begun = Instant::now();
    for text in ["one", "two", "three"] {
        fs::write(&path, text).unwrap();
    }
    assert!(watch.wait(LIMIT).unwrap());
    assert!(begun.elapsed() >= REST, "another could follow");
    assert!(!watch.wait(NOTHING).unwrap());
}

#[test]
fn a_second_writer_that_is_slow_is_waited_for() {
    let (_directory, path) = directory_with("old");
    let followed = Followed::start(&path);
    fs::write(&path, "").unwrap();
    written_in_parts_is_read_once_closed(&path, &followed);
}

#[test]
fn a_file_that_is_written_by_way_of_another_directory_is_read() {
    let (directory, path) = directory_with("old");
    fs::create_dir(directory.path().join("elsewhere")).unwrap();
    let other = directory.path().join("elsewhere/name");
    fs::hard_link(&path, &other).unwrap();
    let followed = Followed::start(&path);
    fs::write(&other, "new").unwrap();
    followed.becomes("new");
}

#[test]
fn a_change_is_seen_behind_any_number_of_events_of_other_files() {
    let (directory, path) = directory_with("old");
    let mut watch = FileWatch::of(&path).unwrap();
    // One read of the kernel's queue returns far fewer events.
    for number in 0..500 {
        fs::write(directory.path().join(format!("other-{number}")), "").unwrap();
    }
    assert!(!watch.has_changed().unwrap());
    for number in 0..500 {
        fs::write(directory.path().join(format!("another-{number}")), "").unwrap();
    }
    let mut file = File::create(&path).unwrap();
    file.write_all(b"half").unwrap();
    assert!(watch.has_changed().unwrap());
}

#[test]
fn a_wait_ends_after_its_time_without_a_change() {
    let (_directory, path) = directory_with("old");
    let mut watch = FileWatch::of(&path).unwrap();
    assert!(!watch.wait(Duration::from_millis(50)).unwrap());
    assert!(!watch.has_changed().unwrap());
    fs::write(&path, "new").unwrap();
    assert!(watch.has_changed().unwrap());
    assert!(watch.wait(LIMIT).unwrap());
}

#[test]
fn a_link_is_followed_to_its_file_and_to_the_next_file() {
    let (directory, path) = directory_with("old");
    let link = directory.path().join("link.toml");
    symlink("v.toml", &link).unwrap();
    let followed = Followed::start(&link);
    fs::write(&path, "written").unwrap();
    followed.becomes("written");
    fs::write(directory.path().join("other"), "other").unwrap();
    followed.stays();
    symlink("other", directory.path().join("new")).unwrap();
    fs::rename(directory.path().join("new"), &link).unwrap();
    followed.becomes("other");
    fs::write(directory.path().join("other"), "again").unwrap();
    followed.becomes("again");
    fs::write(directory.path().join("new"), "replaced").unwrap();
    fs::rename(directory.path().join("new"), directory.path().join("other")).unwrap();
    followed.becomes("replaced");
}

#[test]
fn a_directory_behind_a_link_is_followed_to_the_next_as_in_a_config_map() {
    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name);
    for (version, text) in [("..1", "one"), ("..2", "two")] {
        fs::create_dir(at(version)).unwrap();
        fs::write(at(version).join("v.toml"), text).unwrap();
    }
    symlink("..1", at("..data")).unwrap();
    symlink("..data/v.toml", at("v.toml")).unwrap();
    let followed = Followed::start(&at("v.toml"));
    symlink("..2", at("..data_tmp")).unwrap();
    fs::rename(at("..data_tmp"), at("..data")).unwrap();
    followed.becomes("two");
    fs::remove_dir_all(at("..1")).unwrap();
    followed.stays();
    fs::write(at("..2").join("v.toml"), "three").unwrap();
    followed.becomes("three");
}

#[test]
fn a_directory_that_is_replaced_or_made_anew_is_followed() {
    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("etc")).unwrap();
    fs::write(at("etc/v.toml"), "old").unwrap();
    let followed = Followed::start(&at("etc/v.toml"));
    fs::create_dir(at("etc.new")).unwrap();
    fs::write(at("etc.new/v.toml"), "new").unwrap();
    fs::rename(at("etc"), at("etc.old")).unwrap();
    fs::rename(at("etc.new"), at("etc")).unwrap();
    followed.becomes("new");
    fs::write(at("etc/v.toml"), "written").unwrap();
    followed.becomes("written");
    fs::write(at("etc.old/v.toml"), "the old one").unwrap();
    followed.stays();
    fs::remove_dir_all(at("etc")).unwrap();
    fs::create_dir(at("etc")).unwrap();
    fs::write(at("etc/v.toml"), "anew").unwrap();
    followed.becomes("anew");
}

#[test]
fn a_path_without_a_file_name_is_refused() {
    let error = FileWatch::of(Path::new("/")).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}
