//! A process that ends at a named step of its work, and what is found after it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use lunbd::engine::{Action, Condition, Journal, Multipath, NbdOptions, Recovered};
use lunbd::id::{VolumeId, Wwid};
use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Engine, Source};
use serde_json::Value;

use super::agent::{engine, soon};
use super::iscsid::INITIATOR;

/// What the agent says when its attach has come to its end.
pub const ATTACHED: &str = "attached";

const AGENT: &str = "crash-agent";
const LEASES: &str = "/run/lunbd";

/// The volume that everything here is about.
#[must_use]
pub fn volume() -> VolumeId {
    "pvc-1".parse().expect("a volume id")
}

/// How its sources are attached: several are paths of one map. The name of a unit
/// among them is the one that is expected.
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

/// A request that was under way when its server died is sent again this soon. A server
/// that lives answers sooner, on a busy machine too: nobody heals a link that dies
/// where no server was killed.
#[must_use]
pub fn options() -> NbdOptions {
    NbdOptions::default().io_timeout(Duration::from_secs(5))
}

/// What is on the volume: written anew in each turn.
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

    /// Panics unless it is there.
    #[track_caller]
    pub fn compare(&self, node: &Path, when: &str) {
        let mut found = vec![0; Self::LENGTH];
        let file = File::open(node).unwrap_or_else(|error| panic!("{when}: {error}"));
        let read = file.read_exact_at(&mut found, 0);
        read.unwrap_or_else(|error| panic!("{when}: {error}"));
        assert!(found == self.bytes(), "{when}: {} differs", node.display());
    }

    /// Writes other data to the page cache. The last close would write it to the
    /// device.
    #[must_use]
    pub fn write_anew(&mut self, node: &Path) -> File {
        self.0 = self.0.wrapping_add(1);
        let file = OpenOptions::new().write(true).open(node).expect("the node");
        file.write_all_at(&self.bytes(), 0).expect("a write");
        file
    }
}

/// A journal's directory, which is not made here; removed on drop.
#[derive(Debug)]
pub struct Place(PathBuf);

impl Place {
    /// One of this process.
    #[must_use]
    pub fn new() -> Self {
        super::enter();
        let path = PathBuf::from(format!("/tmp/journal-{}", std::process::id()));
        let _not_there = fs::remove_dir_all(&path);
        Self(path)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Opens it.
    #[must_use]
    pub fn open(&self, engine: &Engine) -> Journal {
        engine.open_journal_at(&self.0, soon()).expect("a journal")
    }

    /// What its files say, but for times and sizes.
    fn state(&self) -> Vec<String> {
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
            format!("{name}: doing {doing}, attached before: {done}")
        };
        names.into_iter().map(say).collect()
    }

    /// What says that something is left: no record and no file beside it, no
    /// lease and no mark of a flush.
    #[track_caller]
    pub fn require_clean(&self, when: &str) {
        let mut left = super::entries(&self.0);
        left.retain(|name| name != "journal.lock");
        left.extend(super::entries(LEASES));
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

/// The points whose names begin so; all with an empty text.
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
    /// The steps that it passed, in their order: `scsi.scanned:1`.
    pub steps: Vec<String>,
    /// It was killed at its step.
    pub killed: bool,
    /// What it left with.
    pub status: ExitStatus,
}

impl Run {
    /// Starts one that is killed at `step`, or comes to its end.
    #[must_use]
    pub fn start(place: &Place, operation: &str, sources: &[String], step: Option<&str>) -> Self {
        let log = place.path().with_extension("steps");
        let _not_there = fs::remove_file(&log);
        let mut command = Command::new(AGENT);
        command.arg(operation).arg(place.path()).args(sources);
        command.env("LUNBD_CRASH_LOG", &log);
        if let Some(step) = step {
            command.env("LUNBD_CRASH_AT", step);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn().expect(AGENT);
        let what = format!("{operation} at {}", step.unwrap_or("no step"));
        let step = step.map(str::to_owned);
        Self {
            child,
            step,
            log,
            what,
        }
    }

    /// Whether it says that it has attached, before it ends.
    pub fn says_attached(&mut self) -> bool {
        let output = self.child.stdout.take().expect("its output");
        let mut line = String::new();
        let read = BufReader::new(output).read_line(&mut line);
        read.expect("its output");
        line.trim() == ATTACHED
    }

    /// Lets it go on.
    pub fn go_on(&mut self) {
        let mut input = self.child.stdin.take().expect("its input");
        let _ended_already = input.write_all(b"\n");
    }

    /// Waits until it is at its step, where a process that the kernel holds does
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

    /// Waits for its end, or until nothing of it runs any more: a process does not
    /// end while the kernel holds a read of its.
    fn wait(&mut self) -> ExitStatus {
        /// On its way out a thread waits for the kernel now and then as well.
        const HELD: Duration = Duration::from_secs(10);
        let mut held = Instant::now();
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
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it has ended.
    #[must_use]
    pub fn end(mut self) -> Ended {
        let status = self.wait();
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let _never_made = fs::remove_file(&self.log);
        let steps: Vec<String> = log.lines().map(str::to_owned).collect();
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

/// Whether a process was killed, and only threads that the kernel holds keep it
/// from its end: nothing of it runs any more.
fn is_held_dead(pid: u32) -> bool {
    let state = |stat: &str| {
        let stat = fs::read_to_string(stat).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    };
    let process = format!("/proc/{pid}");
    let threads = super::entries(format!("{process}/task"));
    let others = threads.iter().filter(|thread| **thread != pid.to_string());
    let held = |thread: &String| state(&format!("{process}/task/{thread}/stat")) == Some('D');
    state(&format!("{process}/stat")) == Some('Z') && others.clone().count() > 0 && {
        let mut others = others;
        others.all(held)
    }
}

/// The tally of a sweep over all steps.
#[derive(Debug)]
pub struct Sweep {
    what: &'static str,
    begun: Instant,
    killed: BTreeMap<String, usize>,
    passed_by: Vec<String>,
    found: BTreeMap<String, usize>,
    /// What kills left of the journal, by the last step of its own before.
    left: BTreeMap<String, (Vec<String>, usize)>,
}

impl Sweep {
    /// Nothing is killed yet.
    #[must_use]
    pub fn new(what: &'static str) -> Self {
        Self {
            what,
            begun: Instant::now(),
            killed: BTreeMap::new(),
            passed_by: Vec::new(),
            found: BTreeMap::new(),
            left: BTreeMap::new(),
        }
    }

    /// Runs one operation to its step, or to its end.
    #[track_caller]
    pub fn run(
        &mut self,
        place: &Place,
        operation: &str,
        sources: &[String],
        step: Option<&str>,
    ) -> Ended {
        let ended = Run::start(place, operation, sources, step).end();
        self.count(operation, step, &ended);
        let status = ended.status;
        assert!(
            ended.killed || status.success(),
            "{operation} at {step:?}: {status}"
        );
        // Of an opening what is left is what was planted.
        if operation != "open" {
            self.compare_what_is_left(place, operation, &ended);
        }
        ended
    }

    /// Requires that kills after one step of the journal leave the same journal,
    /// whatever was done meanwhile: so a reset of the machine needs to be tried at that
    /// step alone.
    #[track_caller]
    pub fn compare_what_is_left(&mut self, place: &Place, operation: &str, ended: &Ended) {
        if !ended.killed {
            return;
        }
        let last = ended.steps.iter().rev().find(|step| changes_journal(step));
        let since = last.map_or("its begin", String::as_str);
        let since = format!("{operation}, {since}");
        let state = place.state();
        let (before, times) = self.left.entry(since.clone()).or_insert((state.clone(), 0));
        *times += 1;
        let at = ended.steps.last();
        assert_eq!(*before, state, "{since}: another at {at:?}");
    }

    /// Counts a run.
    pub fn count(&mut self, operation: &str, step: Option<&str>, ended: &Ended) {
        let Some(step) = step else {
            return;
        };
        if ended.killed {
            let point = step.split(':').next().unwrap_or(step);
            *self.killed.entry(point.to_owned()).or_default() += 1;
        } else {
            // How often udev is asked, say, is not the same in every run.
            self.passed_by.push(format!("{operation} {step}"));
        }
    }

    /// Recovers with an engine that knows nothing of what was before; what is
    /// left of the volume is whole. `None` where the journal does not know it.
    #[track_caller]
    pub fn recover(&mut self, place: &Place, when: &str) -> Option<Recovered> {
        let engine = engine();
        let begun = Instant::now();
        let journal = place.open(&engine);
        let recovery = engine.recover(&journal, soon());
        let mut recovery = recovery.unwrap_or_else(|error| panic!("{when}: {error:#}"));
        // A server that is back answers within seconds, or it is asked again.
        let is_dead = |one: &Recovered| one.condition == Condition::LinkDead && !one.is_whole();
        while recovery.volumes.iter().any(is_dead) && begun.elapsed() < Duration::from_secs(60) {
            println!("{when}: {recovery:?}");
            recovery = engine.recover(&journal, soon()).expect("sysfs");
        }
        assert!(recovery.is_whole(), "{when}: {recovery:#?}");
        assert!(recovery.problems.is_empty(), "{when}: {recovery:#?}");
        assert!(recovery.foreign.is_empty(), "{when}: {recovery:#?}");
        let took = begun.elapsed();
        let mut volumes = recovery.volumes;
        assert!(volumes.len() <= 1, "{when}: {volumes:#?}");
        let recovered = volumes.pop();
        let found = match &recovered {
            Some(recovered) => {
                let action = match recovered.action {
                    Action::Nothing => "nothing to do",
                    Action::Finished => "finished",
                    Action::Undone => "undone",
                    Action::Healed => "healed",
                    _ => "failed",
                };
                format!("{:?}, {action}", recovered.condition)
            }
            None => "never begun, or over".to_owned(),
        };
        println!("{when}: {found} ({} ms)", took.as_millis());
        *self.found.entry(found).or_default() += 1;
        recovered
    }

    /// Prints the tally. Each point of `kinds` had its kill, where the sweep was
    /// whole.
    #[track_caller]
    pub fn conclude(self, kinds: &[&str]) {
        let kills: usize = self.killed.values().sum();
        let seconds = self.begun.elapsed().as_secs();
        let all: BTreeSet<String> = kinds.iter().flat_map(|kind| points(kind)).collect();
        let had = all.iter().filter(|point| self.killed.contains_key(*point));
        super::tell(&format!(
            "{}: {kills} kills at {} points, {} of the {} of {} among them, in {seconds} s; \
             {} steps did not come again",
            self.what,
            self.killed.len(),
            had.count(),
            all.len(),
            kinds.join(", "),
            self.passed_by.len(),
        ));
        println!("did not come again: {:?}", self.passed_by);
        for (found, times) in &self.found {
            super::tell(&format!("{times:4} x {found}"));
        }
        for (since, (state, times)) in &self.left {
            println!("  {times:4} kills since {since} left {state:?}");
        }
        assert!(kills > 0, "nothing was killed");
        assert!(
            self.passed_by.len() * 5 <= kills,
            "too many steps did not come again"
        );
        if !super::sweeps_are_whole() {
            return;
        }
        let missed: Vec<&String> = all
            .iter()
            .filter(|point| !self.killed.contains_key(*point))
            .collect();
        assert!(missed.is_empty(), "no kill at {missed:?}");
    }
}

/// Whether the step may leave something else of the journal's records on the
/// disk than the one before it.
#[must_use]
pub fn changes_journal(step: &str) -> bool {
    let own = step.strip_prefix("journal.");
    let looks = ["to-", "made", "locked"];
    own.is_some_and(|step| !looks.iter().any(|name| step.starts_with(name)))
}

/// Whether a kill at this step comes before the operation is written down.
#[must_use]
pub fn is_before_intent(steps: &[String], step: &str) -> bool {
    let position = |wanted: &str| steps.iter().position(|step| step == wanted);
    match (position(step), position("journal.renamed:1")) {
        (Some(step), Some(renamed)) => step < renamed,
        _ => false,
    }
}
