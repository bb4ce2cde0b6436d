//! The journal on a machine that is a directory: what it refuses, what it sets aside, and what
//! it never trusts.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test panics to fail, prints what it counted, and needs a second process"
)]

mod broken_files;
#[path = "../machine/mod.rs"]
mod machine;
mod names;
mod node;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use lunbd::engine::journal::{Operation, Record};
use lunbd::engine::{Action, Condition, DetachVolume, NbdOptions};
use lunbd::error::Stage;
use lunbd::iscsi::{Credentials, Secret, SessionOptions};
use lunbd::{Engine, ErrorKind, Roots};
use machine::Machine;
use node::{ATTACHED, NAME, Node, OTHER_NAME, attached, begun, id, scsi, sealed, soon};
use serde_json::{Value, json};
#[test]
fn a_record_reads_back_as_it_was_written_and_is_readable() {
    let bytes = sealed(&attached("pvc-1", ATTACHED, NAME));
    let record = Record::parse(&bytes).unwrap();
    assert_eq!(record.volume, id("pvc-1"));
    assert_eq!(record.outcome.as_ref().unwrap().names[0].to_string(), NAME);
    assert_eq!(Record::parse(&record.to_bytes().unwrap()), Ok(record));
    let begun = begun(
        "v",
        ATTACHED,
        &json!({ "detach": { "abandon_unwritten": true } }),
    );
    let intent = Record::parse(&sealed(&begun)).unwrap().intent.unwrap();
    let abandon_unwritten = true;
    assert_eq!(intent.operation, Operation::Detach { abandon_unwritten });
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.starts_with("lunbd-journal 2 sha256:") && text.contains("\n  \"volume\""));
}

#[test]
fn a_directory_that_holds_something_else_is_refused_and_left_as_it_is() {
    let machine = Machine::new();
    machine.write("etc/passwd.json", "{}");
    let engine = Engine::start(machine.roots()).unwrap();
    let error = engine
        .open_journal_at(&machine.path("etc"), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert_eq!(machine.read("etc/passwd.json"), "{}");
    assert!(!machine.path("etc/journal.lock").exists());
}

#[test]
fn a_login_with_a_secret_itself_is_refused_before_anything_is_written_or_done() {
    let node = Node::new();
    let journal = node.open();
    let known = Credentials::new("joe", Secret::new("hush-hush").unwrap()).unwrap();
    let options = SessionOptions::new("iqn.2026-01.example:host".parse().unwrap());
    let request = scsi("iscsi://127.0.0.1/iqn.2003-01.org.lunbd:array/1");
    let error = node.attach(
        &journal,
        "pvc-1",
        &request.log_in(options.credentials(known)),
    );
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert_eq!(error.stage(), Some(Stage::Journal), "{error}");
    assert_eq!(journal.records(), []);
    assert!(node.is_untouched());
}

const PLACE: &str = "LUNBD_TEST_HOLDS_JOURNAL";

/// The other process of the next test.
#[test]
fn holds_the_journal_for_the_next_test() {
    let Some(place) = std::env::var_os(PLACE) else {
        return;
    };
    let engine = Engine::start(Roots::below(Path::new(&place))).unwrap();
    let _journal = engine.open_journal(soon()).unwrap();
    writeln!(std::io::stdout(), "\nholds it").unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_second_process_learns_the_holder_of_the_journal_until_that_dies() {
    let node = Node::with(&[attached("pvc-1", ATTACHED, NAME)]);
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "holds_the_journal_for_the_next_test",
            "--nocapture",
        ])
        .env(PLACE, node.machine.path(""))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(other.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "holds it"));
    let error = node.engine.open_journal(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert_eq!(error.stage(), Some(Stage::Journal));
    let holder = format!("held by process {}", other.id());
    assert_eq!(error.last_seen(), Some(&*holder));
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(node.open().records().len(), 1);
}

#[test]
fn two_volumes_on_one_device_are_refused_with_both_names_before_anything_is_done() {
    let nbd = |backend: &str| {
        let mut record = attached("nbd", "nbd://192.0.2.1/a", NAME);
        record["outcome"] = Value::Null;
        record["spec"]["nbd"] = json!({
            "backend": backend, "index": null, "connections": 1, "read_only": false,
            "io_timeout_ms": 30_000, "dead_connection_timeout_ms": 300_000,
        });
        record
    };
    let node = Node::with(&[attached("first", ATTACHED, NAME), nbd("shared")]);
    node.machine.write("proc/sys/kernel/osrelease", "6.1.0\n");
    let journal = node.open();
    let before = journal.records();
    assert_eq!(before.len(), 2);
    let with_backend = NbdOptions::default().backend("shared".parse().unwrap());
    for (owner, request) in [
        ("first", scsi(ATTACHED)),
        (
            "first",
            scsi("scsi:0:0:0:9").path(ATTACHED.parse::<lunbd::Source>().unwrap()),
        ),
        ("first", scsi("scsi:0:0:0:9").expect(NAME.parse().unwrap())),
        ("nbd", scsi("nbd://192.0.2.1/a").nbd(NbdOptions::default())),
        ("nbd", scsi("nbd://192.0.2.2/b").nbd(with_backend)),
    ] {
        let error = node.attach(&journal, "second", &request);
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        assert_eq!(error.stage(), Some(Stage::Journal), "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!("volume {owner},")), "{text}");
        assert!(text.contains("volume second "), "{text}");
    }
    assert!(node.is_untouched());
    assert_eq!(journal.records(), before);
    assert_eq!(node.files(), ["first.json", "nbd.json"]);
}

#[test]
fn one_volume_from_two_sources_or_as_two_units_is_refused_with_both() {
    let node = Node::with(&[attached("pvc-1", ATTACHED, NAME)]);
    let journal = node.open();
    let error = node.attach(&journal, "pvc-1", &scsi("scsi:0:0:0:2"));
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let text = error.to_string();
    assert!(
        text.contains(ATTACHED) && text.contains("scsi:0:0:0:2"),
        "{text}"
    );

    let request = scsi(ATTACHED).expect(OTHER_NAME.parse().unwrap());
    let error = node.attach(&journal, "pvc-1", &request);
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    let text = error.to_string();
    assert!(text.contains(NAME) && text.contains(OTHER_NAME), "{text}");
    assert!(node.is_untouched());
}

#[test]
fn an_attach_that_finds_nothing_leaves_no_record() {
    let node = Node::new();
    let journal = node.open();
    let error = node.attach(&journal, "pvc-1", &scsi(ATTACHED));
    assert_eq!(error.stage(), Some(Stage::Scan), "{error}");
    assert!(!node.is_untouched());
    assert_eq!(journal.records(), []);
    assert_eq!(node.files(), [] as [&str; 0]);
    let missing = node
        .engine
        .detach_volume(&journal, &id("pvc-1"), &DetachVolume::default(), soon())
        .unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}

#[test]
fn recovery_undoes_finishes_and_keeps_as_its_rules_say_and_touches_nothing_foreign() {
    let detach = json!({ "detach": { "abandon_unwritten": false } });
    let mut half_detached = begun("c-detach", "scsi:0:0:0:3", &detach);
    half_detached["outcome"] = attached("", "", OTHER_NAME)["outcome"].clone();
    let node = Node::with(&[
        begun("a-attach", ATTACHED, &json!("attach")),
        attached("b-attached", "scsi:0:0:0:2", NAME),
        half_detached,
    ]);
    node.machine.disk("0:0:0:77", "sdz");
    let journal = node.open();
    let recovery = node.engine.recover(&journal, soon()).unwrap();
    let of = |place: usize| &recovery.volumes[place];
    assert_eq!(of(0).condition, Condition::Gone, "{recovery:?}");
    assert!(matches!(of(0).action, Action::Undone), "{recovery:?}");
    // A session that is down brings its devices back later.
    assert_eq!(of(1).condition, Condition::Gone, "{recovery:?}");
    assert!(matches!(of(1).action, Action::Nothing), "{recovery:?}");
    assert_eq!(of(2).condition, Condition::Gone, "{recovery:?}");
    assert!(matches!(of(2).action, Action::Finished), "{recovery:?}");
    assert_eq!(node.files(), ["b-attached.json"]);
    assert!(!recovery.is_whole());

    let foreign: Vec<&str> = recovery.foreign.iter().map(|f| &*f.device).collect();
    assert_eq!(foreign, ["scsi:0:0:0:77"]);
    assert_eq!(node.machine.read("sys/devices/fake/0:0:0:77/delete"), "");
    assert!(node.is_untouched());

    let volume = id("b-attached");
    let how = DetachVolume::default();
    node.engine
        .detach_volume(&journal, &volume, &how, soon())
        .unwrap();
    assert_eq!(node.files(), [] as [&str; 0]);
    assert!(node.engine.recover(&journal, soon()).unwrap().is_whole());
}

#[test]
fn an_unfinished_attach_leaves_another_unit_alone_and_refuses_one_without_an_identity() {
    let mut late = begun("late", ATTACHED, &json!("attach"));
    late["spec"]["expect"] = json!(OTHER_NAME);
    let how = DetachVolume::default();
    let detach = |node: &Node| {
        let journal = node.open();
        node.engine
            .detach_volume(&journal, &id("late"), &how, soon())
    };
    let node = Node::with(&[late.clone()]);
    node.disk_named();
    assert!(!detach(&node).unwrap().changed);
    assert_eq!(node.files(), [] as [&str; 0]);
    assert_eq!(node.machine.read("sys/devices/fake/0:0:0:1/delete"), "");

    let node = Node::with(&[late]);
    node.machine.disk("0:0:0:1", "sdb");
    let failure = detach(&node).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::IdentityMismatch, "{failure}");
    assert_eq!(node.files(), ["late.json"]);
    assert_eq!(node.machine.read("sys/devices/fake/0:0:0:1/delete"), "");
}

#[test]
fn what_was_begun_at_a_bare_address_before_a_reboot_is_not_finished_at_it() {
    let detach = json!({ "detach": { "abandon_unwritten": false } });
    for operation in [json!("attach"), detach] {
        let mut record = begun("pvc-1", ATTACHED, &operation);
        record["boot"] = json!("8f0a5a3c-0000-4000-8000-000000000001");
        for is_recovered in [true, false] {
            let node = Node::with(&[record.clone()]);
            let boot = "8f0a5a3c-0000-4000-8000-000000000002\n";
            node.machine.write("proc/sys/kernel/random/boot_id", boot);
            node.disk_named();
            let journal = node.open();
            let seen = node.engine.survey(&journal).unwrap();
            assert_eq!(seen[0].condition, Condition::Gone, "{seen:?}");
            if is_recovered {
                let recovery = node.engine.recover(&journal, soon()).unwrap();
                let found = &recovery.volumes[0];
                assert_eq!(found.condition, Condition::Gone, "{found:?}");
                assert!(found.is_whole(), "{found:?}");
            } else {
                let (volume, how) = (id("pvc-1"), DetachVolume::default());
                let detached = node.engine.detach_volume(&journal, &volume, &how, soon());
                assert!(!detached.unwrap().changed);
            }
            assert_eq!(node.machine.read("sys/devices/fake/0:0:0:1/delete"), "");
            assert!(node.is_untouched());
            assert_eq!(node.files(), [] as [&str; 0]);
        }
    }
}

#[test]
fn a_begun_attach_at_another_volumes_device_is_undone_and_the_device_left_alone() {
    let node = Node::new();
    node.disk_named();
    for (name, record) in [
        ("owner.json", attached("owner", "scsi:0:0:0:7", NAME)),
        ("late.json", begun("late", ATTACHED, &json!("attach"))),
    ] {
        fs::write(node.file(name), sealed(&record)).unwrap();
    }
    let journal = node.open();
    let recovery = node.engine.recover(&journal, soon()).unwrap();
    let late = &recovery.volumes[0];
    assert_eq!(
        (late.volume.as_str(), late.condition),
        ("late", Condition::Gone)
    );
    assert!(matches!(late.action, Action::Undone), "{late:?}");
    assert_eq!(node.files(), ["owner.json"]);
    assert_eq!(node.machine.read("sys/devices/fake/0:0:0:1/delete"), "");
    assert!(recovery.foreign.is_empty(), "{:?}", recovery.foreign);
}
