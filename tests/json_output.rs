//! The JSON of each command, compared with the schema, on a machine without storage.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics to fail, and runs the command"
)]

mod iscsi_target;
mod json_schema;
mod nbd_server;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use lunbd::engine::journal::Record;
use nbd_server::{Server, Step, bytes};
use serde_json::{Value, json};

/// Commands that print no JSON, and the one that runs until it is interrupted.
const OTHERS: [&str; 5] = ["completions", "help", "man", "schema", "watch"];

/// On no machine: no SCSI host has the number.
const SOURCE: &str = "scsi:4294967295:0:0:1";

fn lunbd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lunbd"))
        .args(arguments)
        .arg("--json")
        .output()
        .unwrap()
}

/// The lines of both outputs; each is an object that the schema allows.
fn lines(output: &Output) -> Vec<Value> {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8(text).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<Value> = lines.collect();
    for line in &lines {
        json_schema::require(line);
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
fn what_a_portal_and_a_server_list_is_as_the_schema_says() {
    let target = iscsi_target::Target::one(|talk| {
        talk.until_question()?;
        let list = b"TargetName=iqn.2026-01.example:t\0TargetAddress=10.0.0.1:3260,1\0\
                     TargetName=not a name\0";
        talk.text(iscsi_target::FINAL, iscsi_target::NO_TAG, list)?;
        talk.answer_logout()
    });
    let portal = target.portal().to_string();
    let found = lunbd(&["discover", &portal, "--initiator", "iqn.2026-01.example:me"]);
    let found = lines(&found);
    assert_eq!(found[0]["type"], "targets", "{found:?}");
    assert_eq!(found[0]["targets"][0]["portals"][0]["group"], 1);
    assert_eq!(found[0]["skipped"][0]["value"], "not a name");
    target.finish();

    let entry = |name| {
        let listed = bytes::listed(name, "");
        Step::Send(bytes::reply(bytes::OPT_LIST, bytes::REP_SERVER, &listed))
    };
    let server = Server::tcp(vec![
        Step::Send(bytes::greeting()),
        Step::Expect(bytes::client_flags(3)),
        Step::ExpectOption(bytes::OPT_LIST),
        entry("a"),
        entry("b"),
        Step::Send(bytes::reply(bytes::OPT_LIST, bytes::REP_ACK, b"")),
        Step::ExpectOption(bytes::OPT_INFO),
        Step::Send(bytes::described(bytes::OPT_INFO, 1 << 30, 1)),
        Step::ExpectOption(bytes::OPT_INFO),
        Step::Send(bytes::reply(
            bytes::OPT_INFO,
            bytes::ERR_POLICY,
            b"not yours",
        )),
        Step::ExpectOption(bytes::OPT_ABORT),
        Step::ExpectClose,
    ]);
    let found = lunbd(&["discover", &format!("nbd://{}", server.uri("").server())]);
    let found = lines(&found);
    assert_eq!(found[0]["type"], "exports", "{found:?}");
    assert_eq!(found[0]["exports"][0]["export"]["size"], 1 << 30);
    assert_eq!(found[0]["exports"][1]["error"]["kind"], "not_permitted");
    server.finish();
}

#[test]
fn a_record_with_all_of_its_fields_is_as_the_schema_says() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    fs::write(directory.join("journal.lock"), "").unwrap();
    fs::write(directory.join("pvc-3.json"), "lunbd-journal 1 sha2").unwrap();
    let log_in = json!({
        "initiator": "iqn.2026-01.example:me", "credentials": {"file": "/etc/lunbd/chap"},
        "header_digest": true, "data_digest": false, "requires_digests": true,
        "recovery_timeout_ms": 1500, "tune": {"nop_interval": 5}, "interface": "eth0",
        "source_address": "10.0.0.9",
    });
    let nbd = json!({
        "backend": "k", "index": "7", "connections": 2, "read_only": true, "block_size": 4096,
        "expect": "fs.01010101-0101-0101-0101-010101010101",
        "io_timeout_ms": 30_000, "dead_connection_timeout_ms": 120_000,
    });
    let certificate = json!({"subject": "CN=x", "valid_until": "2026-11-25T09:13:00Z"});
    let record = |volume: &str, source: &str, nbd: &Value, log_in: &Value| {
        json!({
            "volume": volume,
            "spec": {
                "sources": [source], "expect": null, "min_paths": 1, "multipath": "prefer",
                "nbd": nbd, "log_in": log_in,
            },
            "intent": {
                "operation": {"detach": {"abandon_unwritten": true}},
                "begun_at": "2026-11-25T09:13:00Z",
            },
            "outcome": {
                "node": "/dev/nbd7", "devno": "43:112", "diskseq": "9", "size": 512,
                "names": ["naa.5000c500a1b2c3d4"], "map": "mpatha", "nbd_index": "7",
                "content": ["fs.01010101-0101-0101-0101-010101010101"],
                "tls": {
                    "version": "1.3", "cipher": "chacha20-poly1305", "certificate": certificate,
                },
                "at": "2026-11-25T09:13:00Z",
            },
            "boot": "b",
        })
    };
    let iscsi = "iscsi://10.0.0.1/iqn.2026-01.example:t/1";
    let mut detached = record("pvc-1", iscsi, &Value::Null, &log_in);
    detached["intent"] = Value::Null;
    detached["detached"] = json!({
        "safe_to_unmap": false, "at": "2026-11-25T09:13:00Z",
        "not_looked_at": [{"place": "unreadable_processes", "count": 3}],
    });
    let attached = record("pvc-2", "nbd://192.0.2.1/x", &nbd, &Value::Null);
    for record in [detached, attached] {
        let name = format!("{}.json", record["volume"].as_str().unwrap());
        let bytes = Record::seal(&serde_json::to_vec(&record).unwrap());
        fs::write(directory.join(name), bytes).unwrap();
    }
    let at = ["--journal", directory.to_str().unwrap()];
    let shown = lines(&lunbd(&["journal", "show", at[0], at[1]]));
    let spec = |of: &str| shown[0][of][0]["spec"].clone();
    assert_eq!(spec("records")["nbd"]["io_timeout_seconds"], 30.0);
    assert_eq!(spec("detached")["log_in"]["recovery_timeout_seconds"], 1.5);
    let status = lines(&lunbd(&["status", at[0], at[1]]));
    let nbd = &status[0]["volumes"][0]["spec"]["nbd"];
    assert_eq!(nbd["dead_connection_timeout_seconds"], 120.0);
    for volume in ["pvc-1", "pvc-2"] {
        let forgotten = lines(&lunbd(&["journal", "forget", volume, at[0], at[1]]));
        assert_eq!(forgotten[0]["forgotten"]["volume"], volume);
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
fn the_printed_schema_allows_a_valid_line_and_refuses_an_invalid_one() {
    let output = Command::new(env!("CARGO_BIN_EXE_lunbd"))
        .arg("schema")
        .output()
        .unwrap();
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let kept: Value = serde_json::from_str(include_str!("../docs/lunbd.schema.json")).unwrap();
    assert_eq!(printed, kept);

    let good = json!({"v": 1, "type": "initiator_name", "initiator": "iqn.x", "created": false});
    json_schema::compare(&good).unwrap();
    for (field, value) in [
        ("v", json!(2)),
        ("type", json!("name")),
        ("initiator", json!(7)),
        ("created", Value::Null),
        ("more", json!(1)),
    ] {
        let mut bad = good.clone();
        bad[field] = value;
        assert!(json_schema::compare(&bad).is_err(), "{bad}");
    }
    let bad = json!({"v": 1, "type": "initiator_name", "created": false});
    assert!(json_schema::compare(&bad).is_err());
    let mut uevent = json!({
        "v": 1, "type": "uevent", "seconds": 0.5, "origin": "udev", "action": "add", "seqnum": 1,
        "subsystem": "block", "devtype": null, "devpath": "/x", "links": ["/dev/x"],
        "sdev_ua": "luns_changed",
    });
    json_schema::compare(&uevent).unwrap();
    uevent["sdev_ua"] = json!({"other": "x"});
    json_schema::compare(&uevent).unwrap();
    for bad in [json!("unheard_of"), json!({"other": 7})] {
        uevent["sdev_ua"] = bad;
        assert!(json_schema::compare(&uevent).is_err(), "{uevent}");
    }
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
