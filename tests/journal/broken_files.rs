//! Files that are not valid records: cut, flipped, foreign, newer. The journal trusts none and
//! loses none.

use std::fs;

use lunbd::ErrorKind;
use lunbd::engine::Journal;
use lunbd::engine::journal::{FaultKind, Record};
use serde_json::{Value, json};

use crate::node::{ATTACHED, NAME, Node, OTHER_NAME, attached, begun, id, sealed, soon};

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

/// A record, a disk at the address that it names, and another volume, which is valid and
/// attached elsewhere.
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
        // The complete file is a record.
        Record::parse(&bytes).unwrap();
        Self { node, bytes }
    }

    /// With this content the file makes no volume and causes no act. The other volume is known
    /// as before, and the content is kept.
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

/// Records for each of which a recovery would act on the disk, and one of NBD.
fn records() -> [Value; 4] {
    let detach = json!({ "detach": { "abandon_unwritten": true } });
    let mut nbd = attached("pvc-1", "nbd://192.0.2.1/a", NAME);
    nbd["spec"]["nbd"] = json!({
        "backend": "of pvc-1", "index": null, "connections": 1, "read_only": false,
        "io_timeout_ms": 30_000, "dead_connection_timeout_ms": 120_000,
    });
    nbd["outcome"]["nbd_index"] = json!("0");
    [
        nbd,
        attached("pvc-1", ATTACHED, NAME),
        begun("pvc-1", ATTACHED, &json!("attach")),
        begun("pvc-1", ATTACHED, &detach),
    ]
}

#[test]
fn a_file_cut_at_every_byte_is_set_aside_and_no_volume_comes_of_it() {
    let mut files = 0;
    for record in records() {
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
    for record in records() {
        let broken = Broken::of(&record);
        for place in 0..broken.bytes.len() {
            // Flip all bits of the byte, and one bit.
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
    let no_source = {
        let mut record = attached("empty", ATTACHED, NAME);
        record["spec"]["sources"] = json!([]);
        sealed(&record)
    };
    for (name, bytes, kind) in [
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
    assert_eq!(again, [FaultKind::SetAsideEarlier; 7]);
}

#[test]
fn a_journal_with_a_record_of_a_later_version_is_refused_and_left_as_it_is() {
    let node = Node::with(&[attached("pvc-1", ATTACHED, NAME)]);
    fs::write(node.file("notes"), "remember the milk").unwrap();
    let mut unknown = attached("pvc-2", "scsi:0:0:0:2", OTHER_NAME);
    unknown["spec"]["interface"] = json!("eth1");
    for bytes in [b"lunbd-journal 9 crc:1\n{}".to_vec(), sealed(&unknown)] {
        fs::write(node.file("pvc-2.json"), &bytes).unwrap();
        let error = node.try_open().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
        assert!(error.to_string().contains("pvc-2.json"), "{error}");
        assert_eq!(node.files(), ["notes", "pvc-1.json", "pvc-2.json"]);
        assert_eq!(fs::read(node.file("pvc-2.json")).unwrap(), bytes);
    }
    fs::remove_file(node.file("pvc-2.json")).unwrap();
    assert_eq!(node.open().records().len(), 1);
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
