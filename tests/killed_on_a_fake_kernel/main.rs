//! Kills a process at every step of its work on a volume, and recovers in another process. The
//! volume must be whole or gone, and nothing else may be left.
//!
//! The kernel is that of `tests/fake_kernel`, which continues when the process dies. A run
//! without a kill records the steps that it passes (`src/crash.rs` lists them). Then one run is
//! killed at each step.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test panics to fail, and starts the process that is killed"
)]

#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "../fake_kernel/mod.rs"]
mod fake_kernel;
mod kills;
mod rig;

use std::env;
use std::fs;
use std::path::PathBuf;

use fake_kernel::{Address, access};
use kills::{missed, outcome};
use lunbd::engine::{Action, Condition, DetachVolume, Recovered};
use lunbd::error::Stage;
use lunbd::{AttachRequest, ErrorKind, Source};
use rig::*;

/// The process that is killed: this program, started again by the tests below. It does nothing
/// if no test has started it.
#[test]
fn does_what_its_environment_asks_for() {
    let Some(root) = env::var_os(MACHINE).map(PathBuf::from) else {
        return;
    };
    let engine = access::engine(&root);
    let journal = open_journal(&engine, &journal_of(&root));
    match &*env::var(OPERATION).unwrap() {
        "open" => {}
        "attach" => drop(
            engine
                .attach_volume(&journal, &volume(), &request(), soon())
                .unwrap(),
        ),
        "resize" => drop(
            engine
                .resize_volume(&journal, &volume(), None, soon())
                .unwrap(),
        ),
        "attach nothing" => {
            let absent: Source = "scsi:0:0:0:9".parse().unwrap();
            let request = AttachRequest::new(absent);
            let absent = engine.attach_volume(&journal, &volume(), &request, soon());
            assert_eq!(absent.unwrap_err().kind(), ErrorKind::NotFound);
        }
        "detach" => {
            let how = DetachVolume::default();
            engine
                .detach_volume(&journal, &volume(), &how, soon())
                .unwrap();
        }
        other => panic!("{other}: no such operation"),
    }
}

#[test]
fn a_volume_is_whole_or_gone_after_a_kill_at_every_step() {
    let mut rig = Rig::new();
    let attach = rig.attach_killed_at(None);
    let resize = rig.resize_killed_at(&[], None);
    let detach = rig.detach_killed_at(&[], None);
    println!("attach: {attach:?}\nresize: {resize:?}\ndetach: {detach:?}");
    for turn in 0..attach.len().max(resize.len()).max(detach.len()) {
        let at = |steps: &'_ [String]| steps.get(turn).cloned();
        rig.attach_killed_at(at(&attach).as_deref());
        if let Some(step) = at(&resize) {
            rig.resize_killed_at(&resize, Some(&step));
        }
        rig.detach_killed_at(&detach, at(&detach).as_deref());
    }
    let steps = attach.len() + resize.len() + detach.len();
    println!("{steps} steps");
    assert!(rig.passed_by.is_empty(), "no kill at {:?}", rig.passed_by);
    let elsewhere = [
        // The tests below cover planted files, a flush that fails and an attach that finds
        // nothing.
        "journal.to-remove",
        "journal.removed",
        "journal.forgotten",
        "journal.to-drop-unfinished",
        "journal.unfinished-dropped",
        "journal.to-set-aside",
        "journal.set-aside",
        "failed-flush.to-sweep",
        "failed-flush.swept",
    ];
    let mut missed = missed(
        &rig.killed,
        &[
            "journal.",
            "device-lock.",
            "failed-flush.",
            "block.",
            "scsi.",
        ],
    );
    missed.retain(|point| !elsewhere.contains(point));
    assert!(missed.is_empty(), "no kill at {missed:?}");
}

#[test]
fn an_attach_that_finds_nothing_leaves_no_record_wherever_it_is_killed() {
    let mut rig = Rig::new();
    let steps = rig.run("attach nothing", None).steps;
    rig.require_gone("at no step");
    for step in &steps {
        let _not_there = fs::remove_dir_all(rig.journal());
        let ended = rig.run("attach nothing", Some(step));
        assert!(ended.killed, "{step}");
        let recovered = rig.recover(step);
        if let Some(recovered) = recovered {
            assert_eq!(outcome(&recovered), (Condition::Gone, "undone"), "{step}");
        }
        rig.require_gone(step);
    }
    let removal = ["journal.to-remove", "journal.removed", "journal.forgotten"];
    assert_eq!(missed(&rig.killed, &removal), [] as [&str; 0]);
}

#[test]
fn an_opening_of_a_journal_that_is_killed_at_any_step_is_made_good_by_the_next() {
    let mut rig = Rig::new();
    let directory = rig.journal();
    let plant = |with_files: bool| {
        let _not_there = fs::remove_dir_all(&directory);
        if with_files {
            fs::create_dir(&directory).unwrap();
            for name in ["journal.lock", "pvc-1.json.new", "pvc-2.json"] {
                fs::write(directory.join(name), "lunbd-journal 1 sha256:").unwrap();
            }
        }
    };
    for with_files in [false, true] {
        plant(with_files);
        let steps = rig.run("open", None).steps;
        for step in &steps {
            plant(with_files);
            assert!(rig.run("open", Some(step)).killed, "{step}");
            let engine = rig.engine();
            let journal = open_journal(&engine, &directory);
            assert_eq!(journal.records(), [], "{step}");
            assert_eq!(journal.problems().len(), usize::from(with_files), "{step}");
            let entries = fs::read_dir(&directory).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name());
            let mut left: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
            left.sort();
            let aside = with_files.then_some("pvc-2.json.set-aside-0");
            let expected: Vec<&str> = ["journal.lock"].into_iter().chain(aside).collect();
            assert_eq!(left, expected, "{step}");
        }
    }
    let opening = [
        "journal.to-make",
        "journal.made",
        "journal.locked",
        "journal.to-drop",
        "journal.unfinished",
        "journal.to-set",
        "journal.set",
    ];
    assert_eq!(missed(&rig.killed, &opening), [] as [&str; 0]);
}

#[test]
fn a_flush_that_failed_is_known_to_the_next_process_whenever_the_first_one_was_killed() {
    let mut rig = Rig::new();
    for at in [
        None,
        // The first occurrence of each step records that a flush begins.
        Some("failed-flush.to-write:2"),
        Some("failed-flush.written:2"),
        Some("failed-flush.to-sweep:1"),
        Some("failed-flush.swept:1"),
    ] {
        let when = format!("a flush that fails, at {at:?}");
        let node = rig.attach(&when);
        rig.kernel().write_to(&node);
        let fails = |fails| {
            move |state: &mut fake_kernel::State| {
                state
                    .units
                    .get_mut(&Address::of(0, 1))
                    .unwrap()
                    .fails_writes = fails;
            }
        };
        rig.kernel().change(fails(true));
        let in_detach = at.filter(|step| !step.contains("swe"));
        let ended = rig.run("detach", in_detach);
        assert!(!ended.succeeded, "{when}");
        rig.kernel().change(fails(false));
        if in_detach.is_some() {
            assert!(ended.killed, "{when}");
            let engine = rig.engine();
            let journal = open_journal(&engine, &rig.journal());
            let recovery = engine.recover(&journal, soon()).unwrap();
            let [
                Recovered {
                    action: Action::Failed(error),
                    ..
                },
            ] = &*recovery.volumes
            else {
                panic!("{when}: {recovery:?}");
            };
            assert_eq!(error.kind(), ErrorKind::Io, "{when}: {error}");
            assert_eq!(error.stage(), Some(Stage::Flush), "{when}: {error}");
            drop(journal);
            rig.detach(&DetachVolume::default().abandon_unwritten(), &when);
        } else {
            // The device goes without a detach, and its mark stays.
            let delete = rig.fake.root().join("sys/bus/scsi/devices/0:0:0:1/delete");
            let devices = access::roots(rig.fake.root()).devices;
            assert!(devices.write_attribute(&delete, "1", &|| true).unwrap());
            let ended = rig.run("attach", at);
            assert_eq!(ended.killed, at.is_some(), "{when}");
            if ended.killed {
                rig.recover(&when);
            }
            rig.attach(&when);
            rig.detach(&DetachVolume::default(), &when);
        }
        rig.require_gone(&when);
    }
}
