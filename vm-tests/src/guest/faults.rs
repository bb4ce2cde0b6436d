//! Each act of an attach and of a detach on the kernel fails once in every way,
//! and once never returns: the error names the stage, what stands is said, and
//! the next try succeeds.
//!
//! The program under test is the command as users have it. See
//! [`inject`] for how a call is taken away from it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::process::Output;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::crash::Place;
use super::inject::{self, Fault, Traced};

/// In which ways an act fails.
pub const FAULTS: [Fault; 5] = [
    Fault::Fails(Errno::EIO),
    Fault::Fails(Errno::EBUSY),
    Fault::Fails(Errno::ENODEV),
    Fault::Fails(Errno::ETIMEDOUT),
    Fault::Hangs,
];

/// A caller's patience: all that does not hang is done long before it has passed.
const PATIENCE: Duration = Duration::from_mins(5);
/// Where something hangs: this and the time of so many that nothing happens to, or
/// the time were over before the act that is to hang.
const SHORT_PATIENCE: Duration = Duration::from_secs(10);
const TIMES: u32 = 4;

/// A sweep over the acts of one volume's attach and detach.
pub struct FaultSweep<'a> {
    what: &'static str,
    place: Place,
    /// Several are paths of one map.
    sources: Vec<String>,
    attach_options: &'static [&'static str],
    is_tried: fn(&str) -> bool,
    one_in: usize,
    between: Box<dyn Fn() + 'a>,
    stands: Box<dyn Fn() -> bool + 'a>,
}

impl fmt::Debug for FaultSweep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultSweep")
            .field("what", &self.what)
            .field("sources", &self.sources)
            .finish_non_exhaustive()
    }
}

/// What a sweep did.
#[derive(Debug, Default)]
struct Tally {
    /// The calls that were to fail.
    planned: usize,
    failed: usize,
    hung: usize,
    /// How each came out.
    outcomes: BTreeMap<&'static str, usize>,
    /// What was found to be done when nothing happened to it.
    listed: BTreeSet<String>,
    acts: BTreeSet<String>,
}

impl<'a> FaultSweep<'a> {
    /// Over all acts; `stands` says whether anything of the volume does. Unless it is
    /// whole, of all faults of all acts one in so many is tried, on 6.1 others than on
    /// the other kernels: no multiple of the number of faults, so that each has its turn.
    #[must_use]
    pub fn new(
        what: &'static str,
        sources: Vec<String>,
        one_in: usize,
        stands: impl Fn() -> bool + 'a,
    ) -> Self {
        Self {
            what,
            place: Place::new(),
            sources,
            attach_options: &[],
            is_tried: |_| true,
            one_in,
            between: Box::new(|| {}),
            stands: Box::new(stands),
        }
    }

    /// The attach has these options too.
    #[must_use]
    pub fn attach_options(mut self, options: &'static [&'static str]) -> Self {
        self.attach_options = options;
        self
    }

    /// These acts alone have faults.
    #[must_use]
    pub fn only(mut self, is_tried: fn(&str) -> bool) -> Self {
        self.is_tried = is_tried;
        self
    }

    /// This is done between each attach and its detach.
    #[must_use]
    pub fn between(mut self, what: impl Fn() + 'a) -> Self {
        self.between = Box::new(what);
        self
    }

    fn arguments(&self, operation: &str, patience: Duration) -> Vec<String> {
        let journal = self.place.path().to_str().expect("a path of ours");
        let mut arguments = vec![operation.to_owned()];
        if operation == "attach" {
            arguments.extend(self.sources.iter().cloned());
            arguments.extend(self.attach_options.iter().map(|&option| option.to_owned()));
        }
        let timeout = format!("{}s", patience.as_secs());
        let rest = [
            "--volume",
            "pvc-1",
            "--journal",
            journal,
            "--timeout",
            &timeout,
        ];
        arguments.extend(rest.map(str::to_owned));
        arguments
    }

    /// One that nothing happens to.
    fn undisturbed(&self, operation: &str) -> Traced {
        let traced = inject::run(&self.arguments(operation, PATIENCE), None);
        assert_eq!(traced.code, Some(0), "{operation}: {traced:?}");
        println!("acts of {operation}: {:?}", traced.acts);
        traced
    }

    fn ends(&self, operation: &str, more: &[&str]) -> Output {
        let arguments = self.arguments(operation, PATIENCE);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        super::lunbd(&[arguments.as_slice(), more].concat())
    }

    fn succeeds(&self, operation: &str, more: &[&str], after: &str) {
        let done = self.ends(operation, more);
        assert!(done.status.success(), "{operation} after {after}: {done:?}");
        if operation == "attach" {
            (self.between)();
        }
    }

    fn is_known(&self) -> bool {
        self.place.path().join("pvc-1.json").exists()
    }

    /// Runs it, and prints the tally. These acts are among those of a run that nothing
    /// happened to, and where the sweep is whole each had its faults.
    #[track_caller]
    pub fn run(&self, among: &[&str]) {
        let begun = Instant::now();
        let tally = self.sweep();
        super::tell(&format!(
            "{}: {} calls failed and {} hung, in {} acts, in {} s: {:?}",
            self.what,
            tally.failed,
            tally.hung,
            tally.acts.len(),
            begun.elapsed().as_secs(),
            tally.outcomes
        ));
        tally.conclude(among);
    }

    fn sweep(&self) -> Tally {
        let mut tally = Tally::default();
        let attach = self.undisturbed("attach");
        (self.between)();
        let detach = self.undisturbed("detach");
        let mut faults = Vec::new();
        for (operation, traced) in [("attach", &attach), ("detach", &detach)] {
            let acts = &traced.acts;
            tally
                .listed
                .extend(acts.iter().map(|act| format!("{operation} {act}")));
            let tried = acts.iter().filter(|act| (self.is_tried)(act));
            faults.extend(tried.flat_map(|act| FAULTS.map(|fault| (operation, act, fault))));
        }
        let short = SHORT_PATIENCE + TIMES * attach.took.max(detach.took);
        let (first, one_in) = match (super::sweeps_are_whole(), &*super::series()) {
            (true, _) => (0, 1),
            (false, "6.1") => (0, self.one_in),
            (false, _) => (self.one_in / 2, self.one_in),
        };
        let tried = faults.into_iter().skip(first).step_by(one_in);
        for (operation, act, fault) in tried {
            if operation == "detach" {
                self.succeeds("attach", &[], "the last");
            }
            let patience = match fault {
                Fault::Hangs => short,
                Fault::Fails(_) => PATIENCE,
            };
            self.one(operation, act, fault, patience, &mut tally);
        }
        tally
    }

    /// One fault, and the next try.
    fn one(&self, operation: &str, act: &str, fault: Fault, patience: Duration, tally: &mut Tally) {
        let when = format!("{operation}, {act}, {fault:?}");
        let traced = inject::run(&self.arguments(operation, patience), Some((act, fault)));
        let Traced { code, said, .. } = &traced;
        let stage = traced.stage().unwrap_or("none");
        let seconds = traced.took.as_secs_f64();
        println!("{when}: exit {code:?}, stage {stage}, {seconds:.1} s: {said}");
        assert!(traced.took < 2 * patience, "{when}: it hung with its call");
        // Only what hangs takes its caller's whole time.
        let waited = fault != Fault::Hangs && said["kind"] == "timed_out";
        assert!(!waited, "{when}: it waited for what failed: {said}");
        let code = code.unwrap_or_else(|| panic!("{when}: it was killed"));
        tally.take_in(&traced, fault, code);
        if traced.injected {
            tally.acts.insert(format!("{operation} {act}"));
        }
        let (stands, known) = ((self.stands)(), self.is_known());
        match (operation, code) {
            ("attach", 0) => assert!(stands && known, "{when}: {stands} {known}"),
            ("detach", 0) => assert!(!stands && !known, "{when}: {stands} {known}"),
            _ => {
                assert_ne!(stage, "none", "{when}: {said}");
                // What stands is in the journal, for the next try or a recovery.
                assert!(known || !stands, "{when}: it stands and nobody knows");
                if operation == "attach" && code != 6 {
                    let said_to_stand = said["last_seen"].is_string();
                    assert!(!stands || said_to_stand, "{when}: it stands: {said}");
                }
            }
        }
        if operation == "attach" {
            self.succeeds("attach", &[], &when);
        }
        if stage == "flush" && code != 6 {
            // What a second flush would prove is nothing.
            let again = self.ends("detach", &[]);
            let said = String::from_utf8_lossy(&again.stderr);
            assert!(said.contains("an earlier flush"), "{when}: {said}");
            self.succeeds("detach", &["--abandon-unwritten"], &when);
        } else if self.is_known() {
            self.succeeds("detach", &[], &when);
        }
        assert!(!(self.stands)(), "{when}: it stands");
        self.place.require_clean(&when);
    }
}

impl Tally {
    fn take_in(&mut self, traced: &Traced, fault: Fault, code: i32) {
        let count = usize::from(traced.injected);
        match fault {
            Fault::Hangs => self.hung += count,
            Fault::Fails(_) => {
                self.planned += 1;
                self.failed += count;
            }
        }
        let outcome = match (traced.injected, code) {
            (false, _) => "did not come",
            (true, 0) => "succeeded all the same",
            (true, _) => "failed with its stage",
        };
        *self.outcomes.entry(outcome).or_default() += 1;
    }

    #[track_caller]
    fn conclude(&self, among: &[&str]) {
        let had = if super::sweeps_are_whole() {
            &self.acts
        } else {
            &self.listed
        };
        for act in among {
            assert!(had.contains(*act), "{act}: {had:?}");
        }
        // All but a few, which do not come in every run: one in ten, and one of fewer.
        let few = (self.planned / 10).max(1);
        let enough = self.failed + few >= self.planned;
        assert!(enough, "{} of {}", self.failed, self.planned);
    }
}
