//! Runs one test: a process with a time limit, and a check of what it left behind.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, atomic::AtomicBool, atomic::Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use vm_tests::job::{
    DEFAULT_LIMIT_SECS, LIMIT_FILE, MET, Outcome, Report, SKIP_FILE, SKIP_STATUS, STATE_DIR,
    TESTS_PROGRAM, TOLD, TestCase,
};
use vm_tests::kernel_log::alarms;

use crate::machine::KernelLog;
use crate::report::ReportLine;
use crate::snapshot::Snapshot;
use crate::{machine, power, process};

/// The serial line carries no more of a test's output than this.
const OUTPUT_KEPT: u64 = 256 << 10;
/// How long a process may take to die of SIGKILL: a process that hangs in the kernel cannot
/// die.
const KILL_GRACE: Duration = Duration::from_secs(30);
/// How long the last traces of a test may take to disappear.
const TIDY_LIMIT: Duration = Duration::from_secs(30);

/// Removes what earlier tests may leave: the lock files of a killed process, which no longer lock
/// anything, and the names of disks that went with their driver and without a detach.
fn remove_files_of_earlier_tests() {
    for file in fs::read_dir("/run/lunbd").into_iter().flatten().flatten() {
        let path = file.path();
        let is_lock = path.extension().is_some_and(|it| it == "lock");
        if is_lock || file.file_name().as_encoded_bytes().starts_with(b"names-") {
            let _gone_already = fs::remove_file(path);
        }
    }
}

/// With `left_as`, the test must leave the guest in that state.
pub(crate) fn run(
    test: &TestCase,
    left_as: Option<&Snapshot>,
    line: &mut ReportLine,
    kernel_log: &mut KernelLog,
) -> Result<Outcome> {
    for file in [SKIP_FILE, LIMIT_FILE] {
        let _absent_mostly = fs::remove_file(file);
    }
    remove_files_of_earlier_tests();
    machine::clear_warn_once()?;
    let output_path = format!("{STATE_DIR}/output");
    let output = File::create(&output_path).context("the output file")?;

    let mut command = process::command(&[
        TESTS_PROGRAM,
        "--exact",
        &test.id(),
        "--nocapture",
        "--include-ignored",
        "--test-threads=1",
    ])?;
    command.stdout(output.try_clone()?).stderr(output);
    let start = Instant::now();
    let child = command.spawn().context(TESTS_PROGRAM)?;
    let pid = process::pid_of(&child)?;
    line.send(&Report::Running {
        test: test.id(),
        limit_secs: DEFAULT_LIMIT_SECS,
    })?;
    let watchdog = Watchdog::start(test.id(), pid, start, line.try_clone()?);
    let status = process::wait(pid)?;
    let timed_out = watchdog.stop();
    let millis = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);

    let mut outcome = if timed_out {
        Outcome::TimedOut
    } else {
        outcome_of(status)
    };
    if outcome == Outcome::Passed && !ran_one_test(&output_path) {
        outcome = Outcome::Failed("the program has no such test".to_owned());
    }
    let mut left = match left_as {
        Some(before) if !timed_out => tidied(before),
        _ => Vec::new(),
    };
    if !left.is_empty() {
        let mut what = left.join(", ");
        if let Outcome::Failed(why) = &outcome {
            what = format!("{why}; {what}");
        }
        left.clear();
        outcome = Outcome::Failed(what);
    }
    let (mut output, mut kernel_log) = (end_of(&output_path)?, kernel_log.read_new());
    let alarms: Vec<String> = alarms(&kernel_log).collect();
    if outcome == Outcome::Passed && alarms.is_empty() {
        let prefixes = [TOLD, MET];
        let told = output
            .lines()
            .filter(|line| prefixes.iter().any(|prefix| line.starts_with(prefix)));
        output = told.collect::<Vec<_>>().join("\n");
        kernel_log.clear();
    }
    line.send(&Report::Finished {
        test: test.id(),
        outcome: outcome.clone(),
        millis,
        output,
        kernel_log,
        alarms,
    })?;
    Ok(outcome)
}

fn outcome_of(status: WaitStatus) -> Outcome {
    match status {
        WaitStatus::Exited(_, 0) => Outcome::Passed,
        WaitStatus::Exited(_, SKIP_STATUS) => match fs::read_to_string(SKIP_FILE) {
            Ok(reason) => Outcome::Skipped(reason),
            Err(_) => Outcome::Failed(format!("exit status {SKIP_STATUS} without a skip")),
        },
        // libtest exits with 101 when a test panicked.
        WaitStatus::Exited(_, 101) => Outcome::Failed("panicked".to_owned()),
        WaitStatus::Exited(_, status) => Outcome::Failed(format!("exit status {status}")),
        WaitStatus::Signaled(_, signal, _) => Outcome::Failed(format!("killed by {signal}")),
        other => Outcome::Failed(format!("{other:?}")),
    }
}

/// libtest also exits with 0 when its filter matched nothing.
fn ran_one_test(output_path: &str) -> bool {
    end_of(output_path).is_ok_and(|output| output.contains("test result: ok. 1 passed;"))
}

/// What still differs from `before` when udevd is idle and the test's orphans have had time to
/// end.
fn tidied(before: &Snapshot) -> Vec<String> {
    let settled = machine::ask_udevd(&["udevadm", "settle", "--timeout=40"]);
    let start = Instant::now();
    loop {
        process::reap();
        let left = Snapshot::take().difference(before);
        if left.is_empty() && settled.is_err() {
            return vec!["left udevd busy or deaf".to_owned()];
        }
        if left.is_empty() || start.elapsed() > TIDY_LIMIT {
            return left;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn end_of(path: &str) -> Result<String> {
    let mut file = File::open(path).context("the output file")?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(OUTPUT_KEPT)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Kills the test's process group at its limit.
struct Watchdog {
    ended: Sender<()>,
    fired: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Watchdog {
    fn start(test: String, pid: Pid, start: Instant, mut line: ReportLine) -> Self {
        let (ended, end) = mpsc::channel();
        let fired = Arc::new(AtomicBool::new(false));
        let has_fired = Arc::clone(&fired);
        let thread = std::thread::spawn(move || {
            let mut limit = DEFAULT_LIMIT_SECS;
            loop {
                let left = Duration::from_secs(limit).saturating_sub(start.elapsed());
                if end.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                // The test may have asked for more time meanwhile.
                match fs::read_to_string(LIMIT_FILE)
                    .ok()
                    .and_then(|text| text.parse().ok())
                {
                    Some(wanted) if wanted > limit => {
                        limit = wanted;
                        let granted = Report::Running {
                            test: test.clone(),
                            limit_secs: limit,
                        };
                        let _the_host_sees_silence = line.send(&granted);
                    }
                    _ => break,
                }
            }
            has_fired.store(true, Ordering::SeqCst);
            let _gone_already = killpg(pid, Signal::SIGKILL);
            if end.recv_timeout(KILL_GRACE) == Err(RecvTimeoutError::Timeout) {
                report_stuck(test, limit, pid, &mut line);
            }
        });
        Self {
            ended,
            fired,
            thread,
        }
    }

    fn stop(self) -> bool {
        let _has_returned = self.ended.send(());
        let _panicked = self.thread.join();
        self.fired.load(Ordering::SeqCst)
    }
}

/// SIGKILL did nothing, so the test hangs in the kernel. Its kernel stacks are worth more than
/// anything else that this boot can still do.
fn report_stuck(test: String, limit_secs: u64, pid: Pid, line: &mut ReportLine) -> ! {
    let mut stacks = String::new();
    for task in vm_tests::guest::entries(format!("/proc/{pid}/task")) {
        let stack = fs::read_to_string(format!("/proc/{pid}/task/{task}/stack"));
        stacks.extend(["task ", &task, ":\n", &stack.unwrap_or_default(), "\n"]);
    }
    let output = end_of(&format!("{STATE_DIR}/output")).unwrap_or_default();
    let kernel_log = KernelLog::open()
        .map(|mut log| log.read_new())
        .unwrap_or_default();
    let alarms: Vec<String> = alarms(&kernel_log).collect();
    let _last_words = line.send(&Report::Finished {
        test,
        outcome: Outcome::TimedOut,
        millis: limit_secs * 1000,
        output: format!(
            "{output}\n-- kernel stacks of the process, which SIGKILL did not end\n{stacks}"
        ),
        kernel_log,
        alarms,
    });
    let _last_words = line.send(&Report::Done { alarms: Vec::new() });
    power::off(0)
}
