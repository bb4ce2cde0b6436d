//! The command as users have it, each of whose acts on the kernel fails once in every
//! way, and once never returns: the error names the stage, what stands is said, and
//! the next try succeeds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
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

/// A caller's patience where something hangs, and where nothing should.
const SHORT: &str = "10s";
const LONG: &str = "60s";

/// A sweep over the acts of one volume's attach and detach.
pub struct FaultSweep<'a> {
    what: &'static str,
    begun: Instant,
    place: Place,
    source: String,
    attach_options: &'static [&'static str],
    /// Unless the sweep is whole, of so many acts in a row one is tried.
    one_of: usize,
    is_tried: fn(&str) -> bool,
    stands: Box<dyn Fn() -> bool + 'a>,
    injected: usize,
    /// How each came out.
    outcomes: BTreeMap<String, usize>,
    acts: BTreeSet<String>,
}

impl fmt::Debug for FaultSweep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultSweep")
            .field("what", &self.what)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

impl<'a> FaultSweep<'a> {
    /// Over all acts; `stands` says whether anything of the volume does. Unless it is
    /// whole, each act has one of the faults.
    #[must_use]
    pub fn new(what: &'static str, source: &str, stands: impl Fn() -> bool + 'a) -> Self {
        Self {
            what,
            begun: Instant::now(),
            place: Place::new(),
            source: source.to_owned(),
            attach_options: &[],
            one_of: 1,
            is_tried: |_| true,
            stands: Box::new(stands),
            injected: 0,
            outcomes: BTreeMap::new(),
            acts: BTreeSet::new(),
        }
    }

    /// The attach has these options too.
    #[must_use]
    pub fn attach_options(mut self, options: &'static [&'static str]) -> Self {
        self.attach_options = options;
        self
    }

    /// Over these acts alone; unless it is whole, over every fifth of them.
    #[must_use]
    pub fn every_fifth_of(mut self, is_tried: fn(&str) -> bool) -> Self {
        (self.is_tried, self.one_of) = (is_tried, 5);
        self
    }

    fn arguments<'b>(&'b self, operation: &'b str, timeout: &'b str) -> Vec<&'b str> {
        let journal = self.place.path().to_str().expect("a path in UTF-8");
        let mut arguments = vec![operation];
        if operation == "attach" {
            arguments.push(&self.source);
            arguments.extend(self.attach_options);
        }
        arguments.extend(["--volume", "pvc-1", "--journal", journal]);
        arguments.extend(["--timeout", timeout]);
        arguments
    }

    /// The acts of one that nothing happens to.
    fn acts(&self, operation: &str) -> Vec<String> {
        let traced = inject::run(&self.arguments(operation, LONG), None);
        assert_eq!(traced.code, Some(0), "{operation}: {traced:?}");
        println!("acts of an {operation}: {:?}", traced.acts);
        let mut acts = traced.acts;
        acts.retain(|act| (self.is_tried)(act));
        acts
    }

    fn succeeds(&self, operation: &str, more: &[&str], after: &str) {
        let done = super::lunbd(&[&self.arguments(operation, LONG), more].concat());
        assert!(done.status.success(), "{operation} after {after}: {done:?}");
    }

    fn is_known(&self) -> bool {
        self.place.path().join("pvc-1.json").exists()
    }

    /// Each act in its turn.
    pub fn run(&mut self) {
        let attach = self.acts("attach");
        let detach = self.acts("detach");
        let (step, whole) = (self.one_of, super::sweeps_are_whole());
        for (operation, acts) in [("attach", attach), ("detach", detach)] {
            for (turn, act) in acts.iter().enumerate() {
                let one = turn / step % FAULTS.len();
                let faults = if whole {
                    &FAULTS[..]
                } else if turn % step == 0 {
                    &FAULTS[one..=one]
                } else {
                    &[]
                };
                for &fault in faults {
                    if operation == "detach" {
                        self.succeeds("attach", &[], "the last");
                    }
                    self.one(operation, act, fault);
                }
            }
        }
    }

    /// One fault, and the next try.
    fn one(&mut self, operation: &str, act: &str, fault: Fault) {
        let when = format!("{operation}, {act}, {fault:?}");
        let timeout = if fault == Fault::Hangs { SHORT } else { LONG };
        let traced = inject::run(&self.arguments(operation, timeout), Some((act, fault)));
        let Traced { code, said, .. } = &traced;
        let stage = traced.stage().unwrap_or("none");
        let seconds = traced.took.as_secs_f64();
        println!("{when}: exit {code:?}, stage {stage}, {seconds:.1} s: {said}");
        assert!(
            traced.took < Duration::from_secs(90),
            "{when}: it hung with its call"
        );
        let code = code.unwrap_or_else(|| panic!("{when}: it was killed"));
        if traced.injected {
            self.injected += 1;
            self.acts.insert(format!("{operation} {act}"));
            let outcome = if code == 0 {
                "succeeded all the same"
            } else {
                "failed with its stage"
            };
            *self.outcomes.entry(outcome.to_owned()).or_default() += 1;
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

    /// Prints the tally; these acts had their fault, and all but a few, which do not
    /// come in every run.
    #[track_caller]
    pub fn conclude(self, acts: &[&str]) {
        for act in acts {
            assert!(self.acts.contains(*act), "{act}: {:?}", self.acts);
        }
        super::tell(&format!(
            "{}: {} faults in {} acts in {} s: {:?}",
            self.what,
            self.injected,
            self.acts.len(),
            self.begun.elapsed().as_secs(),
            self.outcomes
        ));
        let whole = super::sweeps_are_whole();
        let each = if whole { FAULTS.len() } else { 1 };
        assert!(self.injected >= self.acts.len() * each * 9 / 10);
    }
}
