//! Methods to attach a disk, measured in turns.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use lunbd::engine::Phase;
use nix::unistd::{SysconfVar, sysconf};
use vm_bench::figures::{Row, Series};
use vm_tests::guest::own_processes::OwnProcesses;
use vm_tests::guest::udev_arrivals::UdevArrivals;
use vm_tests::guest::{self, UeventCounter, udevd};

use crate::udev_load::UdevLoad;

/// The limit of waits that are not timed.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longer than udevd takes to raise one more event after its last.
const QUIET: Duration = Duration::from_millis(100);

/// One method to attach and detach a disk. `attach` and `detach` return when the method is
/// done by its own account. They return the time of each phase, as far as the method knows it.
pub(crate) trait AttachMethod {
    fn name(&self) -> &'static str;
    fn attach(&mut self) -> Vec<Phase>;
    /// The disk's name below `/sys/block`, once the disk is there with its whole size.
    fn disk(&self) -> Option<String>;
    fn detach(&mut self) -> Vec<Phase>;
    fn is_gone(&self) -> bool;
}

/// How the turns are taken.
#[derive(Clone, Copy)]
pub(crate) struct Rounds<'a> {
    count: usize,
    warming: bool,
    load: Option<&'a UdevLoad>,
}

impl<'a> Rounds<'a> {
    /// One more round before these is not counted, since its caches are cold.
    pub(crate) fn of(count: usize) -> Self {
        Self {
            count,
            warming: true,
            load: None,
        }
    }

    /// No round before these, for methods that take minutes.
    pub(crate) fn few(count: usize) -> Self {
        Self {
            warming: false,
            ..Self::of(count)
        }
    }

    /// Starts each attach while `load` keeps udev's queue busy.
    pub(crate) fn under(self, load: &'a UdevLoad) -> Self {
        Self {
            load: Some(load),
            ..self
        }
    }

    /// Attaches and detaches by each method in turn. Each round begins with another method,
    /// and every second round goes backwards, so that no method always follows the same one.
    pub(crate) fn take(self, ways: &mut [&mut dyn AttachMethod]) -> Vec<Row> {
        let mut runs: Vec<Run> = ways.iter().map(|_| Run::default()).collect();
        let first = usize::from(!self.warming);
        for round in first..=self.count {
            for turn in 0..ways.len() {
                let turn = if round % 2 == 0 {
                    turn
                } else {
                    ways.len() - 1 - turn
                };
                let at = (round + turn) % ways.len();
                let mut warming = Run::default();
                let run = if round == 0 {
                    &mut warming
                } else {
                    &mut runs[at]
                };
                run.once(ways[at], self.load);
            }
        }
        let named = ways.iter().zip(runs);
        named.map(|(way, run)| run.row(way.name())).collect()
    }
}

#[derive(Default)]
struct Run {
    attach: Vec<f64>,
    detach: Vec<f64>,
    attach_cpu: Vec<f64>,
    uevents: Vec<f64>,
    processes: Vec<f64>,
    after_own_event: Vec<f64>,
    attached_early: usize,
    detached_early: usize,
    attach_stages: Stages,
    detach_stages: Stages,
}

impl Run {
    fn once(&mut self, way: &mut dyn AttachMethod, load: Option<&UdevLoad>) {
        udevd::settle();
        let name = way.name();
        let counter = UeventCounter::start();
        let arrivals = UdevArrivals::start();
        let running_load = load.map(UdevLoad::begin);
        let since = SystemTime::now();
        let started = OwnProcesses::start();
        let (used, start) = (machine_cpu(), Instant::now());
        let phases = way.attach();
        let returned = Instant::now();
        self.attach_cpu
            .push(millis(machine_cpu().saturating_sub(used)));
        self.attach.push(millis(returned - start));
        self.attach_stages.add(&phases);
        let mut processes = started.count();
        let is_ready = || way.disk().filter(|disk| udev_handled(disk, since));
        self.attached_early += usize::from(is_ready().is_none());
        let disk = guest::wait_until(name, PATIENCE, is_ready);
        drop(running_load);

        udevd::settle();
        let events = counter.until_quiet(QUIET);
        let own = events.iter().filter(|event| !UdevLoad::caused(event));
        #[expect(clippy::cast_precision_loss, reason = "some thousands")]
        self.uevents.push(own.count() as f64);
        if let Some(arrival) = arrivals.first_of(&disk, "add") {
            self.after_own_event.push(millis_from(arrival.at, returned));
        }
        drop((counter, arrivals));

        let started = OwnProcesses::start();
        let start = Instant::now();
        let phases = way.detach();
        self.detach.push(millis(start.elapsed()));
        processes += started.count();
        #[expect(clippy::cast_precision_loss, reason = "some tens")]
        self.processes.push(processes as f64);
        self.detach_stages.add(&phases);
        let is_gone = || way.is_gone().then_some(());
        self.detached_early += usize::from(is_gone().is_none());
        guest::wait_until(name, PATIENCE, is_gone);
    }

    fn row(self, way: &str) -> Row {
        let whole = self.attach.iter().zip(&self.detach);
        let whole = whole.map(|(attach, detach)| attach + detach).collect();
        Row {
            way: way.to_owned(),
            whole: Series::of(whole),
            attach: Series::of(self.attach),
            detach: Series::of(self.detach),
            attach_cpu: Series::of(self.attach_cpu),
            uevents: Series::of(self.uevents),
            processes: Series::of(self.processes),
            after_own_event: Series::of(self.after_own_event),
            attached_early: self.attached_early,
            detached_early: self.detached_early,
            attach_stages: self.attach_stages.medians(),
            detach_stages: self.detach_stages.medians(),
        }
    }
}

/// Times by stage, with the stages in the order in which they first came.
#[derive(Default)]
struct Stages {
    order: Vec<String>,
    times: BTreeMap<String, Vec<f64>>,
}

impl Stages {
    fn add(&mut self, phases: &[Phase]) {
        for phase in phases {
            let stage = phase.stage.to_string();
            if !self.times.contains_key(&stage) {
                self.order.push(stage.clone());
            }
            self.times
                .entry(stage)
                .or_default()
                .push(millis(phase.took));
        }
    }

    fn medians(mut self) -> Vec<(String, f64)> {
        let median_of = |stage: String| {
            let times = self.times.remove(&stage).unwrap_or_default();
            (stage, Series::of(times).median)
        };
        self.order.into_iter().map(median_of).collect()
    }
}

/// Whether udevd has written the disk's record since then: an NBD disk may still have the
/// record of its last life.
fn udev_handled(disk: &str, since: SystemTime) -> bool {
    let devno = fs::read_to_string(Path::new("/sys/block").join(disk).join("dev"));
    let record = devno.map(|devno| format!("/run/udev/data/b{}", devno.trim()));
    let written = record.and_then(|record| fs::metadata(record)?.modified());
    written.is_ok_and(|written| written >= since)
}

/// The processor time of the whole machine so far, by the kernel's ticks (proc(5), `stat`).
pub(crate) fn machine_cpu() -> Duration {
    let stat = fs::read_to_string("/proc/stat").expect("/proc/stat");
    let line = stat.lines().next().expect("a line for all processors");
    let fields = line.split_whitespace().skip(1).enumerate();
    // Without idle (4th) and waiting for I/O (5th); guests (9th and after) are in user.
    let ticks = fields
        .filter(|(at, _)| *at < 8 && !matches!(at, 3 | 4))
        .map(|(_, field)| field.parse::<u64>().expect("a number of ticks"));
    in_ticks(ticks.sum())
}

/// A number of the clock's ticks, as `/proc` counts.
pub(crate) fn in_ticks(ticks: u64) -> Duration {
    let rate = sysconf(SysconfVar::CLK_TCK)
        .ok()
        .flatten()
        .expect("ticks a second");
    Duration::from_millis(ticks * 1000 / rate.unsigned_abs())
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Milliseconds between the two; negative if `to` was before `from`.
fn millis_from(from: Instant, to: Instant) -> f64 {
    match to.checked_duration_since(from) {
        Some(after) => millis(after),
        None => -millis(from - to),
    }
}
