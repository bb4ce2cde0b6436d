//! A sweep of kills: the steps of an operation at which this run kills an agent, what a
//! recovery finds after each kill, and the tally.
//!
//! Most steps write a file: the journal, a lock, the mark of a flush. The host's tests
//! (`tests/killed_on_a_fake_kernel`) kill a process at each of those of a SCSI volume, whose code
//! the other volumes share. Here a sweep names the kinds of steps that need a kernel, and those
//! whose code the host's volume does not pass, such as the marks of several paths. Of the other
//! steps it has the one at which the record of an operation gets its name, since the record
//! decides what a recovery does.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use lunbd::engine::{Action, Condition, Recovered};

use super::agent::{engine, soon};
use super::crash::{Ended, Place, Run, points};
use super::rotation::Part;

/// The steps at which a record of the journal gets its name.
const RECORDED: &str = "journal.renamed:";

/// The tally of a sweep over all steps of this run's part.
#[derive(Debug)]
pub struct KillSweep {
    what: &'static str,
    kinds: &'static [&'static str],
    part: Part,
    begun: Instant,
    /// How many steps the operations have, of this part and of the others.
    steps: usize,
    /// The steps at which an agent was killed, by operation.
    killed: BTreeMap<String, Vec<String>>,
    passed_by: Vec<String>,
    found: BTreeMap<String, usize>,
    /// The last record of each operation that was not killed.
    last_records: BTreeMap<String, String>,
    /// What kills left of the journal, by the last step before the kill that changed it.
    left: BTreeMap<String, (Vec<String>, usize)>,
}

impl KillSweep {
    /// A sweep without a kill so far, at steps whose names begin with one of `kinds`.
    #[must_use]
    pub fn new(what: &'static str, kinds: &'static [&'static str]) -> Self {
        Self {
            what,
            kinds,
            part: Part::of_this_run(),
            begun: Instant::now(),
            steps: 0,
            killed: BTreeMap::new(),
            passed_by: Vec::new(),
            found: BTreeMap::new(),
            last_records: BTreeMap::new(),
            left: BTreeMap::new(),
        }
    }

    /// The steps of an operation at which this run kills. A whole sweep kills at all of them.
    pub fn select(&mut self, operation: &str, steps: &[String]) -> Vec<String> {
        println!("steps of {operation}: {steps:?}");
        let of_sweep = steps.iter().filter(|step| {
            let mut kinds = self.kinds.iter();
            super::sweeps_are_whole()
                || step.starts_with(RECORDED)
                || kinds.any(|kind| step.starts_with(kind))
        });
        let of_sweep: Vec<&String> = of_sweep.collect();
        self.steps += of_sweep.len();
        let is_mine = |step: &&&String| self.part.has(&format!("{operation} {step}"));
        of_sweep.iter().filter(is_mine).copied().cloned().collect()
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
        self.compare_what_is_left(place, operation, &ended);
        let mut backwards = ended.steps.iter().rev();
        let last_record = backwards.find(|step| step.starts_with(RECORDED));
        if let Some(record) = last_record.filter(|_| !ended.killed) {
            let operation = operation.to_owned();
            self.last_records.insert(operation, record.clone());
        }
        ended
    }

    /// Recovers from the kill of an attach. Once the attach has recorded its outcome, the recovery
    /// must keep the volume.
    #[track_caller]
    pub fn recover_attach(
        &mut self,
        place: &Place,
        ended: &Ended,
        when: &str,
    ) -> Option<Recovered> {
        let recovered = self.recover(place, when);
        let outcome = &self.last_records["attach"];
        if ended.steps.contains(outcome) {
            let found = recovered.as_ref().map(|one| (one.condition, &one.action));
            let is_kept = matches!(found, Some((Condition::Complete, Action::Nothing)));
            assert!(is_kept, "{when}: {recovered:?}");
        }
        recovered
    }

    /// Requires that all kills of this run after one step of the journal leave the same journal,
    /// whatever else was done meanwhile. A reset of the machine then needs a test only at that
    /// step. A run of a part compares the kills of that part, and a whole sweep compares all.
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
            let killed = self.killed.entry(operation.to_owned()).or_default();
            killed.push(step.to_owned());
        } else {
            // Some steps, such as questions to udev, do not occur equally often in every run.
            self.pass_by(operation, step);
        }
    }

    /// Counts a step that did not come again.
    pub fn pass_by(&mut self, operation: &str, step: &str) {
        self.passed_by.push(format!("{operation} {step}"));
    }

    /// Recovers with a new engine without any earlier knowledge, and requires that the rest of
    /// the volume is whole. `None` if the journal does not know the volume.
    #[track_caller]
    pub fn recover(&mut self, place: &Place, when: &str) -> Option<Recovered> {
        let engine = engine();
        let begun = Instant::now();
        let journal = place.open(&engine);
        let recovery = engine.recover(&journal, soon());
        let mut recovery = recovery.unwrap_or_else(|error| panic!("{when}: {error:#}"));
        // A returned server answers within seconds, or the recovery asks again.
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

    /// Prints the tally. A whole sweep must have killed at each point of these kinds.
    #[track_caller]
    pub fn conclude(self, kinds: &[&str]) {
        let kills: usize = self.killed.values().map(Vec::len).sum();
        let killed = self.killed.values().flatten();
        let met: BTreeSet<&str> = killed.filter_map(|step| step.split(':').next()).collect();
        let all: BTreeSet<String> = kinds.iter().flat_map(|kind| points(kind)).collect();
        let missed = || all.iter().filter(|point| !met.contains(point.as_str()));
        let points = format!(
            "{} of the {} points of {}",
            all.len() - missed().count(),
            all.len(),
            kinds.join(", ")
        );
        let steps = self.killed.iter().map(|(operation, steps)| {
            let steps = steps.join(" ");
            format!("{operation} {steps}")
        });
        let steps: Vec<String> = steps.collect();
        super::tell_met(&format!(
            "{} kills: {kills} of {} steps this run ({}), {points}, in {} s, {} did not come \
             again {:?}: {}",
            self.what,
            self.steps,
            self.part,
            self.begun.elapsed().as_secs(),
            self.passed_by.len(),
            self.passed_by,
            steps.join("; "),
        ));
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
        let missed: Vec<&String> = missed().collect();
        assert!(missed.is_empty(), "no kill at {missed:?}");
        super::tell_whole_sweep(
            &format!("kills, {}", self.what),
            format!("{kills} kills, {} did not come again", self.passed_by.len()),
            points,
            self.begun.elapsed(),
        );
    }
}

/// Whether the step may leave other journal records on the disk than the step before it.
#[must_use]
pub fn changes_journal(step: &str) -> bool {
    let own = step.strip_prefix("journal.");
    let looks = ["to-", "made", "locked"];
    own.is_some_and(|step| !looks.iter().any(|name| step.starts_with(name)))
}

/// Whether a kill at this step comes before the operation is recorded.
#[must_use]
pub fn is_before_intent(steps: &[String], step: &str) -> bool {
    let position = |wanted: &str| steps.iter().position(|step| step == wanted);
    match (position(step), position("journal.renamed:1")) {
        (Some(step), Some(renamed)) => step < renamed,
        _ => false,
    }
}
