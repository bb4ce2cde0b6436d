//! A machine with one volume, and processes that are killed in their work on it.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use lunbd::engine::journal::Record;
use lunbd::engine::{DetachVolume, Journal, Recovered};
use lunbd::id::VolumeId;
use lunbd::{AttachRequest, Deadline, Engine, ErrorKind, Source};

use crate::fake_kernel::{Address, FakeKernel, Kernel, Unit, access};

/// The machine and the operation, for [`does_what_its_environment_asks_for`](crate::does_what_its_environment_asks_for).
pub(crate) const MACHINE: &str = "LUNBD_FAKE_MACHINE";
pub(crate) const OPERATION: &str = "LUNBD_FAKE_OPERATION";

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

pub(crate) fn volume() -> VolumeId {
    "pvc-1".parse().unwrap()
}

pub(crate) fn request() -> AttachRequest {
    let source: Source = "scsi:0:0:0:1".parse().unwrap();
    AttachRequest::new(source)
}

pub(crate) fn journal_of(root: &Path) -> PathBuf {
    root.join("journal")
}

/// Opens the journal. A child that another test starts holds a journal that was just closed for
/// a moment: until its exec it has every file that is open here.
pub(crate) fn open_journal(engine: &Engine, directory: &Path) -> Journal {
    let limit = soon();
    loop {
        match engine.open_journal_at(directory, soon()) {
            Err(error) if error.kind() == ErrorKind::InUse && !limit.has_passed() => {
                std::thread::yield_now();
            }
            opened => return opened.unwrap(),
        }
    }
}

/// The result of a run of that process.
pub(crate) struct Ended {
    /// The steps that it passed, in order: `scsi.scanned:1`.
    pub(crate) steps: Vec<String>,
    pub(crate) killed: bool,
    pub(crate) succeeded: bool,
}

impl Ended {
    /// How many records it has put in place.
    pub(crate) fn records(&self) -> usize {
        let is_record = |step: &&String| step.starts_with("journal.renamed:");
        self.steps.iter().filter(is_record).count()
    }
}

/// A machine with one volume.
pub(crate) struct Rig {
    pub(crate) fake: FakeKernel,
    /// Each step at which a process was killed.
    pub(crate) killed: BTreeSet<String>,
    /// Steps that did not occur in the run that should have been killed there.
    pub(crate) passed_by: Vec<String>,
}

impl Rig {
    pub(crate) fn new() -> Self {
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

    pub(crate) fn kernel(&self) -> &Arc<Kernel> {
        self.fake.kernel()
    }

    pub(crate) fn engine(&self) -> Arc<Engine> {
        access::engine(self.fake.root())
    }

    pub(crate) fn journal(&self) -> PathBuf {
        journal_of(self.fake.root())
    }

    /// Runs one operation in a separate process, to its step or to its end.
    pub(crate) fn run(&mut self, operation: &str, step: Option<&str>) -> Ended {
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
    pub(crate) fn recover(&self, when: &str) -> Option<Recovered> {
        let engine = self.engine();
        let journal = open_journal(&engine, &self.journal());
        let mut recovery = engine.recover(&journal, soon()).unwrap();
        assert!(recovery.is_whole(), "{when}: {recovery:#?}");
        assert!(recovery.problems.is_empty(), "{when}: {recovery:#?}");
        assert!(recovery.foreign.is_empty(), "{when}: {recovery:#?}");
        assert!(recovery.volumes.len() <= 1, "{when}: {recovery:#?}");
        recovery.volumes.pop()
    }

    pub(crate) fn attach(&self, when: &str) -> PathBuf {
        let engine = self.engine();
        let journal = open_journal(&engine, &self.journal());
        let attached = engine.attach_volume(&journal, &volume(), &request(), soon());
        attached
            .unwrap_or_else(|error| panic!("{when}: {error:#}"))
            .node
    }

    pub(crate) fn detach(&self, how: &DetachVolume, when: &str) {
        let engine = self.engine();
        let journal = open_journal(&engine, &self.journal());
        match engine.detach_volume(&journal, &volume(), how, soon()) {
            Ok(_) => {}
            Err(failure) if failure.kind() == ErrorKind::NotFound => {}
            Err(failure) => panic!("{when}: {failure:#}"),
        }
    }

    /// Panics unless everything is gone: the device, the record and files beside it, the lock
    /// file, the mark of a failed flush, and udev's links. Each deleted disk must have been
    /// flushed after its last scan.
    pub(crate) fn require_gone(&self, when: &str) {
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
    pub(crate) fn is_detached(&self, name: &str) -> bool {
        let read = fs::read(self.journal().join(name));
        let record = read.ok().and_then(|bytes| Record::parse(&bytes).ok());
        record.is_some_and(|record| record.detached.is_some())
    }

    pub(crate) fn grow(&self) -> u64 {
        self.kernel().change(|state| {
            let unit = state.units.get_mut(&Address::of(0, 1)).unwrap();
            unit.bytes += 1 << 20;
            unit.bytes
        })
    }

    pub(crate) fn size(&self, node: &Path) -> u64 {
        let name = node.file_name().unwrap();
        let size = self.fake.root().join("sys/block").join(name).join("size");
        fs::read_to_string(size)
            .unwrap()
            .trim()
            .parse::<u64>()
            .unwrap()
            * 512
    }
}
