//! Ways to a disk that take turns.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use lunbd::engine::Phase;
use serde::Serialize;
use vm_tests::guest::{self, udevd};

pub(crate) const ROUNDS: usize = 20;
/// For what is looked at outside the times.
const PATIENCE: Duration = Duration::from_secs(30);

/// One way to a disk and away from it again. `attach` and `detach` return when
/// the way takes itself for done; what they return is where the time went, as
/// far as they know.
pub(crate) trait Way {
    fn name(&self) -> &'static str;
    fn attach(&mut self) -> Vec<Phase>;
    /// Below `/sys/block`, when the disk is there with all of its size.
    fn disk(&self) -> Option<String>;
    fn detach(&mut self) -> Vec<Phase>;
    fn is_gone(&self) -> bool;
}

/// What one way came to, in milliseconds.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) way: &'static str,
    pub(crate) attach: Series,
    pub(crate) detach: Series,
    /// Attach and detach of each round.
    pub(crate) whole: Series,
    /// Rounds in which the way was done with its attach before the disk was
    /// there and udev had handled it.
    pub(crate) attached_early: usize,
    /// The same of its detach, and the disk not gone.
    pub(crate) detached_early: usize,
    /// Medians by stage, in the order of the stages.
    pub(crate) attach_stages: Vec<(String, f64)>,
    pub(crate) detach_stages: Vec<(String, f64)>,
}

/// Every round's time and their median.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Series {
    pub(crate) median: f64,
    rounds: Vec<f64>,
}

impl Series {
    fn of(rounds: Vec<f64>) -> Self {
        let median = median(&rounds);
        Self { median, rounds }
    }
}

/// Attaches and detaches by each way in turn. Each round begins with another
/// way, and every second goes backwards, so that none always follows the same
/// neighbour.
pub(crate) fn take(ways: &mut [&mut dyn Way]) -> Vec<Row> {
    let mut runs: Vec<Run> = ways.iter().map(|_| Run::default()).collect();
    for round in 0..=ROUNDS {
        for turn in 0..ways.len() {
            let turn = if round % 2 == 0 {
                turn
            } else {
                ways.len() - 1 - turn
            };
            let at = (round + turn) % ways.len();
            // What the first finds cold the others find warm.
            let mut warming = Run::default();
            let run = if round == 0 {
                &mut warming
            } else {
                &mut runs[at]
            };
            run.once(ways[at]);
        }
    }
    let named = ways.iter().zip(runs);
    named.map(|(way, run)| run.row(way.name())).collect()
}

#[derive(Default)]
struct Run {
    attach: Vec<f64>,
    detach: Vec<f64>,
    attached_early: usize,
    detached_early: usize,
    attach_stages: Stages,
    detach_stages: Stages,
}

impl Run {
    fn once(&mut self, way: &mut dyn Way) {
        udevd::settle();
        let name = way.name();
        let since = SystemTime::now();
        let start = Instant::now();
        let phases = way.attach();
        self.attach.push(millis(start.elapsed()));
        self.attach_stages.add(&phases);
        let is_ready = || udev_handled(&way.disk()?, since).then_some(());
        self.attached_early += usize::from(is_ready().is_none());
        guest::wait_until(name, PATIENCE, is_ready);

        udevd::settle();
        let start = Instant::now();
        let phases = way.detach();
        self.detach.push(millis(start.elapsed()));
        self.detach_stages.add(&phases);
        let is_gone = || way.is_gone().then_some(());
        self.detached_early += usize::from(is_gone().is_none());
        guest::wait_until(name, PATIENCE, is_gone);
    }

    fn row(self, way: &'static str) -> Row {
        let whole = self.attach.iter().zip(&self.detach);
        let whole = whole.map(|(attach, detach)| attach + detach).collect();
        Row {
            way,
            whole: Series::of(whole),
            attach: Series::of(self.attach),
            detach: Series::of(self.detach),
            attached_early: self.attached_early,
            detached_early: self.detached_early,
            attach_stages: self.attach_stages.medians(),
            detach_stages: self.detach_stages.medians(),
        }
    }
}

/// Times by stage; the names in the order in which they first came.
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

    fn medians(self) -> Vec<(String, f64)> {
        let median_of = |stage: String| {
            let median = median(&self.times[&stage]);
            (stage, median)
        };
        self.order.into_iter().map(median_of).collect()
    }
}

/// Whether udevd has written the disk's record since: of an NBD disk the last
/// life's may be there still.
fn udev_handled(disk: &str, since: SystemTime) -> bool {
    let devno = fs::read_to_string(Path::new("/sys/block").join(disk).join("dev"));
    let record = devno.map(|devno| format!("/run/udev/data/b{}", devno.trim()));
    let written = record.and_then(|record| fs::metadata(record)?.modified());
    written.is_ok_and(|written| written >= since)
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        even if even % 2 == 0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::float_cmp, reason = "sums of halves are exact")]
    fn the_median_of_an_even_number_of_rounds_lies_between_the_two_in_the_middle() {
        assert_eq!(median(&[9.0, 1.0, 2.0, 4.0]), 3.0);
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
    }
}
