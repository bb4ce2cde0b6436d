//! The command's changes to a journal, by file and by volume name.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics to fail, and runs the command"
)]

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use lunbd::engine::journal::Record;
use serde_json::{Value, json};
use tempfile::TempDir;

const ASIDE: &str = "pvc-1.json.set-aside-0";

/// A journal with one volume on a host that no machine has.
struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("journal.lock"), "").unwrap();
        let place = Self { directory };
        fs::write(place.file("pvc-1.json"), record("pvc-1")).unwrap();
        place
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn lunbd(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_lunbd"))
            .args(arguments)
            .arg("--journal")
            .arg(self.directory.path())
            .output()
            .unwrap()
    }

    /// Runs a command that must succeed, and returns its JSON.
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.lunbd(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs a command that must fail, and returns its exit code and its kind of error.
    fn error(&self, arguments: &[&str]) -> (Option<i32>, Value) {
        let output = self.lunbd(&[arguments, &["--json"]].concat());
        let error: Value = serde_json::from_slice(&output.stderr).unwrap();
        (output.status.code(), error["kind"].clone())
    }
}

fn record(volume: &str) -> Vec<u8> {
    let record = json!({
        "volume": volume,
        "spec": {
            "sources": ["scsi:4294967295:0:0:1"],
            "expect": null,
            "min_paths": 1,
            "multipath": "prefer",
            "nbd": null,
        },
        "intent": null,
        "outcome": null,
    });
    Record::seal(&serde_json::to_vec(&record).unwrap())
}

#[test]
fn show_prints_each_record_and_each_file_that_is_none_and_changes_nothing() {
    let place = Place::new();
    fs::write(place.file("pvc-2.json"), "lunbd-journal 1 sha2").unwrap();
    let shown = place.json(&["journal", "show"]);
    assert_eq!(shown["records"][0]["volume"], "pvc-1");
    assert_eq!(shown["problems"][0]["kind"], "torn");
    assert!(place.file("pvc-2.json").exists());
    let one = place.json(&["journal", "show", "--volume", "pvc-1"]);
    assert_eq!(one["records"], shown["records"]);
    let none = place.error(&["journal", "show", "--volume", "pvc-3"]);
    assert_eq!(none.0, Some(3));
    let text = String::from_utf8(place.lunbd(&["journal", "show"]).stdout).unwrap();
    assert!(text.starts_with("pvc-1\n  source    scsi:4294967295:0:0:1\n"));
}

#[test]
fn forget_removes_the_record_of_one_volume_or_one_set_aside_file() {
    let place = Place::new();
    fs::write(place.file("pvc-2.json"), record("pvc-2")).unwrap();
    fs::write(place.file(ASIDE), "torn").unwrap();
    let forgotten = place.json(&["journal", "forget", "pvc-1"]);
    assert_eq!(forgotten["forgotten"]["volume"], "pvc-1");
    assert!(!place.file("pvc-1.json").exists() && place.file("pvc-2.json").exists());
    let again = place.error(&["journal", "forget", "pvc-1"]);
    assert_eq!(again, (Some(3), json!("not_found")));
    place.json(&["journal", "forget", ASIDE]);
    assert!(!place.file(ASIDE).exists());
    for other in ["pvc-2.json", "journal.lock", "../pvc-2.json"] {
        let refused = place.error(&["journal", "forget", other]);
        assert!(refused.0.is_some_and(|code| code != 0), "{other}");
    }
    assert!(place.file("pvc-2.json").exists() && place.file("journal.lock").exists());
}

#[test]
fn restore_takes_in_a_set_aside_record_and_nothing_else() {
    let place = Place::new();
    fs::write(place.file(ASIDE), record("pvc-1")).unwrap();
    let occupied = place.error(&["journal", "restore", ASIDE]);
    assert_eq!(occupied, (Some(5), json!("in_use")));
    // The record of another volume has the same source.
    fs::write(place.file(ASIDE), record("pvc-2")).unwrap();
    let owned = place.error(&["journal", "restore", ASIDE]);
    assert_eq!(owned, (Some(5), json!("in_use")));
    assert!(!place.file("pvc-2.json").exists() && place.file(ASIDE).exists());
    fs::write(place.file(ASIDE), record("pvc-1")).unwrap();
    place.json(&["journal", "forget", "pvc-1"]);
    // The file is named by its path, as `show` prints it.
    let path = place.file(ASIDE);
    let restored = place.json(&["journal", "restore", path.to_str().unwrap()]);
    assert_eq!(restored["restored"]["volume"], "pvc-1");
    assert!(!path.exists());
    let shown = place.json(&["journal", "show"]);
    assert_eq!(shown["records"][0]["volume"], "pvc-1");
    assert_eq!(shown["problems"], json!([]));

    fs::write(&path, "lunbd-journal 1 sha2").unwrap();
    let torn = place.error(&["journal", "restore", ASIDE]);
    assert_eq!(torn, (Some(2), json!("invalid_input")));
    assert!(path.exists(), "what is no record stays where it is");
}

#[test]
fn status_has_an_exit_code_of_its_own_for_a_volume_that_is_not_as_wanted() {
    let place = Place::new();
    fs::write(place.file("pvc-2.json"), record("pvc-2")).unwrap();
    let output = place.lunbd(&["status", "--volume", "pvc-1", "--json"]);
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["volumes"].as_array().unwrap().len(), 1);
    assert_eq!(found["volumes"][0]["volume"], "pvc-1");
    let unknown = place.error(&["status", "--volume", "pvc-3"]);
    assert_eq!(unknown, (Some(3), json!("not_found")));
}

#[test]
fn the_status_of_one_volume_has_the_files_that_were_set_aside_from_it_alone() {
    let place = Place::new();
    fs::write(place.file("pvc-10.json.set-aside-0"), "torn").unwrap();
    let problems = |volume: &str| {
        let output = place.lunbd(&["status", "--volume", volume, "--json"]);
        assert_eq!(output.status.code(), Some(9), "{output:?}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        found["problems"].as_array().unwrap().len()
    };
    assert_eq!(problems("pvc-1"), 0);
    fs::write(place.file(ASIDE), "torn").unwrap();
    assert_eq!(problems("pvc-1"), 1);
    // It has no record, and its set-aside file may be one.
    assert_eq!(problems("pvc-10"), 1);
}

#[test]
fn heal_and_resize_know_a_volume_by_its_name() {
    let place = Place::new();
    for command in ["heal", "resize"] {
        let unknown = place.error(&[command, "--volume", "pvc-3"]);
        assert_eq!(unknown, (Some(3), json!("not_found")), "{command}");
        let output = place.lunbd(&[command, "--volume", "pvc-1"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("scsi:4294967295"), "{command}: {said}");
    }
}

#[test]
fn a_target_that_the_journal_has_is_detached_by_it_and_a_second_detach_answers_as_the_first() {
    const SOURCE: &str = "scsi:4294967295:0:0:1";
    let place = Place::new();
    let output = place.lunbd(&["detach", SOURCE]);
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("is volume pvc-1 of the journal"), "{said}");
    let shown = place.json(&["journal", "show"]);
    assert_eq!(shown["records"], json!([]));
    let at = &shown["detached"][0]["detached"]["at"];
    assert!(at.is_string(), "{shown}");
    let by_volume = ["detach", "--volume", "pvc-1"];
    for again in [&["detach", SOURCE][..], &by_volume] {
        let again = place.json(again);
        assert_eq!(again["changed"], false);
        assert_eq!(again["volume"], "pvc-1");
        assert_eq!(&again["detached_at"], at);
    }
    // The command reports again what the first detach has proven.
    for safe in [false, true] {
        change(&place, "pvc-1.json", |record| {
            record["detached"]["safe_to_unmap"] = json!(safe);
        });
        assert_eq!(place.json(&by_volume)["safe_to_unmap"], safe);
    }
    let words = String::from_utf8(place.lunbd(&by_volume).stdout).unwrap();
    assert!(words.contains("was detached already, at "), "{words}");
    assert!(words.contains("safe      to unmap: yes"), "{words}");
    place.json(&["journal", "forget", "pvc-1"]);
    assert_eq!(place.error(&by_volume), (Some(3), json!("not_found")));
}

#[test]
fn a_source_with_one_portal_of_a_volume_is_that_volume() {
    let place = Place::new();
    let source = |portals: &str| format!("iscsi://{portals}/iqn.2003-01.org.lunbd:array/1");
    change(&place, "pvc-1.json", |record| {
        record["spec"]["sources"] = json!([source("192.0.2.1,192.0.2.2")]);
    });
    let detached = |portals: &str| place.json(&["detach", &source(portals)])["volume"].clone();
    assert_eq!(detached("192.0.2.3"), Value::Null);
    assert_eq!(detached("192.0.2.3,192.0.2.2"), "pvc-1");
    assert_eq!(place.json(&["journal", "show"])["records"], json!([]));
}

#[test]
fn a_target_of_a_journal_that_another_process_has_is_left_to_that_process() {
    let place = Place::new();
    let lock = fs::File::open(place.file("journal.lock")).unwrap();
    lock.lock().unwrap();
    let output = place.lunbd(&["detach", "scsi:4294967295:0:0:1"]);
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("is volume pvc-1"), "{said}");
    assert_eq!(
        place.json(&["journal", "show"])["records"][0]["volume"],
        "pvc-1"
    );
}

/// Rewrites the record of a volume.
fn change(place: &Place, name: &str, change: impl FnOnce(&mut Value)) {
    let record = Record::parse(&fs::read(place.file(name)).unwrap()).unwrap();
    let mut record = serde_json::to_value(&record).unwrap();
    change(&mut record);
    let record: Record = serde_json::from_value(record).unwrap();
    fs::write(place.file(name), record.to_bytes().unwrap()).unwrap();
}

#[test]
fn of_two_detached_volumes_of_a_source_the_one_that_was_detached_last_answers() {
    let place = Place::new();
    fs::write(place.file("pvc-2.json"), record("pvc-2")).unwrap();
    // The clock was set back between the two detaches.
    for (name, safe, at, sequence) in [
        ("pvc-1.json", true, "2026-11-21T04:00:00Z", 1),
        ("pvc-2.json", false, "2026-11-21T03:00:00Z", 2),
    ] {
        change(&place, name, |record| {
            record["detached"] = json!({ "safe_to_unmap": safe, "at": at, "sequence": sequence });
        });
    }
    let again = place.json(&["detach", "scsi:4294967295:0:0:1"]);
    assert_eq!(again["volume"], "pvc-2");
    assert_eq!(again["safe_to_unmap"], false);
}

#[test]
fn a_target_is_not_detached_while_a_file_of_the_journal_may_be_its_record() {
    let detach = ["detach", "scsi:4294967295:0:0:9"];
    for (bytes, refused) in [
        ("lunbd-journal 9 crc32:0\n{}", (8, "not_supported")),
        ("lunbd-journal 2 sha2", (1, "not_ready")),
        ("{}", (1, "not_ready")),
    ] {
        let place = Place::new();
        let file = place.file("pvc-2.json");
        fs::write(&file, bytes).unwrap();
        let (code, kind) = refused;
        assert_eq!(place.error(&detach), (Some(code), json!(kind)), "{bytes}");
        assert_eq!(fs::read_to_string(&file).unwrap(), bytes);
    }
    // A file that was set aside is no longer a record.
    let place = Place::new();
    fs::write(place.file(ASIDE), "torn").unwrap();
    assert_eq!(place.json(&detach)["changed"], false);
}
