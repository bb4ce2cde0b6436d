//! The JSON of each command, on a machine without storage.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics to fail, and runs the command"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use lunbd::engine::journal::Record;
use serde_json::{Value, json};

/// Commands that print no JSON, and the one that runs until it is interrupted.
const OTHERS: [&str; 4] = ["completions", "help", "man", "watch"];

/// On no machine: no SCSI host has the number.
const SOURCE: &str = "scsi:4294967295:0:0:1";

fn lunbd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lunbd"))
        .args(arguments)
        .arg("--json")
        .output()
        .unwrap()
}

/// Each line of both outputs is one object in the envelope.
fn lines(output: &Output) -> Vec<Value> {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8(text).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<Value> = lines.collect();
    for line in &lines {
        assert_eq!(line["v"], 1, "{line}");
        assert!(line["type"].is_string(), "{line}");
    }
    lines
}

fn types(output: &Output) -> Vec<String> {
    let lines = lines(output);
    let types = lines.iter().map(|line| line["type"].as_str().unwrap());
    types.map(str::to_owned).collect()
}

/// A journal of one volume, which no machine has.
fn write_journal(directory: &Path) {
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join("journal.lock"), "").unwrap();
    let spec = json!({
        "sources": [SOURCE], "expect": null, "min_paths": 1, "multipath": "prefer", "nbd": null,
    });
    let record = json!({"volume": "pvc-1", "spec": spec, "intent": null, "outcome": null});
    let record = Record::seal(&serde_json::to_vec(&record).unwrap());
    fs::write(directory.join("pvc-1.json"), record).unwrap();
}

#[test]
fn each_command_prints_objects_with_the_version_and_a_type() {
    let place = tempfile::tempdir().unwrap();
    let (journal, file) = (place.path().join("journal"), place.path().join("v.toml"));
    fs::write(
        &file,
        format!("[[volume]]\nid = \"pvc-2\"\nsource = \"{SOURCE}\"\n"),
    )
    .unwrap();
    write_journal(&journal);
    let [journal, file] = [&journal, &file].map(|path| path.to_str().unwrap());
    let at = ["--journal", journal];
    let calls: &[(&[&str], &[&str])] = &[
        (&["attach", SOURCE], &["error"]),
        (&["attach", "nonsense"], &["error"]),
        (&["resize", SOURCE], &["error"]),
        (&["heal"], &["heal"]),
        (&["list"], &["inventory"]),
        (&["sessions"], &["sessions"]),
        (&["doctor"], &["doctor"]),
        (&["reap", "--dry-run", at[0], at[1]], &["reap"]),
        (&["status", at[0], at[1]], &["status"]),
        (&["journal", "show", at[0], at[1]], &["journal"]),
        (&["recover", at[0], at[1]], &["recovery"]),
        (&["apply", file, "--dry-run", at[0], at[1]], &["plan"]),
        (
            &["apply", file, at[0], at[1]],
            &["plan", "event", "event", "left"],
        ),
        (&["detach", SOURCE, at[0], at[1]], &["detachment"]),
        (
            &["journal", "forget", "pvc-1", at[0], at[1]],
            &["journal_change"],
        ),
        (
            &[
                "discover",
                "127.0.0.1:1",
                "--initiator",
                "iqn.2026-01.example:me",
            ],
            &["error"],
        ),
    ];
    for (call, expected) in calls {
        assert_eq!(types(&lunbd(call)), *expected, "{call:?}");
    }
    // The machine may have a name or none.
    let name = types(&lunbd(&["initiator-name"]));
    assert!(
        ["initiator_name", "error"].contains(&name[0].as_str()),
        "{name:?}"
    );

    let help = String::from_utf8(lunbd(&["--help"]).stdout).unwrap();
    let (_, commands) = help.split_once("\nCommands:\n").unwrap();
    let commands = commands.lines().take_while(|line| !line.is_empty());
    let commands = commands.filter_map(|line| line.strip_prefix("  "));
    let names = commands.filter(|line| !line.starts_with(' '));
    for name in names.filter_map(|line| line.split_whitespace().next()) {
        let called = calls.iter().any(|(call, _)| call[0] == name);
        let is_known = called || name == "initiator-name" || OTHERS.contains(&name);
        assert!(is_known, "no call of {name}");
    }
}

#[test]
fn lines_of_the_log_are_in_the_envelope() {
    let lines = lines(&lunbd(&["list", "-v"]));
    let logs = lines.iter().filter(|line| line["type"] == "log");
    let messages: Vec<&Value> = logs.map(|line| &line["fields"]["message"]).collect();
    assert!(messages.contains(&&json!("listening")), "{lines:?}");
}

#[test]
fn a_failure_to_print_is_an_error_in_the_envelope() {
    // Each write to this device fails as on a full disk.
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_lunbd"))
        .args(["list", "--json"])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let lines = lines(&output);
    assert_eq!(lines[0]["type"], "error");
    assert_eq!(lines[0]["kind"], "io");
}
