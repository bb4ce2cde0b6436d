//! Volume names that are made to confuse.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use lunbd::engine::journal::{FaultKind, Record};
use lunbd::engine::{DetachVolume, StageObserver};
use lunbd::error::Stage;
use lunbd::id::VolumeId;

use crate::node::{ATTACHED, NAME, Node, attached, id, scsi, sealed, soon};

/// Ids that are made to confuse; no two are the same.
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
        // Paths that lead out of the directory, and names of the journal's own files.
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
        // Differences in case and in normalisation.
        "PVC",
        "pvc",
        "\u{e9}",
        "e\u{301}",
        "\u{c5}",
        "\u{212b}",
        "\u{ff0e}\u{ff0e}",
        "\u{1f980}",
        // Names that differ only after the place where a file name is cut off.
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
    // The lock file of the address stays; it belongs to the engine.
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
        let is_lock = |path: &&PathBuf| path.parent() == Some(&*run);
        let new: Vec<&PathBuf> = seen.difference(&before).filter(|p| !is_lock(p)).collect();
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

    // All records exist at once, each under its own name.
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
    // Each volume is detached separately.
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
        // A record with such an id does not belong to this version.
        let record = sealed(&attached(text, ATTACHED, NAME));
        assert_eq!(Record::parse(&record).unwrap_err().kind, FaultKind::Newer);
    }
}
