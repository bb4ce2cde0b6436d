//! Assigns the tests to machines.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use vm_tests::job::{Job, MET, Outcome, Report, TOLD, TestCase};
use vm_tests::sweep_row::SweepRow;

use crate::accel::Accel;
use crate::boot::{self, Setup};
use crate::cache::Cache;
use crate::choice::{self, Breadth};
use crate::cost::{Cost, Meter};
use crate::debian::Mirrors;
use crate::emulator::Emulator;
use crate::kernel::{self, Kernel, Series};
use crate::programs::{self, Programs};
use crate::remains::Remains;
use crate::run_dir::RunDir;
use crate::summary::Summary;
use crate::units::{self, Unit};
use crate::{expected_skips, guest_root, harmless, modules};

/// The memory of the host that one machine takes: its guest's 2 GiB, the emulator's translated
/// code, and a reserve.
const MACHINE_BYTES: u64 = 4 << 30;

/// The VM tests of a run, built, with everything that the machines need.
pub(crate) struct Plan {
    programs: Programs,
    /// Each series has its userland and its kernel.
    roots: Vec<guest_root::Root>,
    kernels: Vec<Kernel>,
    /// The units of each kernel.
    units: Vec<Vec<Unit>>,
    emulator: Emulator,
    accel: Accel,
    run_dir: RunDir,
}

impl Plan {
    /// Builds the VM tests whose id contains a part of `filter`, and chooses on which kernels
    /// of `series` they run. `None` if no test has such an id.
    pub(crate) fn make(
        series: &[Series],
        breadth: Breadth,
        filter: Option<&str>,
        refresh: bool,
        summary: &mut Summary,
    ) -> Result<Option<Self>> {
        let run_dir = RunDir::create()?;
        let meter = Meter::start()?;
        let mut programs = programs::build(&run_dir)?;
        for name in expected_skips::stale(&programs.tests) {
            summary.add_broken(format!(
                "vm-tests/expected-skips lists {name}, which is no test"
            ));
        }
        let Some(tests) = selected(&programs.tests, filter, summary) else {
            return Ok(None);
        };
        programs.build_rest(&tests, &run_dir)?;
        summary.costs.add("programs of the guest", meter.stop()?);
        let meter = Meter::start()?;
        let (emulator, roots, kernels) = prepare(series, refresh)?;
        let emulation = breadth.emulation();
        let with_kvm = emulator.command(Accel::Kvm);
        let accel = Accel::choose(emulation, with_kvm, &kernels[0].vmlinux, &run_dir)?;
        summary.costs.add("packages and kernels", meter.stop()?);
        let choices = choice::choose(&tests, series, breadth, expected_skips::reason);
        for (series, choice) in series.iter().zip(&choices) {
            for (test, reason) in &choice.skipped {
                let outcome = Outcome::Skipped((*reason).to_owned());
                summary.add_vm_test(*series, &test.id(), &outcome, true, Cost::default(), None);
            }
            // The summary expects these after the skips: a listed skip ends no expected test.
            summary.expect(*series, &choice.booted);
        }
        let units = choices.iter().map(|choice| units::of(&choice.booted));
        Ok(Some(Self {
            programs,
            roots,
            kernels,
            units: units.collect(),
            emulator,
            accel,
            run_dir,
        }))
    }

    /// Runs the VM tests, and `on_the_host` beside them.
    pub(crate) fn run(
        &self,
        on_the_host: impl FnOnce() -> Result<()> + Send,
        summary: &Mutex<&mut Summary>,
    ) -> Result<()> {
        let queue = units::in_turn(&self.units).into_iter();
        let queue: Vec<(usize, &Unit)> = queue.collect();
        side_by_side(&queue, on_the_host, |seat, at, unit| {
            let setup = Setup {
                kernel: &self.kernels[at],
                root: &self.roots[at],
                programs: &self.programs,
                emulator: &self.emulator,
                accel: self.accel,
                run_dir: &self.run_dir,
                seat,
            };
            run_until_done(&setup, unit, summary)
        })
    }
}

/// Runs the units, each with the index of its series, on as many machines as the host can carry.
/// `on_the_host` takes the place of the last machine until it ends. The threads live as long as
/// the machines that they start.
fn side_by_side(
    queue: &[(usize, &Unit)],
    on_the_host: impl FnOnce() -> Result<()> + Send,
    run: impl Fn(usize, usize, &Unit) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let worker = |seat| -> Result<()> {
        while let Some((series, unit)) = queue.get(next.fetch_add(1, Ordering::Relaxed)) {
            run(seat, *series, unit)?;
        }
        Ok(())
    };
    let worker = &worker;
    let last = seats() - 1;
    thread::scope(|scope| {
        let mut workers: Vec<_> = (0..last.min(queue.len()))
            .map(|seat| scope.spawn(move || worker(seat)))
            .collect();
        workers.push(scope.spawn(move || {
            let on_the_host = on_the_host();
            worker(last).and(on_the_host)
        }));
        let ended: Vec<_> = workers
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        ended
            .into_iter()
            .try_for_each(|ended| ended.unwrap_or_else(|_| bail!("a thread of the lab died")))
    })
}

/// How many machines run at once: two more than there are processors, because half of a
/// test's time is spent waiting, and no more than fit into memory. On two processors, two runs
/// with five took 17:36 and 18:22, and four runs with four took 18:07 to 19:35, with 30:28 and
/// 30:35, and with 26:02 to 31:07 of processor time. Each run had another seed, and the host's
/// own speed varied as much (2026-11-27).
fn seats() -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let room = available_memory().map_or(1, |bytes| bytes / MACHINE_BYTES);
    usize::try_from(room).unwrap_or(1).clamp(1, processors + 2)
}

/// The memory that is available without swapping, in bytes.
fn available_memory() -> Option<u64> {
    let memory = fs::read_to_string("/proc/meminfo").ok()?;
    let line = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes << 10)
}

/// The tests whose id contains a part of `filter`. `None` if a part names no test.
fn selected(
    tests: &[TestCase],
    filter: Option<&str>,
    summary: &mut Summary,
) -> Option<Vec<TestCase>> {
    let Some(filter) = filter else {
        return Some(tests.to_vec());
    };
    let has = |test: &TestCase, part: &str| !part.is_empty() && test.id().contains(part);
    let names_none = |part: &&str| !tests.iter().any(|test| has(test, part));
    if let Some(part) = filter.split(',').find(names_none) {
        summary.add_broken(format!("no VM test's name contains {part:?}"));
        return None;
    }
    let is_named = |test: &&TestCase| filter.split(',').any(|part| has(test, part));
    Some(tests.iter().filter(is_named).cloned().collect())
}

/// The emulator, and the guest's root and the kernel of each series. They come from the cache if
/// they are there, unless `refresh` rebuilds them.
pub(crate) fn prepare(
    series: &[Series],
    refresh: bool,
) -> Result<(Emulator, Vec<guest_root::Root>, Vec<Kernel>)> {
    let mirrors = Mirrors::of_this_machine()?;
    let cache = Cache::lock(refresh)?;
    let emulator = Emulator::prepare(&cache, &mirrors)?;
    let roots = series
        .iter()
        .map(|series| guest_root::prepare(&cache, &mirrors, *series));
    let roots = roots.collect::<Result<_>>()?;
    let kernels = series
        .iter()
        .map(|series| kernel::prepare(&cache, &mirrors, *series));
    Ok((emulator, roots, kernels.collect::<Result<_>>()?))
}

/// Boots as often as necessary: a failed test leaves the guest in an unknown state, so the
/// tests after it get a new boot.
fn run_until_done(setup: &Setup<'_>, unit: &Unit, summary: &Mutex<&mut Summary>) -> Result<()> {
    let mut tests = unit.tests.clone();
    let series = setup.kernel.series;
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
        let report_to =
            |report, processor| on_report(setup, report, processor, &mut tests, summary);
        let ended = boot::boot(setup, &job, report_to)?;
        lock(summary).add_boot(series, &ended);
        if ended.done && (ended.silent || ended.panicked()) {
            let name = format!("{series}-seat-{}-after-its-last-test", setup.seat);
            let log = setup.run_dir.keep_log(&name, &ended.console)?;
            let what = if ended.silent {
                "the guest did not power off"
            } else {
                "the guest's kernel panicked"
            };
            lock(summary).add_broken(format!(
                "{series}: {what} after its last test; log: {}",
                log.display()
            ));
        }
        let Some(first) = tests.first().cloned() else {
            // The last test has ended, so the failure belongs to no test.
            if !ended.done {
                let why = format!(
                    "{series}: the boot's end after its last test: {}",
                    ended.why
                );
                lock(summary).add_broken(why);
            }
            break;
        };
        if ended.done && tests.len() < before {
            continue;
        }
        // The boot ended during a test, or before it could start one.
        let id = ended.running.clone().unwrap_or_else(|| first.id());
        let log = format!(
            "{id} on {series}: {}\n\n-- console\n{}",
            ended.why, ended.console
        );
        let is_the_emulators =
            setup.accel != Accel::Kvm && ended.died_of_its_own_patch_alone(series);
        // The log of the next try has another name.
        let end = if is_the_emulators { "-died" } else { "" };
        let log = setup
            .run_dir
            .keep_log(&format!("{series}-{id}{end}"), &log)?;
        if is_the_emulators && lock(summary).may_run_again(series, &id, &log) {
            continue;
        }
        if ended.boot_time.is_none() {
            let log = log.display();
            lock(summary).add_broken(format!(
                "{series}: the kernel does not come up: {}; log: {log}",
                ended.why
            ));
            break;
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
        summary.add_vm_test(series, &id, &outcome, false, Cost::default(), Some(remains));
    }
    Ok(())
}

fn on_report(
    setup: &Setup<'_>,
    report: Report,
    processor: Duration,
    tests: &mut Vec<TestCase>,
    summary: &Mutex<&mut Summary>,
) -> Result<()> {
    let series = setup.kernel.series;
    match report {
        Report::Booted {
            release,
            uptime_ms,
            alarms,
        } => {
            eprintln!("{release} is up, {uptime_ms} ms after its start");
            add_defects(series, "as it booted", &alarms, summary);
        }
        Report::Done { alarms } => add_defects(series, "after its last test", &alarms, summary),
        Report::Finished {
            test,
            outcome,
            millis,
            output,
            kernel_log,
            alarms,
        } => {
            let defects = harmless::defects(series, &alarms);
            let outcome = judged(outcome, expected_skips::reason(series, &test), &defects);
            let expected = expected_skips::reason(series, &test).is_some();
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
            let cost = Cost {
                wall: Duration::from_millis(millis),
                processor,
            };
            summary.add_vm_test(series, &test, &outcome, expected, cost, remains);
            // The row of a sweep says that the sweep passed.
            let is_shown = |line: &&str| outcome == Outcome::Passed || !SweepRow::is_in(line);
            for met in output.lines().filter_map(|line| line.strip_prefix(MET)) {
                summary.add_points_met(series, &test, met);
            }
            let told = output.lines().filter_map(|line| line.strip_prefix(TOLD));
            for told in told.filter(is_shown) {
                println!("     {told}");
            }
            tests.retain(|known| known.id() != test);
        }
        Report::Broken { why } => eprintln!("the guest cannot go on: {why}"),
        Report::Running { .. } | Report::Story { .. } | Report::StoryEnded { .. } => {}
    }
    Ok(())
}

/// Lines that the kernel logged while no test ran.
fn add_defects(series: Series, when: &str, alarms: &[String], summary: &Mutex<&mut Summary>) {
    for defect in harmless::defects(series, alarms) {
        lock(summary).add_broken(format!("{series} logged {when}: {defect}"));
    }
}

/// The outcome with what the guest does not know: the defects in its kernel's log, and whether
/// the test is listed as one that cannot run there.
fn judged(outcome: Outcome, known_skip: Option<&str>, defects: &[&str]) -> Outcome {
    let why = match (&outcome, known_skip) {
        (Outcome::Passed, Some(_)) => {
            Some("it passed, though vm-tests/expected-skips lists it".to_owned())
        }
        (Outcome::Skipped(why), Some(listed)) if why != listed => Some(format!(
            "it skipped with the reason {why:?}, and vm-tests/expected-skips has {listed:?}"
        )),
        (Outcome::Failed(why), _) => Some(why.clone()),
        _ => None,
    };
    let logged = defects.first().map(|first| {
        let count = defects.len();
        format!("the kernel logged {count} lines of a defect, first: {first}")
    });
    let whys: Vec<String> = why.into_iter().chain(logged).collect();
    if whys.is_empty() || matches!(outcome, Outcome::TimedOut | Outcome::GuestPanicked) {
        return outcome;
    }
    Outcome::Failed(whys.join("; "))
}

pub(crate) fn lock<'a, 'b>(summary: &'a Mutex<&'b mut Summary>) -> MutexGuard<'a, &'b mut Summary> {
    // A thread that panicked between two counts has left both counts whole.
    summary.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_of_a_filter_names_a_test() {
        let test = |id: &str| {
            let (file, name) = id.split_once("::").unwrap();
            let (file, name) = (file.to_owned(), name.to_owned());
            TestCase { file, name }
        };
        let tests = ["attach::one", "detach::one", "hub::two"].map(test);
        let selected = |filter| {
            let mut summary = Summary::default();
            let tests = selected(&tests, filter, &mut summary);
            assert_eq!(tests.is_some(), summary.succeeded());
            tests.map(|tests| tests.iter().map(TestCase::id).collect::<Vec<_>>())
        };
        assert_eq!(selected(None).unwrap().len(), 3);
        assert_eq!(selected(Some("hub,ch::one")).unwrap().len(), 3);
        assert_eq!(selected(Some("detach")).unwrap(), ["detach::one"]);
        for bad in ["hub::,typo", "hub::,", "", "nbd"] {
            assert_eq!(selected(Some(bad)), None, "{bad}");
        }
    }

    #[test]
    fn a_test_passes_only_where_its_kernel_logged_no_defect_and_no_skip_is_known() {
        let failed = |outcome| matches!(outcome, Outcome::Failed(_));
        let warning = ["WARNING: at x.c:1"];
        let skip = || Outcome::Skipped("old".into());
        assert_eq!(judged(Outcome::Passed, None, &[]), Outcome::Passed);
        assert!(failed(judged(Outcome::Passed, None, &warning)));
        assert!(failed(judged(Outcome::Passed, Some("old"), &[])));
        assert_eq!(judged(skip(), Some("old"), &[]), skip());
        assert!(failed(judged(skip(), Some("another reason"), &[])));
        assert!(failed(judged(skip(), Some("old"), &warning)));
        let both = judged(Outcome::Failed("panicked".into()), None, &warning);
        let Outcome::Failed(why) = both else {
            panic!("{both:?}");
        };
        assert!(why.starts_with("panicked; the kernel logged 1 "), "{why}");
        assert!(why.ends_with(warning[0]), "{why}");
    }
}
