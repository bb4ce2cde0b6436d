//! One boot: from the job to the reports.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, BufWriter, Write, copy};
use std::path::{Path, PathBuf};
use std::process::ChildStdout;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use vm_tests::job::{BOOT_LIMIT_SECS, Job, Report};

use crate::accel::Accel;
use crate::guest_root::Root;
use crate::kernel::Kernel;
use crate::newc::Newc;
use crate::programs::Programs;
use crate::qemu::{Console, Machine};
use crate::run_dir::RunDir;

/// To the boot marker; emulation needs three to five seconds on two free
/// cores, and was seen to need over thirty on busy ones.
const BOOT_TIME: Duration = Duration::from_secs(240);
/// A boot was seen to fail twice in a day under load, and a run has dozens.
const ATTEMPTS: usize = 4;
/// How much later than announced a report may come: the guest has its own
/// clock and needs time to kill and to tidy up.
const GRACE: Duration = Duration::from_secs(240);

/// Tests of files named so reset their machine: it boots again, with the disk
/// that it had, and runs the test again.
const RESETS: &str = "own_boot_reset_";

/// Room for a small file system.
const DISK_BYTES: u64 = 64 << 20;

/// What is booted, and which files are its own.
pub(crate) struct Setup<'run> {
    pub(crate) kernel: &'run Kernel,
    pub(crate) root: &'run Root,
    pub(crate) programs: &'run Programs,
    pub(crate) accel: Accel,
    pub(crate) run_dir: &'run RunDir,
    /// Which of the machines that run at once it is: each has files of its own.
    pub(crate) seat: usize,
}

/// What was seen of one boot.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// From QEMU's start to the boot marker.
    pub(crate) boot_time: Option<Duration>,
    /// The guest said that it had done everything.
    pub(crate) done: bool,
    /// The test that was running when the boot ended.
    pub(crate) running: Option<String>,
    /// It was ended because nothing was heard of it any more.
    pub(crate) silent: bool,
    /// Why the boot ended, when it should not have.
    pub(crate) why: String,
    /// All that the kernel wrote to its console.
    pub(crate) console: String,
}

impl Ended {
    /// The kernel says itself that it has died.
    pub(crate) fn panicked(&self) -> bool {
        console_shows_panic(&self.console)
    }

    /// The kernel has died of an `int3` that nobody has put there but itself: it writes
    /// one over an instruction while it replaces that (`text_poke_bp`,
    /// `arch/x86/kernel/alternative.c`), and an emulated processor may run what it had
    /// translated of it when the kernel does not expect that any more.
    pub(crate) fn died_of_its_own_patch(&self) -> bool {
        console_shows_int3(&self.console)
    }
}

/// Boots, does `job`, and hands every report on as it comes. A boot that does
/// not reach its marker is tried again: early boot under emulation fails now and
/// then, and nothing has been tested yet.
pub(crate) fn boot(
    setup: &Setup<'_>,
    job: &Job,
    mut on_report: impl FnMut(Report) -> Result<()>,
) -> Result<Ended> {
    let initrd = write_initrd(setup, job)?;
    let resets = job.tests.iter().any(|test| test.file.starts_with(RESETS));
    let series = setup.kernel.series;
    let mut verbosity = Console::Quiet;
    for number in 1..ATTEMPTS {
        let ended = attempt(setup, &initrd, verbosity, resets, &mut on_report)?;
        if ended.boot_time.is_some() {
            return Ok(ended);
        }
        eprintln!("the guest did not come up ({}); trying again", ended.why);
        let name = format!("{series}-boot-attempt-{number}");
        let console = setup.run_dir.keep_log(&name, &ended.console)?;
        eprintln!("     log: {}", console.display());
        verbosity = Console::Verbose;
    }
    let last = attempt(setup, &initrd, verbosity, resets, &mut on_report)?;
    if last.boot_time.is_none() {
        bail!(
            "kernel {series} does not boot: {}\n{}",
            last.why,
            last.console
        );
    }
    Ok(last)
}

fn attempt(
    setup: &Setup<'_>,
    initrd: &Path,
    verbosity: Console,
    resets: bool,
    on_report: &mut impl FnMut(Report) -> Result<()>,
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
        setup.accel,
        &setup.kernel.vmlinux,
        initrd,
        &console,
        setup.kernel.series,
        verbosity,
        resets.then_some(disk.as_path()),
    )?;
    let reports = listen(machine.0.stdout.take().context("QEMU's output")?);
    let mut ended = Ended::default();
    let whole_limit = start + Duration::from_secs(BOOT_LIMIT_SECS) + GRACE;
    let mut next_by = start + BOOT_TIME;
    loop {
        let left = next_by
            .min(whole_limit)
            .saturating_duration_since(Instant::now());
        match reports.recv_timeout(left) {
            Ok(Report::Done) => ended.done = true,
            Ok(report) => {
                match &report {
                    Report::Booted { .. } => {
                        ended.boot_time = Some(start.elapsed());
                        next_by = Instant::now() + GRACE;
                    }
                    Report::Running { test, limit_secs } => {
                        ended.running = Some(test.clone());
                        next_by = Instant::now() + Duration::from_secs(*limit_secs) + GRACE;
                    }
                    Report::Finished { .. } => {
                        ended.running = None;
                        next_by = Instant::now() + GRACE;
                    }
                    // The story tells at its own pace.
                    Report::Story { .. } => next_by = whole_limit,
                    Report::Broken { why } => ended.why.clone_from(why),
                    Report::StoryEnded { .. } | Report::Done => {}
                }
                on_report(report)?;
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
    if !ended.done && ended.why.is_empty() {
        let status = machine.0.wait().context("QEMU")?;
        ended.why = format!("QEMU ended: {status}");
    }
    drop(machine);
    ended.console = String::from_utf8_lossy(&fs::read(&console)?).replace('\r', "");
    Ok(ended)
}

/// Reads the reports on a thread of its own, so that waiting for one can have
/// a deadline.
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

/// One file with the root, the modules, the programs and the job behind one
/// another: the kernel unpacks them in turn.
fn write_initrd(setup: &Setup<'_>, job: &Job) -> Result<PathBuf> {
    let path = setup.run_dir.join(&format!("initrd-{}", setup.seat));
    let mut to = BufWriter::new(File::create(&path).with_context(|| path.display().to_string())?);
    let mut parts = setup.root.images(&names(job));
    parts.push(setup.kernel.modules.clone());
    let files: Vec<&str> = job.tests.iter().map(|test| test.file.as_str()).collect();
    parts.extend(setup.programs.images(&files));
    for part in parts {
        let mut from = File::open(&part).with_context(|| part.display().to_string())?;
        copy(&mut from, &mut to)?;
    }
    let mut archive = Newc::new(to);
    archive.file("job.json", 0o644, &serde_json::to_vec(job)?)?;
    archive.finish()?.flush()?;
    Ok(path)
}

/// What the guest's additions go by.
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

/// Its first oops: later ones are of its end.
fn console_shows_int3(console: &str) -> bool {
    console.contains("int3: 0000 [#1]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_dies_of_its_own_patch_is_told_from_one_that_dies_of_anything_else() {
        for oops in [
            "[   36.763845] Oops: int3: 0000 [#1] SMP NOPTI",
            "[    9.1] int3: 0000 [#1] PREEMPT SMP NOPTI",
        ] {
            assert!(console_shows_int3(oops), "{oops}");
        }
        for oops in [
            "[    9.1] Oops: 0000 [#1] PREEMPT SMP",
            "[    9.2] Oops: int3: 0000 [#2] SMP NOPTI",
            "[    9.1] Kernel panic - not syncing: Fatal exception in interrupt",
        ] {
            assert!(!console_shows_int3(oops), "{oops}");
        }
    }

    #[test]
    fn a_kernels_last_words_are_told_from_its_warnings() {
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
