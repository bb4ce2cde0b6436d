//! The checks and the tests that run on the host beside the machines, counted into the same
//! summary.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::cost::{self, Cost};
use crate::programs::{
    SELECTION, TEST_WITH_CRASH_POINTS, WITH_CRASH_POINTS, cargo_program, command_in_workspace,
};
use crate::schedule::lock;
use crate::summary::Summary;

/// First the suite that the README names, which needs no features. Then all tests with every
/// feature that a user can enable, and the lab's own. The guest's tests belong to the same
/// selection and must not run here, so each test is named. Last the test of a library with
/// crash points, which no other suite may link.
fn suites() -> Result<Vec<Vec<String>>> {
    let mut others = tests_of_lunbd()?;
    others.retain(|test| !test.has_crash_points());
    let named = |test: Target| ["--test".to_owned(), test.name];
    let named: Vec<String> = others.into_iter().flat_map(named).collect();
    let with_features = [words(&["--lib", "--bins"]), named].concat();
    let with_crash_points = words(&[WITH_CRASH_POINTS, TEST_WITH_CRASH_POINTS].concat());
    let selected = |tests| [words(&["test"]), words(SELECTION), tests].concat();
    Ok(vec![
        words(&["test"]),
        selected(with_features),
        selected(words(&["--doc"])),
        selected(with_crash_points),
    ])
}

const CRASH_POINTS: &str = "crash-points";

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    targets: Vec<Target>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Target {
    name: String,
    kind: Vec<String>,
    #[serde(default)]
    required_features: Vec<String>,
}

impl Target {
    fn has_crash_points(&self) -> bool {
        self.required_features.iter().any(|it| it == CRASH_POINTS)
    }
}

fn tests_of_lunbd() -> Result<Vec<Target>> {
    let mut command = command_in_workspace(cargo_program());
    command.args(["metadata", "--no-deps", "--format-version", "1"]);
    let output = command.output().context("cargo metadata")?;
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let lunbd = metadata.packages.into_iter().find(|of| of.name == "lunbd");
    let targets = lunbd.context("cargo metadata has no lunbd")?.targets;
    let is_test = |target: &Target| target.kind.iter().any(|kind| kind == "test");
    Ok(targets.into_iter().filter(is_test).collect())
}

/// A program that is not done after this time ends with the status 124 of `timeout`: a test on
/// the host that hangs must not keep the outcome of the others from the reader. A build from
/// nothing takes a third of it.
const LIMIT: &str = "40m";

/// The machines go first: each waits for half of the time, and a compiler fills the rest.
fn beside_the_machines(program: impl AsRef<OsStr>) -> Command {
    let mut command = command_in_workspace("timeout");
    command
        .args(["--kill-after=1m", LIMIT, "nice", "-n", "5"])
        .arg(program);
    command
}

/// Runs a program that checks the sources. The run fails if it does.
pub(crate) fn run_program(program: &Path, summary: &Mutex<&mut Summary>) -> Result<()> {
    let start = Instant::now();
    let shown = program.display();
    eprintln!("{shown}");
    let mut running = beside_the_machines(program)
        .spawn()
        .with_context(|| shown.to_string())?;
    let processor = cost::processor_time_once_ended(running.id())?;
    let status = running.wait().with_context(|| shown.to_string())?;
    let mut summary = lock(summary);
    let wall = start.elapsed();
    summary
        .costs
        .add(&shown.to_string(), Cost { wall, processor });
    if !status.success() {
        summary.add_broken(format!("{shown}: {status}"));
    }
    Ok(())
}

pub(crate) fn run(summary: &Mutex<&mut Summary>) -> Result<()> {
    let shows_each_test = lock(summary).shows_each_test();
    for suite in suites()? {
        let shown = format!("cargo {}", suite.join(" "));
        eprintln!("{shown}");
        let start = Instant::now();
        // Run all of them even if one failed, so that the summary is complete.
        let mut command = beside_the_machines(cargo_program());
        command
            .args(&suite)
            .arg("--no-fail-fast")
            .stdout(Stdio::piped());
        let mut cargo = command.spawn().context("cargo")?;
        let stdout = cargo.stdout.take().context("cargo's output")?;
        let mut any_failed = false;
        for line in BufReader::new(stdout).split(b'\n') {
            // The output of a failed test may not be UTF-8.
            let line = line.context("cargo's output")?;
            let line = String::from_utf8_lossy(&line);
            if shows_each_test || !says_that_all_is_well(&line) {
                println!("{line}");
            }
            if let Some([passed, failed, ignored]) = parse_test_result(&line) {
                any_failed |= failed > 0;
                lock(summary).add_host_suite(passed, failed, ignored);
            }
        }
        let processor = cost::processor_time_once_ended(cargo.id())?;
        let status = cargo.wait().context("cargo")?;
        let mut summary = lock(summary);
        let wall = start.elapsed();
        summary.costs.add("host", Cost { wall, processor });
        if !status.success() && !any_failed {
            summary.add_broken(format!("{shown}: {status}"));
        }
    }
    Ok(())
}

/// Whether libtest prints this line for a binary without a failure, with or without `--quiet`.
fn says_that_all_is_well(line: &str) -> bool {
    let progress = || line.trim_start_matches(['.', 'i']).trim_start();
    line.is_empty()
        || line.starts_with("running ")
        || line.starts_with("test result: ok. ")
        || (line.starts_with("test ")
            && (line.ends_with(" ... ok") || line.contains(" ... ignored")))
        || (line.starts_with(['.', 'i'])
            && progress().chars().all(|c| c.is_ascii_digit() || c == '/'))
}

/// `test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; ...`
fn parse_test_result(line: &str) -> Option<[usize; 3]> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number = |name: &str| {
        counts
            .split("; ")
            .find_map(|count| count.strip_suffix(name)?.trim().parse().ok())
    };
    Some([number("passed")?, number("failed")?, number("ignored")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_test_of_lunbd_is_in_one_suite_with_features_and_crash_points_are_in_one_alone() {
        let suites = suites().unwrap();
        let tests = tests_of_lunbd().unwrap();
        assert!(tests.iter().any(|test| test.name == "ids"), "{tests:?}");
        for test in tests {
            let has = |suite: &&Vec<String>| suite.contains(&test.name);
            assert_eq!(suites.iter().filter(has).count(), 1, "{}", test.name);
        }
        let with_crash_points = suites
            .iter()
            .filter(|suite| suite.concat().contains(CRASH_POINTS));
        assert_eq!(with_crash_points.count(), 1);
    }

    #[test]
    fn libtests_result_line_is_counted() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; \
            0 filtered out; finished in 0.02s";
        assert_eq!(parse_test_result(line), Some([12, 3, 1]));
        assert_eq!(parse_test_result("running 3 tests"), None);
    }

    #[test]
    fn in_a_pipe_only_what_is_not_well_is_shown() {
        let well = [
            "",
            "running 2 tests",
            "test lun::is_spelt ... ok",
            "test lun::is_old ... ignored, why",
            "..i. 88/305",
            ".",
            "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        ];
        let told = [
            "test lun::is_spelt ... FAILED",
            "lun::is_spelt --- FAILED",
            "thread 'lun::is_spelt' panicked at src/id/lun.rs:1:1:",
            "...and more",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured",
        ];
        assert!(well.into_iter().all(says_that_all_is_well));
        assert!(!told.into_iter().any(says_that_all_is_well));
    }
}
