#![cfg(feature = "metrics")]

use metrics_util::debugging::{DebugValue, DebuggingRecorder};

use super::*;
use crate::engine::stale::owner::owner_in;
use crate::engine::stale::reap_one;
use crate::kernel::Roots;

/// A disk without a holder and without a node.
fn engine_with_a_disk() -> (tempfile::TempDir, Engine) {
    let machine = tempfile::tempdir().unwrap();
    let device = "sys/devices/1:0:0:4";
    for (file, text) in [
        (&*format!("{device}/type"), "0\n"),
        (&format!("{device}/block/sdb/dev"), "8:16\n"),
        ("proc/self/mountinfo", ""),
    ] {
        let path = machine.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let bus = machine.path().join("sys/bus/scsi/devices");
    std::fs::create_dir_all(&bus).unwrap();
    std::os::unix::fs::symlink(machine.path().join(device), bus.join("1:0:0:4")).unwrap();
    let engine = Engine::start(Roots::below(machine.path())).unwrap();
    (machine, engine)
}

#[test]
fn each_stale_lun_is_counted_once_by_its_evidence_and_its_outcome() {
    let (_machine, engine) = engine_with_a_disk();
    let device = ScsiDevice::all(engine.roots()).unwrap().pop().unwrap();
    let not_listed = Evidence::NotListed {
        through: device.hctl(),
        listed: 2,
    };
    let not_supported = Evidence::NotSupported { command: "INQUIRY" };
    let dry_run = ReapRequest::default().dry_run();
    let no_owner = |_: &Identity, _| Ok(None);
    let volume = |_: &Identity, _| Ok(Some("pvc-1".parse().unwrap()));
    let acts: [(&Evidence, FindOwner<'_>); 4] = [
        (&not_listed, &no_owner),
        (&not_listed, &volume),
        (&not_supported, &volume),
        (&not_supported, &volume),
    ];
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let soon = Deadline::after(std::time::Duration::from_secs(30));
        let mut call = CallContext::new(Call::Reap, None, soon);
        for (evidence, owner) in acts {
            let proof = StaleProof {
                disk: device.disk().unwrap().unwrap(),
                diskseq: None,
                was: Identity::default(),
                evidence: evidence.clone(),
            };
            let stale_lun = reap_one(&engine, &device, proof, &dry_run, owner, &mut call);
            assert_eq!(&stale_lun.evidence, evidence);
        }
    });
    let counted = snapshotter.snapshot().into_vec().into_iter();
    let mut counted: Vec<String> = counted
        .filter(|(key, ..)| key.key().name() == "lunbd_stale_luns_total")
        .map(|(key, _, _, value)| {
            let labels = key.key().labels().map(metrics::Label::value);
            let DebugValue::Counter(count) = value else {
                panic!("{value:?}");
            };
            format!("{} {count}", labels.collect::<Vec<_>>().join(" "))
        })
        .collect();
    counted.sort();
    assert_eq!(
        counted,
        [
            "not_listed reapable 1",
            "not_listed skipped 1",
            "not_supported skipped 2"
        ]
    );
}

#[test]
fn other_journals_are_read_again_and_an_unreadable_journal_keeps_everything() {
    let root = tempfile::tempdir().unwrap();
    let engine = Engine::start(Roots::below(root.path())).unwrap();
    let directories = ["agent", "other"].map(|name| root.path().join(name));
    let [agent, other] = &directories;
    let soon = Deadline::after(std::time::Duration::from_secs(30));
    let hctl = "1:0:0:4".parse().unwrap();
    let owner = || {
        let nameless = Identity::default();
        owner_in(&engine, &directories, &nameless, hctl, soon)
    };
    assert_eq!(owner().unwrap(), None, "nobody keeps a journal there");
    std::fs::create_dir(other).unwrap();
    std::fs::write(other.join("journal.lock"), "").unwrap();
    assert_eq!(owner().unwrap(), None);
    let body = r#"{"volume":"pvc-1","spec":{"sources":["scsi:1:0:0:4"],"expect":null,
        "min_paths":1,"multipath":"off","nbd":null},"intent":null,"outcome":null}"#;
    let record = crate::engine::journal::Record::seal(body.as_bytes());
    std::fs::write(other.join("pvc-1.json"), &record).unwrap();
    assert_eq!(owner().unwrap().unwrap().as_str(), "pvc-1");

    std::fs::create_dir(agent).unwrap();
    std::fs::write(agent.join("journal.lock"), "").unwrap();
    std::fs::write(agent.join("pvc-2.json"), "lunbd-journal 9 sha512:1").unwrap();
    let error = owner().unwrap_err();
    assert!(error.to_string().contains("pvc-2.json"), "{error}");
    let request = ReapRequest::default();
    let refused = engine.reap_except_volumes_in(&directories, &request, soon);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotReady);
}
