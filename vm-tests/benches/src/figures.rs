//! What the bench measures in the guest and the host keeps and draws.

mod scale;
mod tls;

pub use scale::{Beside, Call, Scale, ScaleWay};
use serde::{Deserialize, Serialize};
pub use tls::{Tls, TlsLoad, TlsWay};

/// One boot's measurements; a part that was not asked for is not there.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Figures {
    /// `uname -r`.
    pub kernel: String,
    /// systemd-udevd's version.
    pub udev: String,
    /// Of the guest.
    pub processors: usize,
    /// Counted rounds of the ways that are compared with the most care.
    pub rounds: usize,
    /// Processes that do next to nothing.
    #[serde(default)]
    pub start: Option<Vec<Start>>,
    /// One NBD export, attached and detached.
    pub nbd: Option<Vec<Row>>,
    /// Many NBD devices by one engine.
    pub nbd_at_once: Option<AtOnce>,
    /// Many NBD volumes that an agent wants.
    pub volumes: Option<Volumes>,
    /// One LUN of targets of several sizes.
    pub scsi: Option<Scsi>,
    /// One LUN of a target that nobody is logged in to.
    pub log_in: Option<LogIn>,
    /// One more device beside others.
    #[serde(default)]
    pub scale: Option<Scale>,
    /// One NBD device with and without TLS.
    #[serde(default)]
    pub tls: Option<Tls>,
}

/// From the start of a process to its end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    /// Its command.
    pub way: String,
    /// In milliseconds.
    pub took: Series,
}

/// One way's rounds, in milliseconds where nothing else is said.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Row {
    /// Its name for a reader.
    pub way: String,
    /// From the call to its return.
    pub attach: Series,
    /// The same of the detach.
    pub detach: Series,
    /// Attach and detach of each round.
    pub whole: Series,
    /// Uevents that the kernel sent for one attach, udevd's own doing included.
    pub uevents: Series,
    /// Processes that the way started for an attach and a detach.
    #[serde(default)]
    pub processes: Series,
    /// Processor time of the whole machine from an attach's call to its return, its
    /// idle time taken off: kernel, target, udev and all.
    #[serde(default)]
    pub attach_cpu: Series,
    /// From the arrival of udev's own event for the disk, as a socket of the
    /// bench's sees it, to the return; negative where the way returned before.
    /// Empty where the way's disk was there before.
    pub after_own_event: Series,
    /// Rounds in which the way was done with its attach before the disk was
    /// there and udev had handled it.
    pub attached_early: usize,
    /// The same of its detach, and the disk not gone.
    pub detached_early: usize,
    /// Medians by stage, in the order of the stages.
    pub attach_stages: Vec<(String, f64)>,
    /// The same of the detach.
    pub detach_stages: Vec<(String, f64)>,
}

/// Every round's figure and their median.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Series {
    /// Between the two in the middle of an even number; 0 of none.
    pub median: f64,
    /// In the order in which they were taken.
    pub rounds: Vec<f64>,
}

impl Series {
    /// With its median.
    #[must_use]
    pub fn of(rounds: Vec<f64>) -> Self {
        let median = median(&rounds);
        Self { median, rounds }
    }
}

/// What all the NBD devices at once came to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AtOnce {
    /// How many, and as many threads.
    pub devices: u32,
    /// All of them attached.
    pub attach: Burst,
    /// All of them detached.
    pub detach: Burst,
}

/// One call for each device, all begun together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Burst {
    /// From the first call's start to the last one's return.
    pub wall_ms: f64,
    /// The process's, user and system.
    pub cpu_ms: f64,
    /// What the kernel numbered meanwhile.
    pub kernel_events: u64,
    /// What the hub read: the kernel's events and udev's.
    pub events_read: u64,
    /// How often its socket lost some.
    pub overruns: u64,
}

/// Many NBD volumes of one server, from nothing to attached and back.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Volumes {
    /// How many.
    pub volumes: u32,
    /// The reconciler first.
    pub rows: Vec<VolumesRow>,
}

/// One way to do it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VolumesRow {
    /// Its name for a reader.
    pub way: String,
    /// All of them.
    pub attach: Cost,
    /// All of them.
    pub detach: Cost,
}

/// What many volumes cost together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cost {
    /// From the first call to the last one's return.
    pub wall_ms: f64,
    /// Of the process and of what it ran, user and system, in the clock's ticks.
    pub cpu_ms: f64,
    /// The part of it that is the hub's thread.
    pub hub_cpu_ms: f64,
    /// Of the process and of what it ran, counted in a round that is not timed.
    pub syscalls: u64,
}

/// One LUN of iSCSI targets of the kernel's own (LIO), over loopback.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Scsi {
    /// The LUN that is wanted, of each target.
    pub lun: u64,
    /// Smallest first.
    pub sizes: Vec<Size>,
    /// With other LUNs of the target attached already.
    pub among: Among,
    /// While others keep udev's queue busy.
    pub busy: Busy,
}

/// One target, nothing of which is attached before a round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Size {
    /// How many it presents.
    pub luns: u32,
    /// lunbd first.
    pub rows: Vec<Row>,
}

/// A target whose other LUNs are all attached.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Among {
    /// How many others.
    pub present: u32,
    /// lunbd first.
    pub rows: Vec<Row>,
}

/// Changes of devices that nobody here waits for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Busy {
    /// How many LUNs the target presents.
    pub luns: u32,
    /// Foreign changes a second.
    pub rate: u32,
    /// How long udev is at work on each, mostly waiting.
    pub each_ms: u64,
    /// How long they go on; they begin before the attach.
    pub lasting_ms: u64,
    /// The part of that time, by samples, in which udev's queue was not empty.
    pub busy_part: f64,
    /// lunbd first.
    pub rows: Vec<Row>,
}

/// Login, one LUN, and logout, as attach and detach.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LogIn {
    /// By one portal, lunbd first.
    pub rows: Vec<Row>,
    /// How many there are of `many`.
    pub portals: usize,
    /// lunbd's, one unit by so many portals at once.
    pub many: Row,
    /// The same over a network that takes its time.
    #[serde(default)]
    pub far: Option<Far>,
}

/// [`LogIn`] where packets are late.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Far {
    /// What a round trip takes, in milliseconds.
    pub round_trip: u64,
    /// By one portal, lunbd first.
    pub rows: Vec<Row>,
    /// By as many portals as of [`LogIn::many`].
    pub many: Row,
}

fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
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
