//! Sweeps over the acts of an attach and of a detach on the kernel: each act fails or never
//! returns. A seed takes a fifth of the acts, and the fifth seed after it takes the same acts
//! with another fault. The command must end as the sweep's table says, the journal must know
//! what is attached, and the next try must succeed.
//!
//! The program under test is the command as users have it. See [`inject`] for how a call is
//! replaced, and [`table`](super::fault_table) for the required results.

use std::collections::BTreeSet;
use std::fmt;
use std::process::Output;
use std::time::{Duration, Instant};

use lunbd::Deadline;

use super::agent::engine;
use super::crash::Place;
use super::fault_table::{Ended, FAULTS, Row, expected, faults_of};
use super::inject::{self, Fault, Traced};
use super::rotation::Part;

/// The deadline of a call that does not hang: it ends long before.
const PATIENCE: Duration = Duration::from_mins(5);
/// The deadline of a call that hangs: this and [`TIMES`] times the duration of an undisturbed
/// call. Otherwise the deadline would pass before the act that has to hang.
const SHORT_PATIENCE: Duration = Duration::from_secs(4);
const TIMES: u32 = 3;

/// A sweep over the acts of one volume's attach and detach.
pub struct FaultSweep<'a> {
    what: &'static str,
    table: &'static [Row],
    part: Part,
    place: Place,
    /// Several sources are paths of one map.
    sources: Vec<String>,
    attach_options: &'static [&'static str],
    is_tried: fn(&str) -> bool,
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

/// One act of an operation and its fault.
#[derive(Debug, Clone)]
struct Injection {
    act: String,
    fault: Fault,
    patience: Duration,
}

/// What a sweep did.
#[derive(Debug, Default)]
struct Tally {
    /// All acts with all faults, of this run's part and of the others.
    all: usize,
    planned: usize,
    /// Injections that happened, and injections whose act did not occur.
    met: Vec<String>,
    missed: Vec<String>,
    hung: usize,
    succeeded: usize,
    /// The acts of an undisturbed run.
    listed: BTreeSet<String>,
    /// Results that differ from the table.
    wrong: Vec<String>,
}

impl<'a> FaultSweep<'a> {
    /// A sweep over all acts; `stands` says whether anything of the volume is attached. Each
    /// act must end as its row of `table` says.
    #[must_use]
    pub fn new(
        what: &'static str,
        sources: Vec<String>,
        table: &'static [Row],
        stands: impl Fn() -> bool + 'a,
    ) -> Self {
        Self {
            what,
            table,
            part: Part::of_this_run(),
            place: Place::new(),
            sources,
            attach_options: &[],
            is_tried: |_| true,
            between: Box::new(|| {}),
            stands: Box::new(stands),
        }
    }

    /// Adds options to the attach.
    #[must_use]
    pub fn attach_options(mut self, options: &'static [&'static str]) -> Self {
        self.attach_options = options;
        self
    }

    /// Limits the faults to these acts, each named as in the table: `attach write scan:1`.
    #[must_use]
    pub fn only(mut self, is_tried: fn(&str) -> bool) -> Self {
        self.is_tried = is_tried;
        self
    }

    /// Runs this between each attach and its detach.
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

    /// Runs an operation without a fault.
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

    /// Whether the journal has the volume, other than as one whose detach is proven.
    fn is_known(&self) -> bool {
        let limit = Deadline::after(PATIENCE);
        let journal = engine().read_journal_at(self.place.path(), limit);
        let journal = journal.expect("a journal");
        assert!(journal.problems.is_empty(), "{:?}", journal.problems);
        !journal.records.is_empty()
    }

    /// Runs the sweep and prints the tally. The acts `among` must occur in an undisturbed run.
    #[track_caller]
    pub fn run(&self, among: &[&str]) {
        let begun = Instant::now();
        let tally = self.sweep();
        let took = begun.elapsed();
        super::tell_met(&format!(
            "{} faults: {} of {} this run ({}), {} of them hung and {} let the command \
             succeed, in {} s, {} did not come {:?}: {}",
            self.what,
            tally.met.len(),
            tally.all,
            self.part,
            tally.hung,
            tally.succeeded,
            took.as_secs(),
            tally.missed.len(),
            tally.missed,
            tally.met.join("; "),
        ));
        tally.conclude(among);
        if super::sweeps_are_whole() {
            super::tell_whole_sweep(
                &format!("failing and hanging calls, {}", self.what),
                format!(
                    "{} failed, {} hung, {} did not come",
                    tally.met.len() - tally.hung,
                    tally.hung,
                    tally.missed.len()
                ),
                format!("{} acts", tally.listed.len()),
                took,
            );
        }
    }

    fn sweep(&self) -> Tally {
        let mut tally = Tally::default();
        let attach = self.undisturbed("attach");
        (self.between)();
        let detach = self.undisturbed("detach");
        let short = SHORT_PATIENCE + TIMES * attach.took.max(detach.took);
        let attaches = self.select("attach", &attach, short, &mut tally);
        let detaches = self.select("detach", &detach, short, &mut tally);
        tally.planned = attaches.len() + detaches.len();
        // An attach and a detach take turns with their faults. Each is the other's next try,
        // which saves a third command.
        for turn in 0..attaches.len().max(detaches.len()) {
            let mut when = "a turn".to_owned();
            if let Some(injection) = attaches.get(turn) {
                when = self.one("attach", injection, &mut tally);
            }
            self.succeeds("attach", &[], &when);
            match detaches.get(turn) {
                Some(injection) => when = self.one("detach", injection, &mut tally),
                None => self.succeeds("detach", &[], &when),
            }
            assert!(!(self.stands)(), "{when}: it stands");
            self.place.require_clean(&when);
        }
        tally
    }

    /// The faults of this run's part. Each act must have a row with each fault.
    fn select(
        &self,
        operation: &str,
        traced: &Traced,
        short: Duration,
        tally: &mut Tally,
    ) -> Vec<Injection> {
        let is_tried = |act: &&String| (self.is_tried)(&format!("{operation} {act}"));
        let acts: Vec<String> = traced.acts.iter().filter(is_tried).cloned().collect();
        for act in &acts {
            let name = format!("{operation} {act}");
            for fault in FAULTS {
                tally.wrong.extend(expected(self.table, &name, fault).err());
            }
            tally.all += FAULTS.len();
            tally.listed.insert(name);
        }
        let mine = faults_of(self.part, super::seed(), operation, &acts);
        let injection = |(act, fault)| Injection {
            act,
            fault,
            patience: if fault == Fault::Hangs {
                short
            } else {
                PATIENCE
            },
        };
        mine.into_iter().map(injection).collect()
    }

    /// Injects one fault; after a detach it also makes the next try. Returns the name of the
    /// injection.
    fn one(&self, operation: &str, injection: &Injection, tally: &mut Tally) -> String {
        let when = format!("{operation} {} {}", injection.act, injection.fault);
        let mut traced = self.disturbed(operation, injection, &when);
        // On a busy machine the deadline may pass before the act that has to hang.
        if !traced.injected && traced.said["kind"] == "timed_out" {
            self.start_over(operation, &when);
            let patient = Injection {
                patience: 2 * injection.patience,
                ..injection.clone()
            };
            traced = self.disturbed(operation, &patient, &when);
        }
        if traced.injected {
            tally
                .wrong
                .extend(self.judge(operation, injection, &traced));
            tally.met.push(when.clone());
            tally.hung += usize::from(injection.fault == Fault::Hangs);
            tally.succeeded += usize::from(traced.code == Some(0));
        } else {
            tally.missed.push(when.clone());
        }
        if operation == "attach" {
            return when;
        }
        if traced.stage() == Some("flush") && traced.code != Some(6) {
            // A second flush would prove nothing.
            let again = self.ends("detach", &[]);
            let said = String::from_utf8_lossy(&again.stderr);
            assert!(said.contains("an earlier flush"), "{when}: {said}");
            self.succeeds("detach", &["--abandon-unwritten"], &when);
        } else if self.is_known() {
            self.succeeds("detach", &[], &when);
        }
        when
    }

    /// Runs an operation with a fault. The journal must know what stands afterwards.
    fn disturbed(&self, operation: &str, injection: &Injection, when: &str) -> Traced {
        let Injection {
            act,
            fault,
            patience,
        } = injection;
        let traced = inject::run(&self.arguments(operation, *patience), Some((act, *fault)));
        let Traced { code, said, .. } = &traced;
        let stage = traced.stage();
        let seconds = traced.took.as_secs_f64();
        println!("{when}: exit {code:?}, stage {stage:?}, {seconds:.1} s: {said}");
        assert!(traced.took < 2 * *patience, "{when}: it hung with its call");
        // Only a call that hangs takes its caller's whole time.
        let waited = *fault != Fault::Hangs && said["kind"] == "timed_out";
        assert!(!waited, "{when}: it waited for what failed: {said}");
        let code = code.unwrap_or_else(|| panic!("{when}: it was killed"));
        let (stands, known) = ((self.stands)(), self.is_known());
        match (operation, code) {
            ("attach", 0) => assert!(stands && known, "{when}: {stands} {known}"),
            ("detach", 0) => assert!(!stands && !known, "{when}: {stands} {known}"),
            _ => {
                // The journal has what is attached, for the next try or a recovery.
                assert!(known || !stands, "{when}: it stands and nobody knows");
                if operation == "attach" && code != 6 {
                    let said_to_stand = said["last_seen"].is_string();
                    assert!(!stands || said_to_stand, "{when}: it stands: {said}");
                }
            }
        }
        traced
    }

    /// Restores what was there before an operation that timed out.
    fn start_over(&self, operation: &str, when: &str) {
        if operation == "attach" {
            self.succeeds("attach", &[], when);
            self.succeeds("detach", &[], when);
        } else {
            if self.is_known() {
                self.succeeds("detach", &[], when);
            }
            self.succeeds("attach", &[], when);
        }
    }

    /// The difference between the command's end and the table.
    fn judge(&self, operation: &str, injection: &Injection, traced: &Traced) -> Option<String> {
        let Injection { act, fault, .. } = injection;
        let said = &traced.said;
        let ended = if traced.code != Some(0) {
            let kind = said["kind"].as_str().unwrap_or("none");
            Ended::Refused(traced.stage().unwrap_or("none"), kind)
        } else if operation == "detach" && said["safe_to_unmap"] != true {
            Ended::SucceededInDoubt
        } else {
            Ended::Succeeded
        };
        let row = expected(self.table, &format!("{operation} {act}"), *fault);
        let compared = row.and_then(|row| row.compare(*fault, ended));
        let problem = compared.err()?;
        Some(format!(
            "{operation} {act} {fault}: {problem}: {}",
            traced.said
        ))
    }
}

impl Tally {
    #[track_caller]
    fn conclude(&self, among: &[&str]) {
        for act in among {
            assert!(self.listed.contains(*act), "{act}: {:?}", self.listed);
        }
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        assert!(self.hung > 0, "nothing hung");
        // One injection in ten may be missed, because some acts do not occur in every run.
        let few = self.planned / 10;
        let missed = &self.missed;
        assert!(
            missed.len() <= few,
            "of {} did not come: {missed:?}",
            self.planned
        );
    }
}
