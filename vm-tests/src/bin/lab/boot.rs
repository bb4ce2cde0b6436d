//! One boot: from the job to the reports.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, BufWriter, Write, copy};
use std::path::{Path, PathBuf};
use std::process::ChildStdout;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use vm_tests::job::{BOOT_LIMIT_SECS, Job, Report, TestCase};
use vm_tests::kernel_log::alarms;

use crate::accel::Accel;
use crate::cost::Cost;
use crate::emulator::Emulator;
use crate::guest_root::Root;
use crate::kernel::{Kernel, Series};
use crate::newc::Newc;
use crate::programs::Programs;
use crate::qemu::{Console, Machine};
use crate::run_dir::RunDir;
use crate::{harmless, own_patch};

/// The limit for the time to the boot marker. Emulation needs three to five seconds on two free
/// cores, and needed over thirty on busy ones.
const BOOT_TIME: Duration = Duration::from_secs(240);
/// Under load a boot failed twice in one day, and a run has dozens of boots.
const ATTEMPTS: usize = 4;
/// How much later than announced a report may arrive: the guest has its own clock and needs
/// time to kill and to tidy up.
const GRACE: Duration = Duration::from_secs(240);

/// Tests of files with this prefix reset their machine: it boots again with the same disk, and
/// runs the test again.
const RESETS: &str = "own_boot_reset_";

/// Room for a small file system.
const DISK_BYTES: u64 = 64 << 20;

/// The kernel and files of one boot.
pub(crate) struct Setup<'run> {
    pub(crate) kernel: &'run Kernel,
    pub(crate) root: &'run Root,
    pub(crate) programs: &'run Programs,
    pub(crate) emulator: &'run Emulator,
    pub(crate) accel: Accel,
    pub(crate) run_dir: &'run RunDir,
    /// The number of this machine among those that run at once. Each has its own files.
    pub(crate) seat: usize,
}

/// What the lab saw of one boot.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// From QEMU's start to the boot marker.
    pub(crate) boot_time: Option<Duration>,
    /// The guest said that it had done everything.
    pub(crate) done: bool,
    /// The test that was running when the boot ended.
    pub(crate) running: Option<String>,
    /// The lab ended the boot because no report arrived any more.
    pub(crate) silent: bool,
    /// Why the boot ended early; empty if it did not.
    pub(crate) why: String,
    /// All output of the kernel on its console.
    pub(crate) console: String,
    /// How often the lab started QEMU for this boot.
    pub(crate) attempts: usize,
    /// The cost of the last attempt until the boot marker.
    pub(crate) cost_until_up: Cost,
    /// The cost of all attempts.
    pub(crate) cost: Cost,
}

impl Ended {
    /// Whether the kernel reports its own panic.
    pub(crate) fn panicked(&self) -> bool {
        console_shows_panic(&self.console)
    }

    /// Whether [`own_patch`] explains the death, and the console shows no defect before it.
    pub(crate) fn died_of_its_own_patch_alone(&self, series: Series) -> bool {
        own_patch::console_before_death(&self.console)
            .is_some_and(|before| !shows_defect(series, before))
    }
}

/// Boots, does `job`, and passes on every report as it arrives, with the processor time of the
/// machine since the test that it is about began. A boot that does not reach its
/// marker is tried again, because no test has run yet, and a busy host may have been too slow.
/// A kernel that reports a defect is the result, and has no other try. Without a `boot_time`
/// in the result, no try reached its marker.
pub(crate) fn boot(
    setup: &Setup<'_>,
    job: &Job,
    mut on_report: impl FnMut(Report, Duration) -> Result<()>,
) -> Result<Ended> {
    let initrd = write_initrd(setup, job)?;
    let resets = job.tests.iter().any(|test| test.file.starts_with(RESETS));
    let series = setup.kernel.series;
    let mut verbosity = if resets {
        Console::Warnings
    } else {
        Console::Quiet
    };
    let mut cost = Cost::default();
    for number in 1..ATTEMPTS {
        let mut ended = attempt(setup, &initrd, verbosity, resets, &mut on_report)?;
        cost += ended.cost;
        if ended.boot_time.is_some() || shows_defect(series, &ended.console) {
            (ended.attempts, ended.cost) = (number, cost);
            return Ok(ended);
        }
        eprintln!("the guest did not come up ({}); trying again", ended.why);
        let first = job.tests.first().map_or("story".to_owned(), TestCase::id);
        let name = format!("{series}-{first}-boot-attempt-{number}");
        let console = setup.run_dir.keep_log(&name, &ended.console)?;
        eprintln!("     log: {}", console.display());
        verbosity = Console::Verbose;
    }
    let mut last = attempt(setup, &initrd, verbosity, resets, &mut on_report)?;
    cost += last.cost;
    (last.attempts, last.cost) = (ATTEMPTS, cost);
    Ok(last)
}

fn attempt(
    setup: &Setup<'_>,
    initrd: &Path,
    verbosity: Console,
    resets: bool,
    on_report: &mut impl FnMut(Report, Duration) -> Result<()>,
) -> Result<Ended> {
    let console = setup.run_dir.join(&format!("console-{}", setup.seat));
    fs::write(&console, "").context("the console's file")?;
    let start = Instant::now();
    let disk = setup.run_dir.join(&format!("disk-{}", setup.seat));
    if resets {
        let disk = File::create(&disk).context("the disk that is kept")?;
        disk.set_len(DISK_BYTES)?;
    }
    let mut machine = Machine::start(
        setup.emulator.command(setup.accel),
        &setup.kernel.vmlinux,
        initrd,
        &console,
        setup.kernel.series,
        verbosity,
        resets.then_some(disk.as_path()),
    )?;
    let reports = listen(machine.reports()?);
    let mut ended = Ended::default();
    let whole_limit = start + Duration::from_secs(BOOT_LIMIT_SECS) + GRACE;
    let mut next_by = start + BOOT_TIME;
    let mut test_began_at = Duration::ZERO;
    loop {
        let left = next_by
            .min(whole_limit)
            .saturating_duration_since(Instant::now());
        match reports.recv_timeout(left) {
            Ok(done @ Report::Done { .. }) => {
                ended.done = true;
                on_report(done, Duration::ZERO)?;
            }
            Ok(report) => {
                let processor = machine.processor_time()?;
                match &report {
                    Report::Booted { .. } => {
                        // A panic of the kernel resets the machine, as such a test does.
                        if shows_defect(setup.kernel.series, &read_console(&console)?) {
                            "the kernel warned or died before this boot ended"
                                .clone_into(&mut ended.why);
                            break;
                        }
                        let wall = start.elapsed();
                        ended.boot_time = Some(wall);
                        ended.cost_until_up = Cost { wall, processor };
                        next_by = Instant::now() + GRACE;
                    }
                    Report::Running { test, limit_secs } => {
                        ended.running = Some(test.clone());
                        test_began_at = processor;
                        next_by = Instant::now() + Duration::from_secs(*limit_secs) + GRACE;
                    }
                    Report::Finished { .. } => {
                        ended.running = None;
                        next_by = Instant::now() + GRACE;
                    }
                    // A story has no limit between two reports.
                    Report::Story { .. } => next_by = whole_limit,
                    Report::Broken { why } => ended.why.clone_from(why),
                    Report::StoryEnded { .. } | Report::Done { .. } => {}
                }
                on_report(report, processor.saturating_sub(test_began_at))?;
            }
            Err(RecvTimeoutError::Timeout) => {
                ended.silent = true;
                "nothing was heard of the guest for too long".clone_into(&mut ended.why);
                break;
            }
            // The guest powered off, or died.
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let by_itself = !ended.done && ended.why.is_empty();
    if !by_itself {
        machine.kill()?;
    }
    let (status, processor) = machine.wait()?;
    if by_itself {
        ended.why = format!("QEMU ended: {status}");
    }
    ended.cost = Cost {
        wall: start.elapsed(),
        processor,
    };
    ended.console = read_console(&console)?;
    Ok(ended)
}

fn read_console(path: &Path) -> Result<String> {
    let console = fs::read(path).context("the console's file")?;
    Ok(String::from_utf8_lossy(&console).replace('\r', ""))
}

fn shows_defect(series: Series, console: &str) -> bool {
    let alarms: Vec<String> = alarms(console).collect();
    !harmless::defects(series, &alarms).is_empty()
}

/// Reads the reports on a separate thread, so that a wait for one can have a deadline.
fn listen(from: ChildStdout) -> Receiver<Report> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).split(b'\n') {
            let Ok(line) = line else { return };
            let Some(report) = Report::parse_line(&String::from_utf8_lossy(&line)) else {
                continue;
            };
            if send.send(report).is_err() {
                return;
            }
        }
    });
    receive
}

/// One file with the root, the modules, the programs and the job, one after another: the kernel
/// unpacks them in turn.
fn write_initrd(setup: &Setup<'_>, job: &Job) -> Result<PathBuf> {
    let path = setup.run_dir.join(&format!("initrd-{}", setup.seat));
    let mut to = BufWriter::new(File::create(&path).with_context(|| path.display().to_string())?);
    let mut parts = setup.root.images(&names(job));
    parts.push(setup.kernel.modules.clone());
    parts.extend(setup.programs.images(&names(job)));
    for part in parts {
        let mut from = File::open(&part).with_context(|| part.display().to_string())?;
        copy(&mut from, &mut to)?;
    }
    let mut archive = Newc::new(to);
    archive.file("job.json", 0o644, &serde_json::to_vec(job)?)?;
    archive.finish()?.flush()?;
    Ok(path)
}

/// The names that select the guest's additions.
fn names(job: &Job) -> Vec<&str> {
    let tests = job.tests.iter().map(|test| test.file.as_str());
    tests
        .chain(job.story.iter().flatten().map(String::as_str))
        .collect()
}

fn console_shows_panic(console: &str) -> bool {
    [
        "Kernel panic",
        "Oops: ",
        "kernel BUG at ",
        "BUG: kernel NULL pointer",
        "BUG: unable to handle",
    ]
    .iter()
    .any(|sign| console.contains(sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_panic_differs_from_its_warnings() {
        assert!(console_shows_panic(
            "[    9.1] Kernel panic - not syncing: Fatal exception"
        ));
        assert!(console_shows_panic("[    9.1] Oops: 0000 [#1] PREEMPT SMP"));
        assert!(!console_shows_panic(
            "[    9.1] watchdog: BUG: soft lockup - CPU#0 stuck"
        ));
        assert!(!console_shows_panic(
            "[    0.0] Kernel command line: panic=-1 oops=panic"
        ));
    }
}
