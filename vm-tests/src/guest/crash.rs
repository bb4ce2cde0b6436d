//! A process that is killed at a named step of its work, and the volume that it works on.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use lunbd::engine::{Journal, Multipath, NbdOptions};
use lunbd::id::{VolumeId, Wwid};
use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Engine, Source};
use serde_json::Value;

use super::agent::{journal_files, soon};
use super::iscsid::INITIATOR;
use super::unwritten::keep_unwritten;

/// The agent's output when its attach has finished.
pub const ATTACHED: &str = "attached";

const AGENT: &str = "crash-agent";
const LEASES: &str = "/run/lunbd";

/// The volume of every test here.
#[must_use]
pub fn volume() -> VolumeId {
    "pvc-1".parse().expect("a volume id")
}

/// How the agent attaches its sources: several sources are paths of one map. A unit name among
/// the sources is the expected identity.
#[must_use]
pub fn request(sources: &[String]) -> AttachRequest {
    let is_name = |word: &&String| word.parse::<Wwid>().is_ok();
    let (names, sources): (Vec<&String>, Vec<&String>) = sources.iter().partition(is_name);
    let expected = names.iter().filter_map(|name| name.parse::<Wwid>().ok());
    let mut sources = sources.into_iter().map(|source| -> Source {
        let parsed = source.parse();
        parsed.unwrap_or_else(|error| panic!("{source}: {error}"))
    });
    let first = sources.next().expect("a source");
    let logs_in = matches!(first, Source::Iscsi(_));
    let request = AttachRequest::new(first).nbd(options());
    let mut request = expected.fold(request, AttachRequest::expect);
    if logs_in {
        let initiator = INITIATOR.parse().expect("a name");
        request = request.log_in(SessionOptions::new(initiator));
    }
    let more: Vec<Source> = sources.collect();
    if more.is_empty() {
        return request;
    }
    let count = more.len() + 1;
    let all = more.into_iter().fold(request, AttachRequest::path);
    all.min_paths(count).multipath(Multipath::Require)
}

/// The kernel resends a request after this time if it was in flight when its server died. A
/// live server answers sooner, on a busy machine too: no process heals a link that dies where
/// no server was killed.
#[must_use]
pub fn options() -> NbdOptions {
    NbdOptions::default().io_timeout(Duration::from_secs(5))
}

/// The content of the volume, written anew in each turn.
#[derive(Debug, Clone, Copy, Default)]
pub struct Data(pub u8);

impl Data {
    const LENGTH: usize = 64 << 10;

    fn bytes(self) -> Vec<u8> {
        let seed = usize::from(self.0);
        let byte = |place: usize| (place / 512 + place + seed * 31) % 251;
        (0..Self::LENGTH)
            .map(|place| u8::try_from(byte(place)).expect("less than 251"))
            .collect()
    }

    /// Panics unless the content is there.
    #[track_caller]
    pub fn compare(&self, node: &Path, when: &str) {
        let mut found = vec![0; Self::LENGTH];
        let file = File::open(node).unwrap_or_else(|error| panic!("{when}: {error}"));
        let read = file.read_exact_at(&mut found, 0);
        read.unwrap_or_else(|error| panic!("{when}: {error}"));
        assert!(found == self.bytes(), "{when}: {} differs", node.display());
    }

    /// Writes other data to the page cache. It stays there until the returned file is dropped
    /// or flushed: the file is a reader, which does not prevent a detach of the disk.
    #[must_use]
    pub fn write_anew(&mut self, node: &Path) -> File {
        self.0 = self.0.wrapping_add(1);
        let reader = keep_unwritten(node);
        let file = OpenOptions::new().write(true).open(node).expect("the node");
        file.write_all_at(&self.bytes(), 0).expect("a write");
        reader
    }
}

/// The path of a journal's directory. It is not created here; it is removed on drop.
#[derive(Debug)]
pub struct Place(PathBuf);

impl Place {
    /// A path that belongs to this process.
    #[must_use]
    pub fn new() -> Self {
        super::enter();
        let path = PathBuf::from(format!("/tmp/journal-{}", std::process::id()));
        let _not_there = fs::remove_dir_all(&path);
        Self(path)
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Opens the journal.
    #[must_use]
    pub fn open(&self, engine: &Engine) -> Journal {
        engine.open_journal_at(&self.0, soon()).expect("a journal")
    }

    /// The content of the journal's files, without times and sizes.
    pub(super) fn state(&self) -> Vec<String> {
        let mut names = super::entries(&self.0);
        names.retain(|name| name != "journal.lock");
        names.sort();
        let say = |name: String| {
            let text = fs::read_to_string(self.0.join(&name)).unwrap_or_default();
            let body = text.split_once('\n').map_or("", |(_, body)| body);
            let Ok(record) = serde_json::from_str::<Value>(body) else {
                return format!("{name} has {} bytes and is no record", text.len());
            };
            let (doing, done) = (&record["intent"]["operation"], !record["outcome"].is_null());
            let detached = !record["detached"].is_null();
            format!("{name}: doing {doing}, attached before: {done}, detached: {detached}")
        };
        names.into_iter().map(say).collect()
    }

    /// Panics if anything is left: a record that is not of a proven detach, a file beside it,
    /// a lock file or the mark of a failed flush.
    #[track_caller]
    pub fn require_clean(&self, when: &str) {
        let journal = journal_files(&self.0);
        let leases = super::entries(LEASES).into_iter().map(|name| {
            let text = fs::read_to_string(Path::new(LEASES).join(&name)).unwrap_or_default();
            format!("{name}: {}", text.trim_end())
        });
        let left: Vec<String> = journal.into_iter().chain(leases).collect();
        assert!(left.is_empty(), "{when}: {left:?} left");
    }
}

impl Default for Place {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _gone_already = fs::remove_dir_all(&self.0);
    }
}

/// The crash points whose names have this prefix.
#[must_use]
pub fn points(kind: &str) -> BTreeSet<String> {
    let listed = super::run(&[AGENT, "points"]);
    let names = listed.lines().filter(|name| name.starts_with(kind));
    names.map(str::to_owned).collect()
}

/// One run of the agent.
#[derive(Debug)]
pub struct Run {
    child: Child,
    step: Option<String>,
    log: PathBuf,
    what: String,
}

/// How a run ended.
#[derive(Debug)]
pub struct Ended {
    /// The steps that it passed, in order: `scsi.scanned:1`.
    pub steps: Vec<String>,
    /// The agent was killed at its step.
    pub killed: bool,
    /// The agent's exit status.
    pub status: ExitStatus,
}

impl Run {
    /// Starts an agent that is killed at `step`, or runs to its end.
    #[must_use]
    pub fn start(place: &Place, operation: &str, sources: &[String], step: Option<&str>) -> Self {
        let (mut command, log) = command(place.path(), operation, sources);
        if let Some(step) = step {
            command.env("LUNBD_CRASH_AT", step);
        }
        Self::spawn(command, log, operation, step)
    }

    /// Starts an agent that stops at `step` (SIGSTOP).
    #[must_use]
    pub fn start_to_stop(journal: &Path, operation: &str, sources: &[String], step: &str) -> Self {
        let (mut command, log) = command(journal, operation, sources);
        command.env("LUNBD_CRASH_AT", step);
        command.env("LUNBD_CRASH_STOP", "1");
        Self::spawn(command, log, operation, Some(step))
    }

    fn spawn(mut command: Command, log: PathBuf, operation: &str, step: Option<&str>) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self {
            child: command.spawn().expect(AGENT),
            what: format!("{operation} at {}", step.unwrap_or("no step")),
            step: step.map(str::to_owned),
            log,
        }
    }

    /// Whether the agent prints that it has attached, before it ends.
    pub fn says_attached(&mut self) -> bool {
        let output = self.child.stdout.take().expect("its output");
        let mut line = String::new();
        let read = BufReader::new(output).read_line(&mut line);
        read.expect("its output");
        line.trim() == ATTACHED
    }

    /// The steps that the agent has passed so far.
    #[must_use]
    pub fn steps(&self) -> Vec<String> {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Lets the agent continue.
    pub fn go_on(&mut self) {
        let mut input = self.child.stdin.take().expect("its input");
        let _ended_already = input.write_all(b"\n");
    }

    /// Waits until the agent is at its step, for a process that the kernel holds and that does
    /// not end at once.
    pub fn wait_until_at_step(&self) {
        super::wait_until(&self.what, Duration::from_secs(60), || {
            let log = fs::read_to_string(&self.log).ok()?;
            let mut steps = log.lines();
            steps
                .any(|step| Some(step) == self.step.as_deref())
                .then_some(())
        });
    }

    /// Waits until the kernel has stopped the agent at its step.
    pub fn wait_until_stopped(&self) {
        let stat = format!("/proc/{}/stat", self.child.id());
        super::wait_until(&self.what, Duration::from_secs(60), || {
            (state_of(&stat)? == 'T').then_some(())
        });
        self.wait_until_at_step();
    }

    /// Waits until the agent ends, or until none of its threads runs any more: a process does
    /// not end while the kernel holds one of its reads.
    fn wait(&mut self) -> ExitStatus {
        /// A thread that exits also waits for the kernel now and then.
        const HELD: Duration = Duration::from_secs(10);
        let start = Instant::now();
        let mut held = start;
        loop {
            if let Some(status) = self.child.try_wait().expect("the agent") {
                return status;
            }
            if !is_held_dead(self.child.id()) {
                held = Instant::now();
            }
            if held.elapsed() > HELD {
                return ExitStatus::from_raw(nix::libc::SIGKILL);
            }
            super::pause_between_looks(start);
        }
    }

    /// Waits until the agent has ended.
    #[must_use]
    pub fn end(mut self) -> Ended {
        let status = self.wait();
        let steps = self.steps();
        let _never_made = fs::remove_file(&self.log);
        let killed = status.signal() == Some(nix::libc::SIGKILL);
        if killed {
            let last = steps.iter().any(|step| Some(step) == self.step.as_ref());
            assert!(last, "{}: killed, and not at its step", self.what);
        }
        Ended {
            steps,
            killed,
            status,
        }
    }
}

/// The command of an agent, and the file in which it records its steps.
fn command(journal: &Path, operation: &str, sources: &[String]) -> (Command, PathBuf) {
    let log = PathBuf::from(format!("/tmp/steps-{}", std::process::id()));
    let _not_there = fs::remove_file(&log);
    let mut command = Command::new(AGENT);
    command.arg(operation).arg(journal).args(sources);
    command.env("LUNBD_CRASH_LOG", &log);
    (command, log)
}

/// The state letter of a process or a thread in its `stat`.
fn state_of(stat: &str) -> Option<char> {
    let stat = fs::read_to_string(stat).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether a process was killed and none of its threads runs any more: only threads that the
/// kernel holds delay its end.
fn is_held_dead(pid: u32) -> bool {
    let process = format!("/proc/{pid}");
    let threads = super::entries(format!("{process}/task"));
    let others = threads.iter().filter(|thread| **thread != pid.to_string());
    let held = |thread: &String| state_of(&format!("{process}/task/{thread}/stat")) == Some('D');
    state_of(&format!("{process}/stat")) == Some('Z') && others.clone().count() > 0 && {
        let mut others = others;
        others.all(held)
    }
}
