//! The host's job for the guest, and the guest's reports.
//!
//! A job travels as `/job.json` in the initramfs. Reports come back over the guest's second
//! serial port, one JSON object per line. Both ends are built from this file, so the format
//! needs no version.

use serde::{Deserialize, Serialize};

/// The kernel parameter by which a program knows that it runs in the guest; its value is the
/// kernel's series.
pub const GUEST_MARK: &str = "lunbd_vm";

/// The kernel parameter with the seed of random choices.
pub const SEED_MARK: &str = "lunbd_seed";
/// The kernel parameter that makes a sweep take every step instead of a part.
pub const WHOLE_SWEEPS: &str = "lunbd_whole_sweeps";
/// The program of all VM tests, in the guest.
pub const TESTS_PROGRAM: &str = "/tests/guest";
/// The directory of the guest's own files; tests must not use it.
pub const STATE_DIR: &str = "/run/lunbd-vm";
/// A test writes here why it skips, then exits with [`SKIP_STATUS`].
pub const SKIP_FILE: &str = "/run/lunbd-vm/skip";
/// A line of a test's output with this prefix is shown also if the test passes.
pub const TOLD: &str = "told: ";
/// The beginning of the line that says which points of a sweep a test has met.
pub const MET: &str = "met: ";
/// The exit status of a test that skips, the same as in automake and TAP harnesses.
pub const SKIP_STATUS: i32 = 77;
/// A test that needs longer than [`DEFAULT_LIMIT_SECS`] writes its limit here, in seconds.
pub const LIMIT_FILE: &str = "/run/lunbd-vm/limit";
/// How long one test may take unless it asks for more.
///
/// No passing test comes near this on a machine with two free cores. The limit ends tests that
/// hang, and a machine may be several times slower.
pub const DEFAULT_LIMIT_SECS: u64 = 600;
/// The story leaves its figures here.
pub const RESULT_FILE: &str = "/run/lunbd-vm/result.json";
/// The limit for one boot, whatever its tests ask for.
///
/// About 35 tests share a boot, which takes minutes on two free cores. The lab ends a silent
/// guest long before this limit.
pub const BOOT_LIMIT_SECS: u64 = 3 * 60 * 60;

/// What one boot is for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// Kernel modules to load before udevd starts.
    pub modules: Vec<String>,
    /// Tests in the order in which they run.
    pub tests: Vec<TestCase>,
    /// A program whose output goes to the user live, instead of tests.
    pub story: Option<Vec<String>>,
    /// A test may leave the guest changed, because nothing runs after it.
    pub own_boot: bool,
}

/// One `#[test]` function.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TestCase {
    /// The test file without `.rs`, which is the name of its module.
    pub file: String,
    /// The function, with the modules inside the file.
    pub name: String,
}

impl TestCase {
    /// The id `file::name`, which libtest, filters and the list of expected skips use.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{}::{}", self.file, self.name)
    }
}

/// How a test ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The process exited with 0 and the guest was as before.
    Passed,
    /// The process failed, or left something behind; the text says which.
    Failed(String),
    /// The test said why it cannot run here.
    Skipped(String),
    /// Killed at its time limit.
    TimedOut,
    /// The kernel died during the test.
    GuestPanicked,
}

/// One line from the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum Report {
    /// Modules are loaded, udevd answers, and the first test comes next.
    Booted {
        /// `uname -r`.
        release: String,
        /// Kernel time at this point.
        uptime_ms: u64,
        /// The lines of the kernel's log that [`alarms`](crate::kernel_log::alarms) found.
        alarms: Vec<String>,
    },
    /// A test process was started, or was granted more time.
    Running {
        /// [`TestCase::id`].
        test: String,
        /// When the guest will kill it.
        limit_secs: u64,
    },
    /// A test ended.
    Finished {
        /// [`TestCase::id`].
        test: String,
        /// How.
        outcome: Outcome,
        /// Wall-clock time of the process.
        millis: u64,
        /// Its output, or the end of a long one. For a passed test, the lines that begin with
        /// [`TOLD`] or [`MET`].
        output: String,
        /// The kernel's log of that time. Empty if all was well, because a serial line is slow.
        kernel_log: String,
        /// The lines of it that [`alarms`](crate::kernel_log::alarms) found.
        alarms: Vec<String>,
    },
    /// The story printed this.
    Story {
        /// The text with its line ends.
        text: String,
    },
    /// The figures that the story wrote, and its exit status.
    StoryEnded {
        /// The content of [`RESULT_FILE`], if the story wrote one.
        result: Option<serde_json::Value>,
        /// 0 for success.
        status: i32,
    },
    /// pid 1 cannot continue.
    Broken {
        /// What went wrong.
        why: String,
    },
    /// No more reports come: the guest powers off.
    Done {
        /// What [`alarms`](crate::kernel_log::alarms) found in the log after the last test.
        alarms: Vec<String>,
    },
}

impl Report {
    /// Parses one line, which may have the serial port's own line end.
    #[must_use]
    pub fn parse_line(line: &str) -> Option<Self> {
        serde_json::from_str(line.trim()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_the_serial_line() {
        let sent = Report::Finished {
            test: "attach::one_lun".into(),
            outcome: Outcome::Failed("left a mount\r\nand more".into()),
            millis: 12,
            output: "line\nline \u{fffd} \u{1b}[0m".into(),
            kernel_log: String::new(),
            alarms: Vec::new(),
        };
        let line = serde_json::to_string(&sent).unwrap() + "\r\n";
        assert!(line.trim().lines().count() == 1, "one report is one line");
        match Report::parse_line(&line) {
            Some(Report::Finished { test, outcome, .. }) => {
                assert_eq!(test, "attach::one_lun");
                assert_eq!(outcome, Outcome::Failed("left a mount\r\nand more".into()));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_torn_line_is_no_report() {
        assert!(Report::parse_line(r#"{"report":"done""#).is_none());
        assert!(Report::parse_line("[    1.0] kernel noise").is_none());
    }
}
