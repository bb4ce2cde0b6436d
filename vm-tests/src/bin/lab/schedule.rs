//! Which machine runs which tests.

use std::collections::BTreeSet;
use std::fs;
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
use crate::units::{self, Unit};
use crate::{guest_root, modules, programs, qemu};

/// What a machine takes of the host's memory: its guest's 2 GiB, what the emulator
/// keeps of translated code, and some to spare.
const MACHINE_BYTES: u64 = 4 << 30;

/// Runs the VM tests whose id contains `filter` on every kernel of `series`.
pub(crate) fn run(
    series: &[Series],
    filter: Option<&str>,
    refresh: bool,
    summary: &mut Summary,
) -> Result<()> {
    let run_dir = RunDir::create()?;
    let programs = programs::build(&run_dir)?;
    let wanted = |test: &&TestCase| filter.is_none_or(|filter| test.id().contains(filter));
    let tests: Vec<TestCase> = programs.tests.iter().filter(wanted).cloned().collect();
    if tests.is_empty() {
        summary.add_broken(format!(
            "no VM test's name contains {:?}",
            filter.unwrap_or_default()
        ));
        return Ok(());
    }
    eprintln!(
        "LUNBD_VM_SEED={} is what the tests of chance go by",
        *qemu::SEED
    );
    let (root, kernels) = prepare(series, refresh)?;
    let accel = Accel::choose(&kernels[0].vmlinux, &run_dir)?;
    for kernel in &kernels {
        summary.expect(kernel.series, &tests);
    }
    let summary = &Mutex::new(summary);
    let units = units::of(&tests);
    let queue: Vec<(&Unit, &Kernel)> = units
        .iter()
        .flat_map(|unit| kernels.iter().map(move |kernel| (unit, kernel)))
        .collect();
    side_by_side(&queue, |seat, unit, kernel| {
        let setup = Setup {
            kernel,
            root: &root,
            programs: &programs,
            accel,
            run_dir: &run_dir,
            seat,
        };
        run_until_done(&setup, unit, summary)
    })
}

/// Runs the units on as many machines as this one carries. The threads live as long
/// as the machines that they start.
fn side_by_side(
    queue: &[(&Unit, &Kernel)],
    run: impl Fn(usize, &Unit, &Kernel) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let worker = |seat| -> Result<()> {
        while let Some((unit, kernel)) = queue.get(next.fetch_add(1, Ordering::Relaxed)) {
            run(seat, unit, kernel)?;
        }
        Ok(())
    };
    let worker = &worker;
    let count = seats().min(queue.len());
    thread::scope(|scope| {
        let workers: Vec<_> = (0..count)
            .map(|seat| scope.spawn(move || worker(seat)))
            .collect();
        let ended: Vec<_> = workers
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        ended
            .into_iter()
            .try_for_each(|ended| ended.unwrap_or_else(|_| bail!("a machine's thread died")))
    })
}

/// How many machines run at once: one more than there are processors, since a third
/// of a test's time is spent waiting, and no more than the memory has room for.
fn seats() -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let room = available_memory().map_or(1, |bytes| bytes / MACHINE_BYTES);
    usize::try_from(room).unwrap_or(1).clamp(1, processors + 1)
}

/// What can be had without swapping, in bytes.
fn available_memory() -> Option<u64> {
    let memory = fs::read_to_string("/proc/meminfo").ok()?;
    let line = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes << 10)
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
fn run_until_done(setup: &Setup<'_>, unit: &Unit, summary: &Mutex<&mut Summary>) -> Result<()> {
    let mut tests = unit.tests.clone();
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
            own_boot: unit.own_boot,
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
        tests.retain(|test| test.id() != id);
        let mut summary = lock(summary);
        summary.add_vm_test(series, &id, &outcome, false, 0, Some(remains));
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
