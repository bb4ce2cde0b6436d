//! The tests that run anywhere, counted into the same summary.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::programs::cargo_command;
use crate::summary::Summary;

/// The default members with all that a user can switch on, then the lab's own.
const SUITES: &[&[&str]] = &[
    &[
        "test",
        "-p",
        "lunbd",
        "-p",
        "lunbd-sys",
        "--features",
        "cli,metrics",
    ],
    &["test", "-p", "vm-tests"],
];

pub(crate) fn run(summary: &mut Summary) -> Result<()> {
    for suite in SUITES {
        let shown = format!("cargo {}", suite.join(" "));
        eprintln!("{shown}");
        // All of them, though one failed: the summary is to be whole.
        let mut command = cargo_command();
        command
            .args(*suite)
            .arg("--no-fail-fast")
            .stdout(Stdio::piped());
        let mut cargo = command.spawn().context("cargo")?;
        let stdout = cargo.stdout.take().context("cargo's output")?;
        let mut any_failed = false;
        for line in BufReader::new(stdout).split(b'\n') {
            // What a failed test printed may be no text.
            let line = line.context("cargo's output")?;
            let line = String::from_utf8_lossy(&line);
            if summary.shows_each_test() || !says_that_all_is_well(&line) {
                println!("{line}");
            }
            if let Some([passed, failed, ignored]) = parse_test_result(&line) {
                any_failed |= failed > 0;
                summary.add_host_suite(passed, failed, ignored);
            }
        }
        let status = cargo.wait().context("cargo")?;
        if !status.success() && !any_failed {
            summary.add_broken(format!("{shown}: {status}"));
        }
    }
    Ok(())
}

/// What libtest prints of a binary without a failure, with and without `--quiet`.
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
