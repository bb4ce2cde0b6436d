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
mod fake_kernel;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use fake_kernel::{Address, FakeKernel, Kernel, Unit, access};
use lunbd::engine::journal::Record;
use lunbd::engine::{Action, Condition, DetachVolume, Recovered};
use lunbd::error::Stage;
use lunbd::id::VolumeId;
use lunbd::{AttachRequest, CrashPoint, Deadline, Engine, ErrorKind, Source};

/// The machine and the operation, for [`does_what_its_environment_asks_for`].
const MACHINE: &str = "LUNBD_FAKE_MACHINE";
const OPERATION: &str = "LUNBD_FAKE_OPERATION";

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn volume() -> VolumeId {
    "pvc-1".parse().unwrap()
}

fn request() -> AttachRequest {
    let source: Source = "scsi:0:0:0:1".parse().unwrap();
    AttachRequest::new(source)
}

fn journal_of(root: &Path) -> PathBuf {
    root.join("journal")
}

/// The process that is killed: this program, started again by the tests below. It does nothing
/// if no test has started it.
#[test]
fn does_what_its_environment_asks_for() {
    let Some(root) = env::var_os(MACHINE).map(PathBuf::from) else {
        return;
    };
    let engine = access::engine(&root);
    let journal = engine.open_journal_at(&journal_of(&root), soon()).unwrap();
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

/// The result of a run of that process.
struct Ended {
    /// The steps that it passed, in order: `scsi.scanned:1`.
    steps: Vec<String>,
    killed: bool,
    succeeded: bool,
}

impl Ended {
    /// How many records it has put in place.
    fn records(&self) -> usize {
        let is_record = |step: &&String| step.starts_with("journal.renamed:");
        self.steps.iter().filter(is_record).count()
    }
}

/// What a recovery found and did.
fn outcome(recovered: &Recovered) -> (Condition, &'static str) {
    let done = match recovered.action {
        Action::Nothing => "nothing",
        Action::Finished => "finished",
        Action::Undone => "undone",
        _ => "something else",
    };
    (recovered.condition, done)
}

/// A machine with one volume.
struct Rig {
    fake: FakeKernel,
    /// Each step at which a process was killed.
    killed: BTreeSet<String>,
    /// Steps that did not occur in the run that should have been killed there.
    passed_by: Vec<String>,
}

impl Rig {
    fn new() -> Self {
        let fake = FakeKernel::with_hosts(1);
        fake.kernel().change(|state| {
            for lun in 0..3 {
                state.units.insert(Address::of(0, lun), Unit::disk(lun));
            }
        });
        Self {
            fake,
            killed: BTreeSet::new(),
            passed_by: Vec::new(),
        }
    }

    fn kernel(&self) -> &Arc<Kernel> {
        self.fake.kernel()
    }

    fn engine(&self) -> Arc<Engine> {
        access::engine(self.fake.root())
    }

    fn journal(&self) -> PathBuf {
        journal_of(self.fake.root())
    }

    /// Runs one operation in a separate process, to its step or to its end.
    fn run(&mut self, operation: &str, step: Option<&str>) -> Ended {
        let log = self.fake.root().join("steps");
        let _not_there = fs::remove_file(&log);
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "does_what_its_environment_asks_for",
                "--nocapture",
            ])
            .env(MACHINE, self.fake.root())
            .env(OPERATION, operation)
            .env("LUNBD_CRASH_LOG", &log)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Some(step) = step {
            command.env("LUNBD_CRASH_AT", step);
        }
        let status = command.status().unwrap();
        let log = fs::read_to_string(&log).unwrap_or_default();
        let steps: Vec<String> = log.lines().map(str::to_owned).collect();
        let killed = status.signal() == Some(nix::libc::SIGKILL);
        match step {
            Some(step) if killed => {
                assert!(
                    steps.iter().any(|passed| passed == step),
                    "{operation} at {step}"
                );
                let point = step.split(':').next().unwrap();
                self.killed.insert(point.to_owned());
            }
            Some(step) => self.passed_by.push(format!("{operation} at {step}")),
            None => {}
        }
        // Wait until the kernel and udevd have finished what they had begun.
        self.kernel().settle();
        Ended {
            steps,
            killed,
            succeeded: status.success(),
        }
    }

    /// Recovers as the next process does. `None` if the journal knows no volume.
    fn recover(&self, when: &str) -> Option<Recovered> {
        let engine = self.engine();
        let journal = engine.open_journal_at(&self.journal(), soon()).unwrap();
        let mut recovery = engine.recover(&journal, soon()).unwrap();
        assert!(recovery.is_whole(), "{when}: {recovery:#?}");
        assert!(recovery.problems.is_empty(), "{when}: {recovery:#?}");
        assert!(recovery.foreign.is_empty(), "{when}: {recovery:#?}");
        assert!(recovery.volumes.len() <= 1, "{when}: {recovery:#?}");
        recovery.volumes.pop()
    }

    fn attach(&self, when: &str) -> PathBuf {
        let engine = self.engine();
        let journal = engine.open_journal_at(&self.journal(), soon()).unwrap();
        let attached = engine.attach_volume(&journal, &volume(), &request(), soon());
        attached
            .unwrap_or_else(|error| panic!("{when}: {error:#}"))
            .node
    }

    fn detach(&self, how: &DetachVolume, when: &str) {
        let engine = self.engine();
        let journal = engine.open_journal_at(&self.journal(), soon()).unwrap();
        match engine.detach_volume(&journal, &volume(), how, soon()) {
            Ok(_) => {}
            Err(failure) if failure.kind() == ErrorKind::NotFound => {}
            Err(failure) => panic!("{when}: {failure:#}"),
        }
    }

    /// Panics unless everything is gone: the device, the record and files beside it, the lock
    /// file, the mark of a failed flush, and udev's links. Each deleted disk must have been
    /// flushed after its last scan.
    fn require_gone(&self, when: &str) {
        self.kernel().settle();
        assert_eq!(self.kernel().devices(), [] as [String; 0], "{when}");
        let names = |folder: &Path| -> Vec<String> {
            let entries = fs::read_dir(folder).into_iter().flatten();
            let names = entries.map(|entry| entry.unwrap().file_name());
            names.map(|name| name.into_string().unwrap()).collect()
        };
        let root = self.fake.root();
        let mut left = names(&self.journal());
        left.retain(|name| name != "journal.lock" && !self.is_detached(name));
        for folder in ["run/lunbd", "run/udev/data", "dev/disk/by-id"] {
            left.extend(names(&root.join(folder)));
        }
        assert_eq!(left, [] as [String; 0], "{when}");
        let mut flushed = true;
        for act in self.kernel().acts() {
            match act.split(' ').next() {
                Some("scan") => flushed = false,
                Some("flush") => flushed = true,
                Some("delete") => assert!(flushed, "{when}: {:?}", self.kernel().acts()),
                _ => {}
            }
        }
    }

    /// Whether a file of the journal says that its volume was detached.
    fn is_detached(&self, name: &str) -> bool {
        let read = fs::read(self.journal().join(name));
        let record = read.ok().and_then(|bytes| Record::parse(&bytes).ok());
        record.is_some_and(|record| record.detached.is_some())
    }

    fn grow(&self) -> u64 {
        self.kernel().change(|state| {
            let unit = state.units.get_mut(&Address::of(0, 1)).unwrap();
            unit.bytes += 1 << 20;
            unit.bytes
        })
    }

    fn size(&self, node: &Path) -> u64 {
        let name = node.file_name().unwrap();
        let size = self.fake.root().join("sys/block").join(name).join("size");
        fs::read_to_string(size)
            .unwrap()
            .trim()
            .parse::<u64>()
            .unwrap()
            * 512
    }

    fn attach_killed_at(&mut self, step: Option<&str>) -> Vec<String> {
        let when = format!("attach at {}", step.unwrap_or("no step"));
        // The process also creates its journal.
        let _not_there = fs::remove_dir_all(self.journal());
        let ended = self.run("attach", step);
        assert!(ended.killed || ended.succeeded, "{when}");
        if ended.killed {
            let stood = !self.kernel().devices().is_empty();
            let recovered = self.recover(&when);
            // The intent is the first record, and the outcome the second.
            let expected = match (ended.records(), stood) {
                (0, _) => None,
                (1, false) => Some((Condition::Gone, "undone")),
                (1, true) => Some((Condition::HalfAttached, "finished")),
                _ => Some((Condition::Complete, "nothing")),
            };
            assert_eq!(recovered.as_ref().map(outcome), expected, "{when}");
            if recovered.and_then(|one| one.node).is_none() {
                self.require_gone(&when);
            }
        }
        self.attach(&when);
        assert_eq!(self.kernel().devices(), ["0:0:0:1"], "{when}");
        ended.steps
    }

    fn resize_killed_at(&mut self, all: &[String], step: Option<&str>) -> Vec<String> {
        let when = format!("resize at {}", step.unwrap_or("no step"));
        let bytes = self.grow();
        let ended = self.run("resize", step);
        assert!(ended.killed || ended.succeeded, "{when}");
        if let Some(step) = step.filter(|_| ended.killed) {
            let recovered = self.recover(&when).expect("the volume");
            if !is_before_intent(all, step) {
                assert_eq!(self.size(&recovered.node.unwrap()), bytes, "{when}");
            }
        }
        let engine = self.engine();
        let journal = engine.open_journal_at(&self.journal(), soon()).unwrap();
        let resized = engine.resize_volume(&journal, &volume(), None, soon());
        assert_eq!(resized.unwrap().size, bytes, "{when}");
        ended.steps
    }

    fn detach_killed_at(&mut self, all: &[String], step: Option<&str>) -> Vec<String> {
        let when = format!("detach at {}", step.unwrap_or("no step"));
        let ended = self.run("detach", step);
        assert!(ended.killed || ended.succeeded, "{when}");
        if let Some(step) = step.filter(|_| ended.killed) {
            let stood = !self.kernel().devices().is_empty();
            let recovered = self.recover(&when);
            let expected = match (ended.records(), stood) {
                (0, _) => Some((Condition::Complete, "nothing")),
                (_, true) => Some((Condition::HalfDetached, "finished")),
                // The record is removed last, and may be gone.
                (_, false) => recovered.as_ref().map(|_| (Condition::Gone, "finished")),
            };
            assert_eq!(recovered.as_ref().map(outcome), expected, "{when}");
            if is_before_intent(all, step) {
                let recovered = recovered.expect("the volume");
                assert_eq!(recovered.condition, Condition::Complete, "{when}");
                self.detach(&DetachVolume::default(), &when);
            }
        }
        self.require_gone(&when);
        ended.steps
    }
}

/// Whether a kill at this step comes before the operation is recorded.
fn is_before_intent(steps: &[String], step: &str) -> bool {
    let position = |wanted: &str| steps.iter().position(|step| step == wanted);
    match (position(step), position("journal.renamed:1")) {
        (Some(step), Some(renamed)) => step < renamed,
        _ => false,
    }
}

/// The points of these kinds at which no run was killed.
fn missed(killed: &BTreeSet<String>, kinds: &[&str]) -> Vec<&'static str> {
    let points = CrashPoint::ALL.iter().map(|point| point.as_str());
    let of_kind = |point: &&str| kinds.iter().any(|kind| point.starts_with(kind));
    points
        .filter(of_kind)
        .filter(|point| !killed.contains(*point))
        .collect()
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
    println!("{steps} steps, passed by: {:?}", rig.passed_by);
    assert!(rig.passed_by.len() * 5 <= steps, "{:?}", rig.passed_by);
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
            let journal = engine.open_journal_at(&directory, soon()).unwrap();
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
            let journal = engine.open_journal_at(&rig.journal(), soon()).unwrap();
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
