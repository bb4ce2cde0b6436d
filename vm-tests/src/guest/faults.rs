//! Each act of an attach and of a detach on the kernel fails once in every way,
//! and once never returns: the error names the stage, what stands is said, and
//! the next try succeeds.
//!
//! The program under test is the command as users have it. See
//! [`inject`] for how a call is taken away from it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::crash::Place;
use super::inject::{self, Fault, Traced};

const FAULTS: [Fault; 5] = [
    Fault::Fails(Errno::EIO),
    Fault::Fails(Errno::EBUSY),
    Fault::Fails(Errno::ENODEV),
    Fault::Fails(Errno::ETIMEDOUT),
    Fault::Hangs,
];

/// A caller's patience where something hangs, and where nothing should: less than
/// that is enough for all that does not wait for its caller's time to be over.
const SHORT: &str = "5s";
const LONG: &str = "300s";
const ENOUGH: Duration = Duration::from_secs(240);

/// One volume, what is done to it, and how to see whether it stands.
pub struct Rig<'a> {
    /// Its journal.
    pub place: Place,
    /// Several are paths of one map.
    pub sources: Vec<String>,
    /// Whether the act has its faults here.
    pub is_tried: fn(&str) -> bool,
    /// Of all faults of all acts one in so many is tried where the sweep is not
    /// whole: no multiple of the number of faults, so that each has its turn.
    pub one_in: usize,
    /// What is done between each attach and its detach.
    pub use_it: Box<dyn Fn() + 'a>,
    /// Whether something of it stands.
    pub stands: Box<dyn Fn() -> bool + 'a>,
}

impl std::fmt::Debug for Rig<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("Rig");
        debug
            .field("sources", &self.sources)
            .finish_non_exhaustive()
    }
}

/// What a sweep did.
#[derive(Debug)]
pub struct Tally {
    what: &'static str,
    begun: Instant,
    /// The faults that were to be injected.
    planned: usize,
    injected: usize,
    /// How each came out.
    outcomes: BTreeMap<String, usize>,
    /// What was found to be done when nothing happened to it.
    listed: BTreeSet<String>,
    acts: BTreeSet<String>,
}

impl Rig<'_> {
    fn arguments<'a>(&'a self, operation: &'a str, timeout: &'a str) -> Vec<&'a str> {
        let journal = self.place.path().to_str().expect("a path of ours");
        let mut arguments = vec![operation];
        if operation == "attach" {
            arguments.extend(self.sources.iter().map(String::as_str));
            if self.sources.len() > 1 {
                arguments.extend(["--multipath", "require", "--min-paths", "2"]);
            }
        }
        arguments.extend(["--volume", "pvc-1", "--journal", journal]);
        arguments.extend(["--timeout", timeout]);
        arguments
    }

    /// The acts of one that nothing happens to.
    fn acts(&self, operation: &str) -> Vec<String> {
        let traced = inject::run(&self.arguments(operation, LONG), None);
        assert_eq!(traced.code, Some(0), "{operation}: {traced:?}");
        println!("acts of {operation}: {:?}", traced.acts);
        traced.acts
    }

    fn succeeds(&self, operation: &str, more: &[&str], after: &str) {
        let done = super::lunbd(&[&self.arguments(operation, LONG), more].concat());
        assert!(done.status.success(), "{operation} after {after}: {done:?}");
        if operation == "attach" {
            (self.use_it)();
        }
    }

    fn is_known(&self) -> bool {
        self.place.path().join("pvc-1.json").exists()
    }

    /// All faults, or one in so many of them.
    #[must_use]
    pub fn sweep(&self, what: &'static str) -> Tally {
        let mut tally = Tally {
            what,
            begun: Instant::now(),
            planned: 0,
            injected: 0,
            outcomes: BTreeMap::new(),
            listed: BTreeSet::new(),
            acts: BTreeSet::new(),
        };
        let attach = self.acts("attach");
        (self.use_it)();
        let detach = self.acts("detach");
        let mut faults = Vec::new();
        for (operation, acts) in [("attach", &attach), ("detach", &detach)] {
            tally
                .listed
                .extend(acts.iter().map(|act| format!("{operation} {act}")));
            let tried = acts.iter().filter(|act| (self.is_tried)(act));
            faults.extend(
                tried.flat_map(|act| FAULTS.iter().map(move |fault| (operation, act, *fault))),
            );
        }
        let one_in = if super::sweeps_are_whole() {
            1
        } else {
            self.one_in
        };
        for (operation, act, fault) in faults.into_iter().step_by(one_in) {
            if operation == "detach" {
                self.succeeds("attach", &[], "the last");
            }
            self.one(operation, act, fault, &mut tally);
        }
        tally
    }

    /// One fault, and the next try.
    fn one(&self, operation: &str, act: &str, fault: Fault, tally: &mut Tally) {
        let when = format!("{operation}, {act}, {fault:?}");
        let timeout = if fault == Fault::Hangs { SHORT } else { LONG };
        let traced = inject::run(&self.arguments(operation, timeout), Some((act, fault)));
        let Traced { code, said, .. } = &traced;
        let stage = traced.stage().unwrap_or("none");
        let seconds = traced.took.as_secs_f64();
        println!("{when}: exit {code:?}, stage {stage}, {seconds:.1} s: {said}");
        assert!(traced.took < ENOUGH, "{when}: it hung with its call");
        let code = code.unwrap_or_else(|| panic!("{when}: it was killed"));
        tally.planned += 1;
        if traced.injected {
            tally.injected += 1;
            tally.acts.insert(format!("{operation} {act}"));
            let outcome = if code == 0 {
                "succeeded all the same"
            } else {
                "failed with its stage"
            };
            *tally.outcomes.entry(outcome.to_owned()).or_default() += 1;
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
            let again = super::lunbd(&self.arguments("detach", LONG));
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
    /// Prints it. These acts are among those of a run that nothing happened to,
    /// and where the sweep was whole each had its faults.
    #[track_caller]
    pub fn conclude(&self, among: &[&str]) {
        super::tell(&format!(
            "{}: {} faults in {} acts in {} s: {:?}",
            self.what,
            self.injected,
            self.acts.len(),
            self.begun.elapsed().as_secs(),
            self.outcomes
        ));
        let had = if super::sweeps_are_whole() {
            &self.acts
        } else {
            &self.listed
        };
        for act in among {
            assert!(had.contains(*act), "{act}: {had:?}");
        }
        // All but a few, which do not come in every run.
        let enough = self.injected * 10 >= self.planned * 9;
        assert!(enough, "{} of {}", self.injected, self.planned);
    }
}
