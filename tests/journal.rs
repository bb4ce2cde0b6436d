//! The journal on a machine that is a directory: what is refused, what is set
//! aside, what is never trusted.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test panics to fail, and prints what it counted"
)]

mod machine;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lunbd::engine::journal::{FaultKind, Operation, Record};
use lunbd::engine::{Action, Condition, DetachVolume, Journal, NbdOptions, StageObserver};
use lunbd::error::Stage;
use lunbd::id::VolumeId;
use lunbd::{AttachRequest, Deadline, Engine, Error, ErrorKind, Roots};
use machine::Machine;
use serde_json::{Value, json};

const NAME: &str = "naa.5000c500a1b2c3d4";
const OTHER_NAME: &str = "naa.5000c500a1b2c3d5";
const ATTACHED: &str = "scsi:0:0:0:1";

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

fn id(text: &str) -> VolumeId {
    text.parse().unwrap()
}

/// A record as it is on the disk, of a SCSI unit that is attached.
fn attached(volume: &str, source: &str, name: &str) -> Value {
    json!({
        "volume": volume,
        "spec": {
            "sources": [source], "expect": null, "min_paths": 1, "multipath": "prefer",
            "nbd": null,
        },
        "intent": null,
        "outcome": {
            "node": "/dev/sdb", "devno": "8:16", "diskseq": "17", "size": 1_048_576,
            "names": [name], "map": null, "nbd_index": null, "at": "2026-11-21T03:00:00Z",
        },
    })
}

/// The same, with something under way and nothing read back yet.
fn begun(volume: &str, source: &str, operation: &Value) -> Value {
    let mut record = attached(volume, source, NAME);
    record["intent"] = json!({ "operation": operation, "begun_at": "2026-11-21T03:00:00Z" });
    record["outcome"] = Value::Null;
    record
}

fn sealed(record: &Value) -> Vec<u8> {
    Record::seal(&serde_json::to_vec_pretty(record).unwrap())
}

/// A machine with the directory of a journal that somebody has used.
struct Node {
    machine: Machine,
    engine: Engine,
}

impl Node {
    fn new() -> Self {
        let machine = Machine::new();
        machine.host(0);
        machine.write("run/lunbd/journal/journal.lock", "");
        let engine = Engine::start(machine.roots()).unwrap();
        Self { machine, engine }
    }

    fn with(records: &[Value]) -> Self {
        let node = Self::new();
        for record in records {
            let name = format!("{}.json", record["volume"].as_str().unwrap());
            fs::write(node.file(&name), sealed(record)).unwrap();
        }
        node
    }

    fn file(&self, name: &str) -> PathBuf {
        self.machine.path("run/lunbd/journal").join(name)
    }

    /// The names in the journal's directory, without the lock.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.machine.path("run/lunbd/journal")).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "journal.lock")
            .collect();
        names.sort();
        names
    }

    /// The unit of [`NAME`] at [`ATTACHED`].
    fn disk_named(&self) {
        self.machine.disk("0:0:0:1", "sdb");
        let device = "sys/devices/fake/0:0:0:1";
        // Page 83h with one NAA name of the unit.
        let page = b"\0\x83\0\x0c\x01\x03\0\x08\x50\0\xc5\0\xa1\xb2\xc3\xd4";
        fs::write(self.machine.path(&format!("{device}/vpd_pg83")), page).unwrap();
        for (file, text) in [("vendor", "LIO-ORG\n"), ("model", "disk\n")] {
            self.machine.write(&format!("{device}/{file}"), text);
        }
    }

    /// Opens the journal. One that was just closed is held for a moment by the child
    /// that another test starts: until it is another program it has all that is
    /// open here.
    fn open(&self) -> Journal {
        let limit = soon();
        loop {
            match self.engine.open_journal(soon()) {
                Err(error) if error.kind() == ErrorKind::InUse && !limit.has_passed() => {
                    std::thread::yield_now();
                }
                opened => return opened.unwrap(),
            }
        }
    }

    fn attach(&self, journal: &Journal, volume: &str, request: &AttachRequest) -> Error {
        let result = self
            .engine
            .attach_volume(journal, &id(volume), request, soon());
        result.unwrap_err()
    }

    /// Whether nothing was scanned.
    fn is_untouched(&self) -> bool {
        self.machine
            .read("sys/class/scsi_host/host0/scan")
            .is_empty()
    }
}

fn scsi(source: &str) -> AttachRequest {
    AttachRequest::new(source.parse::<lunbd::Source>().unwrap())
}

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
    assert!(text.starts_with("lunbd-journal 1 sha256:") && text.contains("\n  \"volume\""));
}

#[test]
fn a_record_cut_at_any_byte_or_with_any_bit_flipped_is_none() {
    let bytes = sealed(&attached("pvc-1", ATTACHED, NAME));
    for length in 0..bytes.len() {
        let fault = Record::parse(&bytes[..length]).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Torn, "{length}: {}", fault.text);
    }
    for place in 0..bytes.len() {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[place] ^= 1 << bit;
            assert!(Record::parse(&bytes).is_err(), "byte {place}, bit {bit}");
        }
    }
    let mut longer = bytes;
    longer.push(b'\n');
    assert_eq!(Record::parse(&longer).unwrap_err().kind, FaultKind::Torn);
}

/// A record, a disk at the address that it names, and another volume, which is
/// sound and stands elsewhere.
struct Broken {
    node: Node,
    bytes: Vec<u8>,
}

impl Broken {
    fn of(record: &Value) -> Self {
        let sound = attached("sound", "scsi:0:0:0:7", OTHER_NAME);
        let node = Node::with(&[sound]);
        node.disk_named();
        let bytes = sealed(record);
        Self { node, bytes }
    }

    /// Its file holds this: no volume comes of it and nothing is done by it, the
    /// other volume is known as ever, and what the file held is kept.
    #[track_caller]
    fn is_no_record(&self, bytes: &[u8], what: &str) -> FaultKind {
        let node = &self.node;
        fs::write(node.file("pvc-1.json"), bytes).unwrap();
        let seen = node.engine.read_journal_at(&node.file(""), soon()).unwrap();
        let volumes: Vec<&str> = seen.records.iter().map(|r| r.volume.as_str()).collect();
        assert_eq!(
            (&*volumes, seen.problems.len()),
            (&["sound"][..], 1),
            "{what}"
        );
        let journal = node.open();
        let [problem] = journal.problems() else {
            panic!("{what}: {:?}", journal.problems());
        };
        assert_eq!(problem.kind, seen.problems[0].kind, "{what}");
        assert_eq!(fs::read(&problem.file).unwrap(), bytes, "{what}");
        let recovery = node.engine.recover(&journal, soon()).unwrap();
        let volumes: Vec<&str> = recovery.volumes.iter().map(|v| v.volume.as_str()).collect();
        assert_eq!(volumes, ["sound"], "{what}");
        let foreign: Vec<&str> = recovery.foreign.iter().map(|f| &*f.device).collect();
        assert_eq!(foreign, [ATTACHED], "{what}");
        fs::remove_file(&problem.file).unwrap();
        assert_eq!(node.files(), ["sound.json"], "{what}");
        problem.kind
    }

    fn was_left_alone(&self) {
        assert_eq!(
            self.node.machine.read("sys/devices/fake/0:0:0:1/delete"),
            ""
        );
        assert!(self.node.is_untouched());
    }
}

/// What each of them would have a recovery do with the disk.
fn records_about_a_disk() -> [Value; 3] {
    let detach = json!({ "detach": { "abandon_unwritten": true } });
    [
        attached("pvc-1", ATTACHED, NAME),
        begun("pvc-1", ATTACHED, &json!("attach")),
        begun("pvc-1", ATTACHED, &detach),
    ]
}

#[test]
fn a_file_cut_at_every_byte_is_set_aside_and_no_volume_comes_of_it() {
    let mut files = 0;
    for record in records_about_a_disk() {
        let broken = Broken::of(&record);
        for length in 0..broken.bytes.len() {
            let what = format!("{length} bytes");
            let kind = broken.is_no_record(&broken.bytes[..length], &what);
            assert_eq!(kind, FaultKind::Torn, "{what}");
            files += 1;
        }
        broken.was_left_alone();
    }
    println!("{files} files");
}

#[test]
fn a_file_with_every_byte_flipped_is_set_aside_and_no_volume_comes_of_it() {
    let mut files = 0;
    for record in records_about_a_disk() {
        let broken = Broken::of(&record);
        for place in 0..broken.bytes.len() {
            // All bits of it, and one.
            for flip in [0xff, 1 << (place % 8)] {
                let mut bytes = broken.bytes.clone();
                bytes[place] ^= flip;
                broken.is_no_record(&bytes, &format!("byte {place} ^ {flip:#x}"));
                files += 1;
            }
        }
        broken.was_left_alone();
    }
    println!("{files} files");
}

#[test]
fn what_is_no_record_is_set_aside_whole_reported_again_and_never_deleted() {
    let node = Node::new();
    let good = sealed(&attached("pvc-1", ATTACHED, NAME));
    let newer = [b"lunbd-journal 2 crc:1\n", &good[..]].concat();
    let no_source = {
        let mut record = attached("empty", ATTACHED, NAME);
        record["spec"]["sources"] = json!([]);
        sealed(&record)
    };
    for (name, bytes, kind) in [
        ("newer.json", &newer, FaultKind::Newer),
        ("pvc-2.json", &good, FaultKind::Foreign),
        ("notes", &b"remember the milk".to_vec(), FaultKind::Foreign),
        ("empty.json", &no_source, FaultKind::Foreign),
    ] {
        fs::write(node.file(name), bytes).unwrap();
        fs::write(node.file(&format!("{name}.set-aside-0")), "an older one").unwrap();
        let journal = node.open();
        assert_eq!(journal.records(), [], "{name}");
        let aside = node.file(&format!("{name}.set-aside-1"));
        let problem = journal
            .problems()
            .iter()
            .find(|problem| problem.file == aside);
        assert_eq!(problem.unwrap().kind, kind, "{name}");
        assert_eq!(&fs::read(&aside).unwrap(), bytes);
    }
    fs::create_dir(node.file("folder.json")).unwrap();
    let kinds = |journal: &Journal| -> Vec<FaultKind> {
        journal
            .problems()
            .iter()
            .map(|problem| problem.kind)
            .collect()
    };
    let found = kinds(&node.open());
    assert_eq!(
        found
            .iter()
            .filter(|&&kind| kind == FaultKind::Foreign)
            .count(),
        1
    );
    let again = kinds(&node.open());
    assert_eq!(again, [FaultKind::SetAsideEarlier; 9]);
}

#[test]
fn a_crash_before_the_rename_leaves_the_old_record() {
    let node = Node::with(&[attached("pvc-1", ATTACHED, NAME)]);
    let new = sealed(&attached("pvc-1", "scsi:0:0:0:2", OTHER_NAME));
    for length in [0, 30, new.len()] {
        fs::write(node.file("pvc-1.json.new"), &new[..length]).unwrap();
        let journal = node.open();
        let record = journal.record(&id("pvc-1")).unwrap();
        assert_eq!(record.spec.sources[0].to_string(), ATTACHED);
        assert_eq!(journal.problems(), []);
        assert_eq!(node.files(), ["pvc-1.json"]);
    }
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

const PLACE: &str = "LUNBD_TEST_HOLDS_JOURNAL";

/// The other process of the next test.
#[test]
fn another_process() {
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
fn two_processes_on_one_journal_and_the_second_is_told_who_holds_it_until_it_dies() {
    let node = Node::with(&[attached("pvc-1", ATTACHED, NAME)]);
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "another_process", "--nocapture"])
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

/// Ids made to confuse, no two of which are one.
fn confusing_names() -> Vec<String> {
    let long = "x".repeat(252);
    let names = [
        // Other kinds of ids, and paths.
        "scsi:0:0:0:1",
        "nbd://192.0.2.1/vol-7",
        "unit:naa.5000c500a1b2c3d4",
        "naa.5000c500a1b2c3d4",
        "36001405a1b2c3d4e5f60718293a4b5c6",
        "/dev/disk/by-id/../../sdb",
        "nbd0",
        // Ways out, and files that a journal has.
        ".",
        "..",
        "../journal.lock",
        "../../../sys/class/scsi_host/host0/scan",
        "journal.lock",
        "journal",
        ".hidden",
        "a",
        "a.json",
        "a.json.new",
        "a.json.set-aside-0",
        "a/",
        "a/b",
        "a%2Fb",
        "%2E.",
        "a\\b",
        " a",
        "a ",
        "~",
        "*",
        "$(reboot)",
        "-rf",
        // Case and normalisation.
        "PVC",
        "pvc",
        "\u{e9}",
        "e\u{301}",
        "\u{c5}",
        "\u{212b}",
        "\u{ff0e}\u{ff0e}",
        "\u{1f980}",
        // Those that differ past where a file's name is cut off.
        &"naa.5000c500a1b2c3d4".repeat(4)[..68],
        &"0".repeat(68),
        &format!("{long}1"),
        &format!("{long}2"),
        &"/".repeat(253),
    ];
    names.map(str::to_owned).into()
}

#[test]
fn ids_made_to_confuse_are_names_alone_and_none_leaves_the_journals_directory() {
    /// Every path below the machine.
    fn tree(at: &Path, found: &mut BTreeSet<PathBuf>) {
        for entry in fs::read_dir(at).unwrap() {
            let entry = entry.unwrap();
            found.insert(entry.path());
            if entry.file_type().unwrap().is_dir() {
                tree(&entry.path(), found);
            }
        }
    }
    let node = Node::new();
    let place = node.machine.path("");
    let everything = move || {
        let mut found = BTreeSet::new();
        tree(&place, &mut found);
        found
    };
    let journal = node.open();
    // The lease on the address stays, and is the engine's.
    node.attach(&journal, "first", &scsi(ATTACHED));
    let before = everything();
    let names = confusing_names();
    let mut files = BTreeMap::new();
    for name in &names {
        let seen = Arc::new(Mutex::new(BTreeSet::new()));
        let (at_its_scan, everything) = (Arc::clone(&seen), everything.clone());
        let observer = StageObserver::new(move |stage| {
            if stage == Stage::Scan {
                at_its_scan.lock().unwrap().extend(everything());
            }
        });
        let error = node.attach(&journal, name, &scsi(ATTACHED).observe(observer));
        assert_eq!(error.stage(), Some(Stage::Scan), "{name:?}: {error}");
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        let run = node.machine.path("run/lunbd");
        let is_lease = |path: &&PathBuf| path.parent() == Some(&*run);
        let new: Vec<&PathBuf> = seen.difference(&before).filter(|p| !is_lease(p)).collect();
        let [file] = new.as_slice() else {
            panic!("{name:?}: {new:?}");
        };
        assert_eq!(
            file.parent(),
            Some(node.file("").components().as_path()),
            "{name:?}"
        );
        let file = file.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(
            file.is_ascii() && !file.starts_with('.'),
            "{name:?}: {file}"
        );
        assert!(node.files().is_empty(), "{name:?}: {:?}", node.files());
        let other = files.insert(file, name.clone());
        assert_eq!(other, None, "{name:?}");
    }
    assert_eq!(files.len(), names.len());

    // All beside each other, each under its own name.
    drop(journal);
    for (lun, (file, name)) in files.iter().enumerate() {
        let source = format!("scsi:0:0:0:{}", 100 + lun);
        let record = attached(name, &source, &format!("naa.5000c500a1b2{lun:04x}"));
        fs::write(node.file(file), sealed(&record)).unwrap();
    }
    let journal = node.open();
    assert_eq!(journal.problems(), []);
    let known: BTreeSet<String> = journal
        .records()
        .iter()
        .map(|record| record.volume.to_string())
        .collect();
    assert_eq!(known, names.iter().cloned().collect());
    // Each is taken down alone.
    for name in &names {
        let how = DetachVolume::default();
        let left = journal.records().len() - 1;
        node.engine
            .detach_volume(&journal, &id(name), &how, soon())
            .unwrap();
        assert_eq!(journal.records().len(), left, "{name:?}");
        assert!(journal.record(&id(name)).is_none(), "{name:?}");
    }
    assert_eq!(node.files(), [] as [&str; 0]);
    println!("{} names", names.len());
}

#[test]
fn what_is_no_name_is_refused_before_there_is_a_file() {
    for text in [
        "",
        "\0",
        "a\0b",
        "a\nb",
        "\n",
        "a\tb",
        "\u{1b}[2J",
        "a\u{202e}b",
        "\u{feff}a",
        &"x".repeat(254),
    ] {
        let error = text.parse::<VolumeId>().unwrap_err();
        assert!(error.to_string().contains("1 to 253 bytes"), "{error}");
        // A record that has it is none.
        let record = sealed(&attached(text, ATTACHED, NAME));
        assert_eq!(Record::parse(&record).unwrap_err().kind, FaultKind::Foreign);
    }
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
    // A session that is down brings its devices again.
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
