//! A machine that is reset at every step of the journal's own work: what the
//! kernel knew is gone, and what was on the disk is a journal.
//!
//! The other steps of an attach and a detach leave on the disk what the step of
//! the journal before them left: `own_boot_crash_mpath_nbd` holds that.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test panics to fail"
)]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lunbd::Engine;
use lunbd::engine::{Action, Condition, DetachVolume};
use nix::mount::{MsFlags, mount};
use serde::{Deserialize, Serialize};
use vm_tests::guest::agent::{engine, soon, unit};
use vm_tests::guest::crash::{Place, Run, changes_journal, request, volume};
use vm_tests::guest::{self, ScsiDebug};

const DISK: &str = "/dev/vda";
const KEPT: &str = "/mnt";
const LIMIT: Duration = Duration::from_secs(60);

/// What is kept from one boot to the next.
#[derive(Default, Serialize, Deserialize)]
struct Progress {
    /// Operation and step of every reset.
    plan: Vec<(String, String)>,
    /// How many of them were begun.
    begun: usize,
    /// What was found after each.
    found: Vec<String>,
}

impl Progress {
    fn path() -> PathBuf {
        Path::new(KEPT).join("progress.json")
    }

    fn read() -> Option<Self> {
        let text = fs::read_to_string(Self::path()).ok()?;
        Some(serde_json::from_str(&text).unwrap())
    }

    fn write(&self) {
        let beside = Self::path().with_extension("new");
        let mut file = File::create(&beside).unwrap();
        file.write_all(&serde_json::to_vec(self).unwrap()).unwrap();
        file.sync_all().unwrap();
        fs::rename(&beside, Self::path()).unwrap();
        File::open(KEPT).unwrap().sync_all().unwrap();
    }
}

/// The file system on the disk, made at the first boot.
fn mount_the_disk() {
    guest::modprobe("virtio_pci", &[]);
    guest::modprobe("virtio_blk", &[]);
    guest::wait_until(DISK, LIMIT, || Path::new(DISK).exists().then_some(()));
    guest::modprobe("ext4", &[]);
    // By its magic number, and not by a mount that fails: what is kept would be lost.
    let mark = guest::wait_until("the disk to be read", LIMIT, || {
        let mut mark = [0; 2];
        let read = File::open(DISK).and_then(|disk| disk.read_exact_at(&mut mark, 1080));
        read.ok().map(|()| mark)
    });
    if mark != [0x53, 0xef] {
        guest::run(&["mkfs.ext4", "-q", "-F", DISK]);
    }
    let options = None::<&str>;
    mount(Some(DISK), KEPT, Some("ext4"), MsFlags::empty(), options).unwrap();
}

/// Each step of the journal that changes what is on the disk, or may.
fn plan(sources: &[String]) -> Vec<(String, String)> {
    let place = Place::new();
    let mut plan = Vec::new();
    for operation in ["attach", "detach"] {
        let sources = if operation == "attach" { sources } else { &[] };
        let ended = Run::start(&place, operation, sources, None).end();
        assert!(ended.status.success(), "{ended:?}");
        let steps = ended.steps.iter().filter(|step| changes_journal(step));
        plan.extend(steps.map(|step| (operation.to_owned(), step.clone())));
    }
    plan
}

/// What a reset at the step may leave, of what is in `look`.
fn expected(operation: &str, step: &str) -> &'static [&'static str] {
    const NONE: &str = "no record";
    const BEGUN: &str = "Gone, undone";
    const ATTACHED: &str = "Gone, nothing";
    const LEAVING: &str = "Gone, finished";
    let (step, pass) = step.split_once(':').unwrap();
    match (operation, step.trim_start_matches("journal."), pass) {
        ("attach", "created" | "written" | "synced", "1") | ("detach", "forgotten", _) => &[NONE],
        // The directory is not on the disk yet.
        ("attach", "renamed", "1") => &[NONE, BEGUN],
        ("attach", "renamed", "2") => &[BEGUN, ATTACHED],
        ("attach", "kept", "2") | ("detach", "created" | "written" | "synced", "1") => &[ATTACHED],
        ("attach", _, _) => &[BEGUN],
        ("detach", "renamed", "1") => &[ATTACHED, LEAVING],
        ("detach", "kept", "1") => &[LEAVING],
        ("detach", "removed", "1") => &[LEAVING, NONE],
        _ => panic!("{operation} at {step}: not thought of"),
    }
}

/// The turns that are taken.
fn some_of<T>(steps: Vec<T>) -> Vec<T> {
    let taken: Vec<usize> = guest::turns(steps.len()).collect();
    let steps = steps.into_iter().enumerate();
    let steps = steps.filter(|(turn, _)| taken.contains(turn));
    steps.map(|(_, step)| step).collect()
}

/// Recovers, and says how.
fn look(engine: &Engine, directory: &Path, when: &str) -> String {
    let journal = engine.open_journal_at(directory, soon()).unwrap();
    assert!(journal.problems().is_empty(), "{when}: {journal:?}");
    let recovery = engine.recover(&journal, soon()).unwrap();
    assert!(recovery.foreign.is_empty(), "{when}: {recovery:?}");
    let Some(volume) = recovery.volumes.first() else {
        return "no record".to_owned();
    };
    assert_eq!(volume.condition, Condition::Gone, "{when}: {volume:?}");
    let action = match volume.action {
        Action::Nothing => "nothing",
        Action::Finished => "finished",
        Action::Undone => "undone",
        _ => panic!("{when}: {volume:?}"),
    };
    format!("Gone, {action}")
}

#[test]
fn a_machine_that_is_reset_at_any_step_of_the_journal_finds_one_that_is_whole() {
    if guest::series() != "6.1" && !guest::sweeps_are_whole() {
        guest::skip("the file system's work and not the kernel's: seen on one kernel");
    }
    mount_the_disk();
    let target = ScsiDebug::with_luns(2);
    let sources = [unit(&target, 1).to_string()];
    let mut progress = Progress::read().unwrap_or_else(|| Progress {
        plan: some_of(plan(&sources)),
        ..Progress::default()
    });
    let directory = Path::new(KEPT).join("journal");
    let engine = engine();
    let attach = || {
        let journal = engine.open_journal_at(&directory, soon()).unwrap();
        let attached = engine.attach_volume(&journal, &volume(), &request(&sources), soon());
        attached.unwrap_or_else(|error| panic!("{error:#}"));
    };
    let detach = || {
        let journal = engine.open_journal_at(&directory, soon()).unwrap();
        let how = DetachVolume::default();
        let detached = engine.detach_volume(&journal, &volume(), &how, soon());
        detached.unwrap_or_else(|error| panic!("{error:#}"));
        assert_eq!(target.devices(), [] as [&str; 0]);
        assert_eq!(guest::entries(&directory), ["journal.lock"]);
    };
    if let Some(last) = progress.begun.checked_sub(1) {
        let (operation, step) = &progress.plan[last];
        let when = format!("{operation} at {step}");
        assert_eq!(
            progress.found.len(),
            last,
            "{when}: another boot than the reset's"
        );
        let found = look(&engine, &directory, &when);
        let told = format!("{when}: {found}");
        assert!(
            expected(operation, step).contains(&found.as_str()),
            "{told}"
        );
        progress.found.push(told);
        // Whatever was found, the volume can be had and given back.
        attach();
        detach();
    }
    let Some((operation, step)) = progress.plan.get(progress.begun).cloned() else {
        let count = progress.found.len();
        guest::tell(&format!("{count} resets of the machine"));
        println!("{}", progress.found.join("\n"));
        let least = if guest::sweeps_are_whole() { 15 } else { 3 };
        assert!(count >= least, "only {count}");
        return;
    };
    if operation == "detach" {
        attach();
    }
    progress.begun += 1;
    progress.write();
    let sources: &[String] = if operation == "attach" { &sources } else { &[] };
    let ended = Command::new("crash-agent")
        .arg(&operation)
        .arg(&directory)
        .args(sources)
        .env("LUNBD_CRASH_AT", &step)
        .env("LUNBD_CRASH_RESET", "1")
        .status();
    panic!("{operation} at {step}: the machine was not reset: {ended:?}");
}
