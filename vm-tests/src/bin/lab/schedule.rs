//! Which test runs in which boot.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Result, bail};
use vm_tests::job::{Job, Outcome, Report, TOLD, TestCase};

use crate::accel::Accel;
use crate::boot::{self, Setup};
use crate::cache::Cache;
use crate::debian::Mirrors;
use crate::expected_skips;
use crate::kernel::{self, Kernel, Series};
use crate::run_dir::RunDir;
use crate::summary::{Remains, Summary};
use crate::{guest_root, modules, programs};

/// Files named so have a boot for each of their tests.
const OWN_BOOT: &str = "own_boot_";

/// Runs the VM tests whose id contains `filter` on every kernel of `series`.
pub(crate) fn run(
    series: &[Series],
    filter: Option<&str>,
    refresh: bool,
    summary: &mut Summary,
) -> Result<()> {
    let run_dir = RunDir::create()?;
    let programs = programs::build(&run_dir)?;
    let tests: Vec<TestCase> = programs
        .tests
        .into_iter()
        .filter(|test| filter.is_none_or(|filter| test.id().contains(filter)))
        .collect();
    if tests.is_empty() {
        summary.add_broken(format!(
            "no VM test's name contains {:?}",
            filter.unwrap_or_default()
        ));
        return Ok(());
    }
    let (root, kernels) = prepare(series, refresh)?;
    let accel = Accel::choose(&kernels[0].vmlinux, &run_dir)?;
    let summary = &Mutex::new(summary);
    let run = |kernel: &Kernel| {
        let setup = Setup {
            kernel,
            root: &root,
            programs: &programs.initramfs,
            accel,
            run_dir: &run_dir,
        };
        let (own, shared): (Vec<_>, Vec<_>) = tests
            .iter()
            .cloned()
            .partition(|test| test.file.starts_with(OWN_BOOT));
        run_until_done(&setup, shared, false, summary)?;
        for test in own {
            run_until_done(&setup, vec![test], true, summary)?;
        }
        Ok(())
    };
    side_by_side(&kernels, &run)
}

/// Runs the kernels beside each other, one a processor: most of a test's time is
/// spent waiting. The threads live as long as the machines that they start.
fn side_by_side(kernels: &[Kernel], run: &(impl Fn(&Kernel) -> Result<()> + Sync)) -> Result<()> {
    let next = AtomicUsize::new(0);
    let worker = || -> Result<()> {
        while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
            run(kernel)?;
        }
        Ok(())
    };
    let count = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..count.min(kernels.len()))
            .map(|_| scope.spawn(worker))
            .collect();
        let ended: Vec<_> = workers
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        ended
            .into_iter()
            .try_for_each(|ended| ended.unwrap_or_else(|_| bail!("a kernel's thread died")))
    })
}

/// The guest's root and the kernels, from the cache where they are there,
/// unless `refresh` has them made anew.
pub(crate) fn prepare(series: &[Series], refresh: bool) -> Result<(guest_root::Root, Vec<Kernel>)> {
    let mirrors = Mirrors::of_this_machine()?;
    let cache = Cache::lock(refresh)?;
    let root = guest_root::prepare(&cache, &mirrors)?;
    let kernels = series
        .iter()
        .map(|series| kernel::prepare(&cache, &mirrors, *series));
    Ok((root, kernels.collect::<Result<_>>()?))
}

/// Boots as often as it takes: what a failed test leaves is unknown, so the
/// tests after it get a new boot.
fn run_until_done(
    setup: &Setup<'_>,
    mut tests: Vec<TestCase>,
    own_boot: bool,
    summary: &Mutex<&mut Summary>,
) -> Result<()> {
    let series = setup.kernel.series;
    let mut again = BTreeSet::new();
    while !tests.is_empty() {
        let job = Job {
            modules: modules::LOADED_AT_BOOT
                .iter()
                .map(|name| (*name).to_owned())
                .collect(),
            tests: tests.clone(),
            story: None,
            own_boot,
        };
        let before = tests.len();
        eprintln!("booting {series} ({:?})", setup.accel);
        let report_to = |report| on_report(setup, report, &mut tests, summary);
        let ended = boot::boot(setup, &job, report_to)?;
        let Some(first) = tests.first().cloned() else {
            break;
        };
        if ended.done && tests.len() < before {
            continue;
        }
        // The boot ended under a test, or before it could start one.
        let id = ended.running.clone().unwrap_or_else(|| first.id());
        let log = format!(
            "{id} on {series}: {}\n\n-- console\n{}",
            ended.why, ended.console
        );
        let log = setup.run_dir.keep_log(&format!("{series}-{id}"), &log)?;
        if setup.accel == Accel::Tcg && ended.died_of_its_own_patch() && again.insert(id.clone()) {
            println!(
                "AGAIN            {series:<6} {id}: the emulated machine met an instruction that \
                 its kernel was done replacing, and died of it\n     log: {}",
                log.display()
            );
            continue;
        }
        let outcome = match (ended.panicked(), ended.running.is_some()) {
            (true, _) => Outcome::GuestPanicked,
            (false, true) if ended.silent => Outcome::TimedOut,
            (false, _) => Outcome::Failed(ended.why.clone()),
        };
        let remains = Remains {
            log: &log,
            output: &ended.console,
        };
        lock(summary).add_vm_test(series, &id, &outcome, false, 0, Some(remains));
        tests.retain(|test| test.id() != id);
    }
    Ok(())
}

fn on_report(
    setup: &Setup<'_>,
    report: Report,
    tests: &mut Vec<TestCase>,
    summary: &Mutex<&mut Summary>,
) -> Result<()> {
    let series = setup.kernel.series;
    match report {
        Report::Booted { release, uptime_ms } => {
            eprintln!("{release} is up, {uptime_ms} ms after its start");
        }
        Report::Finished {
            test,
            outcome,
            millis,
            output,
            kernel_log,
        } => {
            let expected = expected_skips::is_expected(series, &test);
            let fine = match outcome {
                Outcome::Passed => true,
                Outcome::Skipped(_) => expected,
                _ => false,
            };
            let log = if fine {
                None
            } else {
                let content = format!(
                    "{test} on {series}: {outcome:?}\n\n-- output\n{output}\n-- kernel log\n{kernel_log}"
                );
                Some(
                    setup
                        .run_dir
                        .keep_log(&format!("{series}-{test}"), &content)?,
                )
            };
            let mut summary = lock(summary);
            let remains = log.as_deref().map(|log| Remains {
                log,
                output: &output,
            });
            summary.add_vm_test(series, &test, &outcome, expected, millis, remains);
            for told in output.lines().filter_map(|line| line.strip_prefix(TOLD)) {
                println!("     {told}");
            }
            tests.retain(|known| known.id() != test);
        }
        Report::Broken { why } => eprintln!("the guest cannot go on: {why}"),
        Report::Running { .. }
        | Report::Story { .. }
        | Report::StoryEnded { .. }
        | Report::Done => {}
    }
    Ok(())
}

fn lock<'a, 'b>(summary: &'a Mutex<&'b mut Summary>) -> MutexGuard<'a, &'b mut Summary> {
    // A thread that died between two counts has left both whole.
    summary.lock().unwrap_or_else(PoisonError::into_inner)
}
