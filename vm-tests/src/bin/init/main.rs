//! pid 1 of the guest: it sets the machine up, does the job and powers off.

#![allow(
    clippy::print_stderr,
    reason = "pid 1 has the console and nothing else before its report line is open"
)]

mod machine;
mod power;
mod process;
mod report;
mod snapshot;
mod systemd;
mod test_run;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use vm_tests::job::{BOOT_LIMIT_SECS, Job, Outcome, RESULT_FILE, Report};
use vm_tests::kernel_log::alarms;

use crate::machine::KernelLog;
use crate::report::ReportLine;
use crate::snapshot::Snapshot;

fn main() {
    let ended = begin();
    if let Err(error) = &ended {
        eprintln!("init: {error:#}");
        if let Ok(mut line) = ReportLine::open() {
            let _nobody_listens = line.send(&Report::Broken {
                why: format!("{error:#}"),
            });
        }
    }
    power::off(u8::from(ended.is_err()));
}

/// Runs as pid 1. If systemd is installed, systemd becomes pid 1 and runs this as its service.
fn begin() -> Result<()> {
    if std::process::id() != 1 {
        return work();
    }
    if systemd::is_installed() {
        return systemd::become_pid_1().map(drop);
    }
    machine::mount_filesystems()?;
    work()
}

fn work() -> Result<()> {
    machine::make_state_directory()?;
    // A guest that hangs must power off even if no process on the host watches it any more.
    power::off_after(Duration::from_secs(BOOT_LIMIT_SECS));
    let mut line = ReportLine::open()?;
    let job = std::fs::read("/job.json").context("/job.json")?;
    let job: Job = serde_json::from_slice(&job).context("/job.json")?;
    machine::set_up(&job.modules)?;
    let mut kernel_log = KernelLog::open()?;
    line.send(&Report::Booted {
        release: machine::kernel_release()?,
        uptime_ms: machine::uptime_millis()?,
        alarms: alarms(&kernel_log.read_new()).collect(),
    })?;
    match &job.story {
        Some(story) => tell(story, &mut line)?,
        None => run_tests(&job, &mut line, &mut kernel_log)?,
    }
    line.send(&Report::Done {
        alarms: alarms(&kernel_log.read_new()).collect(),
    })
}

fn run_tests(job: &Job, line: &mut ReportLine, kernel_log: &mut KernelLog) -> Result<()> {
    /// The tests that are left after this time get another boot. The longest test that shares a
    /// boot then still ends within this boot's limit, however slow the machine was before.
    const TURN: Duration = Duration::from_secs(15 * 60);
    let begun = Instant::now();
    // Wait once: udevd's work after the last test of this boot does not count for the next
    // test.
    machine::ask_udevd(&["udevadm", "settle"])?;
    let before = Snapshot::take();
    for test in &job.tests {
        let left_as = (!job.own_boot).then_some(&before);
        let finished = test_run::run(test, left_as, line, kernel_log)?;
        // A failed test leaves the guest in an unknown state, so the host boots anew for the
        // rest.
        let go_on = matches!(finished, Outcome::Passed | Outcome::Skipped(_));
        if !go_on || begun.elapsed() > TURN {
            break;
        }
    }
    Ok(())
}

fn tell(story: &[String], line: &mut ReportLine) -> Result<()> {
    let status = process::run_live(story, |text| line.send(&Report::Story { text }))?;
    let result = std::fs::read(RESULT_FILE)
        .ok()
        .and_then(|json| serde_json::from_slice(&json).ok());
    line.send(&Report::StoryEnded { result, status })
}
