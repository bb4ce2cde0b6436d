//! The cost of a run: wall-clock and processor time of each part.

use std::fs;
use std::ops::AddAssign;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

/// `/proc` counts in hundredths of a second (`USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) wall: Duration,
    /// User and system time.
    pub(crate) processor: Duration,
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.wall += other.wall;
        self.processor += other.processor;
    }
}

/// The parts of a run, in the order of their start.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    parts: Vec<(String, Cost)>,
}

impl Costs {
    /// Starts with the time that this process used before it was the lab: `.ci/run`,
    /// `vm-tests/test`, cargo and the lab follow one another by `exec`, so the kernel counts
    /// them as one process.
    pub(crate) fn of_this_process() -> Result<Self> {
        let before = cost_of_this_process()?;
        Ok(Self {
            parts: vec![("before the lab".to_owned(), before)],
        })
    }

    pub(crate) fn add(&mut self, part: &str, cost: Cost) {
        match self.parts.iter_mut().find(|(name, _)| name == part) {
            Some((_, sum)) => *sum += cost,
            None => self.parts.push((part.to_owned(), cost)),
        }
    }

    /// One line for each part. Machines run beside one another, so the whole takes less
    /// wall-clock time than its parts. The whole also includes the lab's own processor time.
    pub(crate) fn lines(&self) -> Result<Vec<String>> {
        let whole = ("in all".to_owned(), cost_of_this_process()?);
        let lines = self.parts.iter().chain([&whole]);
        let lines = lines.map(|(part, cost)| {
            let (wall, processor) = (minutes(cost.wall), minutes(cost.processor));
            format!("{part:<28} {wall:>6} wall {processor:>6} CPU")
        });
        Ok(lines.collect())
    }
}

/// Measures work that starts processes and waits for them.
pub(crate) struct Meter {
    start: Instant,
    processor: Duration,
}

impl Meter {
    pub(crate) fn start() -> Result<Self> {
        Ok(Self {
            start: Instant::now(),
            processor: cost_of_this_process()?.processor,
        })
    }

    pub(crate) fn stop(self) -> Result<Cost> {
        let now = cost_of_this_process()?.processor;
        Ok(Cost {
            wall: self.start.elapsed(),
            processor: now.saturating_sub(self.processor),
        })
    }
}

/// Waits until a child has ended. Returns the processor time of the child and of the processes
/// that it waited for. The caller still has to wait for the child.
pub(crate) fn processor_time_once_ended(pid: u32) -> Result<Duration> {
    let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    waitid(Id::Pid(Pid::from_raw(i32::try_from(pid)?)), ended).context("a child")?;
    // /proc still shows a process that has ended and was not waited for.
    processor_time(pid)
}

/// The processor time of a process and of the children that it has waited for.
pub(crate) fn processor_time(pid: u32) -> Result<Duration> {
    let times = Times::read(&pid.to_string())?;
    Ok(times.own + times.of_children)
}

/// The cost since this process was forked, with the children that it has waited for.
fn cost_of_this_process() -> Result<Cost> {
    let times = Times::read("self")?;
    let uptime = fs::read_to_string("/proc/uptime").context("/proc/uptime")?;
    let uptime = uptime.split(' ').next().and_then(|text| text.parse().ok());
    let uptime = Duration::from_secs_f64(uptime.context("/proc/uptime")?);
    Ok(Cost {
        wall: uptime.saturating_sub(times.began),
        processor: times.own + times.of_children,
    })
}

/// The times of `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Times {
    own: Duration,
    of_children: Duration,
    /// Counted from the machine's start.
    began: Duration,
}

impl Times {
    fn read(pid: &str) -> Result<Self> {
        let path = format!("/proc/{pid}/stat");
        let stat = fs::read_to_string(&path).with_context(|| path.clone())?;
        Self::parse(&stat).context(path)
    }

    fn parse(stat: &str) -> Option<Self> {
        // The command's name is in parentheses, and may contain spaces and parentheses.
        let (_, fields) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let ticks = |at: usize| Some(TICK * fields.get(at)?.parse().ok()?);
        Some(Self {
            own: ticks(11)? + ticks(12)?,
            of_children: ticks(13)? + ticks(14)?,
            began: ticks(19)?,
        })
    }
}

fn minutes(time: Duration) -> String {
    let seconds = (time.as_millis() + 500) / 1000;
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_a_process_are_read_whatever_its_name_is() {
        let stat = "7 (a) b (c)) Z 1 7 7 0 -1 4194560 100 0 0 0 250 50 1000 200 20 0 1 0 3000 1 1";
        let times = Times::parse(stat).unwrap();
        let expected = Times {
            own: Duration::from_secs(3),
            of_children: Duration::from_secs(12),
            began: Duration::from_secs(30),
        };
        assert_eq!(times, expected);
        assert_eq!(Times::parse("7 (a) Z 1"), None);
    }

    #[test]
    fn a_process_that_was_waited_for_is_in_the_cost() {
        let meter = Meter::start().unwrap();
        let spins = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let ended = std::process::Command::new("sh")
            .args(["-c", spins])
            .status();
        assert!(ended.unwrap().success());
        let cost = meter.stop().unwrap();
        assert!(cost.processor >= TICK, "{cost:?}");
        assert!(cost.wall >= TICK, "{cost:?}");
    }

    #[test]
    fn costs_of_one_part_are_added_up() {
        let cost = |seconds| Cost {
            wall: Duration::from_secs(seconds),
            processor: Duration::from_secs(2 * seconds),
        };
        let mut costs = Costs::default();
        costs.add("6.1", cost(50));
        costs.add("newest", cost(1));
        costs.add("6.1", cost(25));
        let lines = costs.lines().unwrap();
        assert_eq!(
            lines[0],
            "6.1                            1:15 wall   2:30 CPU"
        );
        assert_eq!(lines.len(), 3);
    }
}
