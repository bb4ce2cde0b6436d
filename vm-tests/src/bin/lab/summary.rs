//! The counts of a run, and how they are shown.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use vm_tests::job::{Outcome, TestCase};

use crate::boot::Ended;
use crate::cost::{Cost, Costs};
use crate::kernel::Series;
use crate::remains::Remains;
use crate::seed::SEED;

/// One column of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Count {
    Passed,
    Failed,
    Skipped,
    TimedOut,
    GuestPanicked,
    UnexpectedSkip,
}

impl Count {
    const ALL: [(Self, &str); 6] = [
        (Self::Passed, "passed"),
        (Self::Failed, "failed"),
        (Self::Skipped, "skipped"),
        (Self::TimedOut, "timed out"),
        (Self::GuestPanicked, "guest panicked"),
        (Self::UnexpectedSkip, "skipped unexpectedly"),
    ];
}

/// The tests of one file on one kernel.
#[derive(Debug, Default)]
struct OfFile {
    /// How many tests have not ended yet.
    left: usize,
    passed: usize,
    /// The total cost of the tests that passed.
    cost: Cost,
}

/// A test's time on the wall and on the processors of its machine.
fn shown_seconds(cost: Cost) -> String {
    let (wall, processor) = (cost.wall.as_secs_f64(), cost.processor.as_secs_f64());
    format!("{wall:7.1} s {processor:6.1} CPU")
}

/// The counts of a whole run, by where the tests ran.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    /// Whether each passed test has a line, or each file.
    each_test: bool,
    rows: Vec<(String, BTreeMap<Count, usize>)>,
    /// The VM tests that failed, with their evidence. They are shown again at the end of the
    /// run, because some readers keep only the end of a run.
    failed: Vec<String>,
    /// The passed tests of each file that has not ended, by kernel and name.
    files: BTreeMap<(Series, String), OfFile>,
    /// Reasons to fail that belong to no test: a suite that did not build.
    broken: Vec<String>,
    pub(crate) costs: Costs,
    boots: usize,
    /// Boots that did not come up and were tried again.
    repeated_boots: usize,
    /// Tests that were run again, each with its kernel.
    again: Vec<String>,
    /// Which points of each sweep were met, by its test.
    points_met: Vec<String>,
}

impl Summary {
    /// At most so many tests of a run may run again because the emulator killed their kernel.
    const MOST_AGAIN: usize = 2;

    pub(crate) fn new(each_test: bool) -> Result<Self> {
        Ok(Self {
            each_test,
            costs: Costs::of_this_process()?,
            ..Self::default()
        })
    }

    pub(crate) fn shows_each_test(&self) -> bool {
        self.each_test
    }

    /// Makes each file's line wait for all of its tests in `tests`.
    pub(crate) fn expect(&mut self, series: Series, tests: &[TestCase]) {
        for test in tests {
            let file = self.files.entry((series, test.file.clone()));
            file.or_default().left += 1;
        }
    }

    /// Makes each file with tests that have no outcome a failure of the run.
    pub(crate) fn add_missing(&mut self) {
        let files = self.files.iter().filter(|(_, file)| file.left > 0);
        let missing = files.map(|((series, name), file)| {
            format!("{series}: tests of {name} did not run: {}", file.left)
        });
        self.broken.extend(missing.collect::<Vec<_>>());
    }

    /// Shows and counts the outcome of a VM test.
    pub(crate) fn add_vm_test(
        &mut self,
        series: Series,
        test: &str,
        outcome: &Outcome,
        skip_expected: bool,
        cost: Cost,
        remains: Option<Remains<'_>>,
    ) {
        let (count, word, why) = match outcome {
            Outcome::Passed => (Count::Passed, "PASS", None),
            Outcome::Failed(why) => (Count::Failed, "FAIL", Some(why.as_str())),
            Outcome::Skipped(why) if skip_expected => (Count::Skipped, "SKIP", Some(why.as_str())),
            Outcome::Skipped(why) => (Count::UnexpectedSkip, "FAIL", Some(why.as_str())),
            Outcome::TimedOut => (Count::TimedOut, "TIME", Some("killed at its time limit")),
            Outcome::GuestPanicked => (Count::GuestPanicked, "DIED", Some("the kernel panicked")),
        };
        self.count(&format!("VM, {series}"), count, 1);
        let passed = (count == Count::Passed).then_some(cost);
        if passed.is_some() && !self.each_test {
            return self.add_to_file(series, test, passed);
        }
        let mut shown = format!("{word} {}  {series:<6} {test}", shown_seconds(cost));
        if count == Count::UnexpectedSkip {
            shown.push_str(": a skip that is not expected on this kernel");
        }
        if let Some(why) = why {
            shown.push_str(": ");
            shown.push_str(why);
        }
        if let Some(remains) = remains {
            shown.push('\n');
            shown.push_str(&remains.shown());
        }
        println!("{shown}");
        if !matches!(count, Count::Passed | Count::Skipped) {
            self.failed.push(shown);
        }
        self.add_to_file(series, test, passed);
    }

    /// Prints a file's line when the last of its tests has ended. Prints none if each test has
    /// a line.
    fn add_to_file(&mut self, series: Series, test: &str, passed: Option<Cost>) {
        let file = test.split("::").next().unwrap_or(test);
        let key = (series, file.to_owned());
        let Some(of_file) = self.files.get_mut(&key) else {
            return;
        };
        of_file.left = of_file.left.saturating_sub(1);
        if let Some(cost) = passed {
            of_file.passed += 1;
            of_file.cost += cost;
        }
        if of_file.left == 0
            && let Some(OfFile { passed, cost, .. }) = self.files.remove(&key)
            && passed > 0
            && !self.each_test
        {
            let cost = shown_seconds(cost);
            println!("{cost}  {series:<6} {file}: {passed} passed");
        }
    }

    /// Counts one of cargo's suites.
    pub(crate) fn add_host_suite(&mut self, passed: usize, failed: usize, ignored: usize) {
        for (count, number) in [
            (Count::Passed, passed),
            (Count::Failed, failed),
            (Count::Skipped, ignored),
        ] {
            self.count("host", count, number);
        }
    }

    /// Adds a failure that belongs to no test; the same text counts once.
    pub(crate) fn add_broken(&mut self, why: String) {
        if !self.broken.contains(&why) {
            self.broken.push(why);
        }
    }

    pub(crate) fn add_boot(&mut self, series: Series, ended: &Ended) {
        self.boots += 1;
        self.repeated_boots += ended.attempts - 1;
        self.costs.add(&format!("machines of {series}"), ended.cost);
        self.costs
            .add("of these, until they were up", ended.cost_until_up);
    }

    /// Keeps for the last lines which points of a sweep this test has met.
    pub(crate) fn add_points_met(&mut self, series: Series, test: &str, points: &str) {
        println!("     {points}");
        let (file, _) = test.split_once("::").unwrap_or((test, ""));
        self.points_met
            .push(format!("{series:<6} {file}: {points}"));
    }

    /// Whether a test whose kernel the emulator killed may run again.
    pub(crate) fn may_run_again(&mut self, series: Series, test: &str, log: &Path) -> bool {
        if self.again.len() == Self::MOST_AGAIN {
            return false;
        }
        self.again.push(format!("{series} {test}"));
        println!(
            "AGAIN            {series:<6} {test}: the emulated machine met an instruction that \
             its kernel was done replacing, and died of it\n     log: {}",
            log.display()
        );
        true
    }

    pub(crate) fn succeeded(&self) -> bool {
        self.totals().1 == 0 && self.broken.is_empty()
    }

    /// Prints the table, and the one line that ends the run.
    pub(crate) fn print(&self) -> Result<()> {
        println!();
        for (row, counts) in &self.rows {
            let shown: Vec<String> = Count::ALL
                .iter()
                .filter_map(|(count, name)| Some((counts.get(count)?, name)))
                .filter(|(number, name)| **number > 0 || **name == "passed")
                .map(|(number, name)| format!("{number} {name}"))
                .collect();
            println!("{row:<12} {}", shown.join(", "));
        }
        for points in &self.points_met {
            println!("points       {points}");
        }
        for test in &self.failed {
            println!("{test}");
        }
        for why in &self.broken {
            println!("broken       {why}");
        }
        for line in self.costs.lines()? {
            println!("{line}");
        }
        println!("{}", self.boots_line());
        for test in &self.again {
            println!("AGAIN        {test}");
        }
        println!("LUNBD_VM_SEED={}", *SEED);
        println!("{}", self.last_line());
        Ok(())
    }

    fn boots_line(&self) -> String {
        format!(
            "{} boots, {} further attempts at one, {} of at most {} tests run again",
            self.boots,
            self.repeated_boots,
            self.again.len(),
            Self::MOST_AGAIN
        )
    }

    fn last_line(&self) -> String {
        let (passed, failed, skipped) = self.totals();
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }

    fn totals(&self) -> (usize, usize, usize) {
        let sum = |wanted: &[Count]| -> usize {
            let counts = self.rows.iter().flat_map(|(_, counts)| counts);
            counts
                .filter(|(count, _)| wanted.contains(count))
                .map(|(_, number)| number)
                .sum()
        };
        let failures = [
            Count::Failed,
            Count::TimedOut,
            Count::GuestPanicked,
            Count::UnexpectedSkip,
        ];
        // A broken suite is a failure, and the last line must show it.
        let failed = sum(&failures) + self.broken.len();
        (sum(&[Count::Passed]), failed, sum(&[Count::Skipped]))
    }

    fn count(&mut self, row: &str, count: Count, number: usize) {
        let index = self
            .rows
            .iter()
            .position(|(name, _)| name == row)
            .unwrap_or_else(|| {
                self.rows.push((row.to_owned(), BTreeMap::new()));
                self.rows.len() - 1
            });
        *self.rows[index].1.entry(count).or_insert(0) += number;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_is_not_a_pass_or_an_expected_skip_fails_the_run() {
        let mut summary = Summary::default();
        summary.add_host_suite(40, 0, 0);
        let mut add = |outcome, expected| {
            summary.add_vm_test(
                Series::V6_1,
                "lab::x",
                &outcome,
                expected,
                Cost::default(),
                None,
            );
        };
        add(Outcome::Passed, false);
        add(Outcome::Skipped("old".into()), true);
        add(Outcome::Skipped("why not".into()), false);
        add(Outcome::TimedOut, false);
        add(Outcome::GuestPanicked, false);
        add(Outcome::Failed("panicked".into()), false);
        assert_eq!(summary.last_line(), "41 passed, 4 failed, 1 skipped");
        let words: Vec<&str> = summary.failed.iter().map(|shown| &shown[..4]).collect();
        assert_eq!(words, ["FAIL", "TIME", "DIED", "FAIL"]);
        assert!(summary.failed.iter().all(|shown| shown.contains("lab::x")));
        assert!(!summary.succeeded());
    }

    #[test]
    fn a_file_is_over_when_each_of_its_tests_has_ended_however_it_did() {
        let mut summary = Summary::default();
        let file = |name: &str| TestCase {
            file: "lab".into(),
            name: name.into(),
        };
        summary.expect(Series::V6_1, &[file("x"), file("y"), file("z")]);
        let mut left = Vec::new();
        for outcome in [
            Outcome::Failed("panicked".into()),
            Outcome::Skipped("old".into()),
            Outcome::Passed,
        ] {
            left.extend(summary.files.values().map(|file| file.left));
            summary.add_vm_test(
                Series::V6_1,
                "lab::x",
                &outcome,
                true,
                Cost::default(),
                None,
            );
        }
        assert_eq!(left, [3, 2, 1]);
        assert!(summary.files.is_empty());
        summary.add_missing();
        assert!(summary.broken.is_empty());
        summary.expect(Series::V6_1, &[file("x")]);
        summary.add_missing();
        assert_eq!(summary.broken, ["6.1: tests of lab did not run: 1"]);
    }

    fn of_attempts(attempts: usize) -> Ended {
        Ended {
            attempts,
            ..Ended::default()
        }
    }

    #[test]
    fn two_tests_of_a_run_may_run_again_and_no_third() {
        let mut summary = Summary::default();
        let log = Path::new("log");
        assert!(summary.may_run_again(Series::V6_1, "lab::x", log));
        assert!(summary.may_run_again(Series::V6_1, "lab::x", log));
        assert!(!summary.may_run_again(Series::Newest, "lab::y", log));
        summary.add_boot(Series::V6_1, &of_attempts(1));
        summary.add_boot(Series::V6_1, &of_attempts(3));
        assert_eq!(
            summary.boots_line(),
            "2 boots, 2 further attempts at one, 2 of at most 2 tests run again"
        );
    }

    #[test]
    fn a_suite_that_did_not_build_is_a_failure_in_the_last_line() {
        let mut summary = Summary::default();
        summary.add_host_suite(3, 0, 0);
        assert!(summary.succeeded());
        summary.add_broken("the host suite did not build".into());
        assert_eq!(summary.last_line(), "3 passed, 1 failed, 0 skipped");
        assert!(!summary.succeeded());
        summary.add_host_suite(0, 1, 0);
        assert_eq!(summary.last_line(), "3 passed, 2 failed, 0 skipped");
    }
}
