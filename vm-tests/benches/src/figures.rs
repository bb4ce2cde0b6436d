//! The figures that the bench measures in the guest, and that the host keeps and draws.

mod scale;
mod tls;

pub use scale::{Beside, Call, Scale, ScaleWay};
use serde::{Deserialize, Serialize};
pub use tls::{Tls, TlsLoad, TlsWay};

/// One boot's measurements, without the parts that were not requested.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Figures {
    /// `uname -r`.
    pub kernel: String,
    /// systemd-udevd's version.
    pub udev: String,
    /// The guest's processors.
    pub processors: usize,
    /// The number of counted rounds of the ways that are compared with the most care.
    pub rounds: usize,
    /// Processes that do next to nothing.
    #[serde(default)]
    pub start: Option<Vec<Start>>,
    /// One NBD export, attached and detached.
    pub nbd: Option<Vec<Row>>,
    /// Many NBD devices by one engine.
    pub nbd_at_once: Option<AtOnce>,
    /// Many NBD volumes that a reconciler keeps.
    pub volumes: Option<Volumes>,
    /// One LUN of targets of several sizes.
    pub scsi: Option<Scsi>,
    /// One LUN of a target to which no session exists.
    pub log_in: Option<LogIn>,
    /// One more device beside others.
    #[serde(default)]
    pub scale: Option<Scale>,
    /// One NBD device with and without TLS.
    #[serde(default)]
    pub tls: Option<Tls>,
}

/// The time from the start of a process to its end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    /// Its command.
    pub way: String,
    /// In milliseconds.
    pub took: Series,
}

/// One way's rounds, in milliseconds unless a field says otherwise.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Row {
    /// Its name for a reader.
    pub way: String,
    /// From the call to its return.
    pub attach: Series,
    /// The same for the detach.
    pub detach: Series,
    /// Attach and detach of each round.
    pub whole: Series,
    /// Uevents that the kernel sent for one attach, including those that udevd caused.
    pub uevents: Series,
    /// Processes that the way started for an attach and a detach.
    #[serde(default)]
    pub processes: Series,
    /// Processor time of the whole machine from an attach's call to its return, without idle
    /// time: kernel, target, udev and all.
    #[serde(default)]
    pub attach_cpu: Series,
    /// From the arrival of udev's own event for the disk, as a socket of the bench sees it, to
    /// the return; negative if the way returned before. Empty if the way's disk was there
    /// before.
    pub after_own_event: Series,
    /// The number of rounds in which the way's attach returned before the disk was there and
    /// udev had handled it.
    pub attached_early: usize,
    /// The number of rounds in which the way's detach returned before the disk was gone.
    pub detached_early: usize,
    /// Medians by stage, in the order of the stages.
    pub attach_stages: Vec<(String, f64)>,
    /// The same for the detach.
    pub detach_stages: Vec<(String, f64)>,
}

/// Every round's figure and their median.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Series {
    /// The mean of the two in the middle for an even number of rounds; 0 without rounds.
    pub median: f64,
    /// The figures in the order in which they were taken.
    pub rounds: Vec<f64>,
}

impl Series {
    /// The series of these rounds, with its median.
    #[must_use]
    pub fn of(rounds: Vec<f64>) -> Self {
        let median = median(&rounds);
        Self { median, rounds }
    }
}

/// The figures of many NBD devices at once.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AtOnce {
    /// The number of devices, and of threads.
    pub devices: u32,
    /// The attach of all of them.
    pub attach: Burst,
    /// The detach of all of them.
    pub detach: Burst,
}

/// One call for each device, all begun together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Burst {
    /// From the first call's start to the last one's return.
    pub wall_ms: f64,
    /// The processor time of the process, user and system.
    pub cpu_ms: f64,
    /// The number of events that the kernel sent meanwhile.
    pub kernel_events: u64,
    /// The number of events that the hub read: the kernel's and udev's.
    pub events_read: u64,
    /// How often the hub's socket lost events.
    pub overruns: u64,
}

/// Many NBD volumes of one server, from nothing to attached and back.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Volumes {
    /// The number of volumes.
    pub volumes: u32,
    /// The ways, the reconciler first.
    pub rows: Vec<VolumesRow>,
}

/// One way to do it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VolumesRow {
    /// Its name for a reader.
    pub way: String,
    /// The attach of all volumes.
    pub attach: Cost,
    /// The detach of all volumes.
    pub detach: Cost,
}

/// What many volumes cost together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cost {
    /// From the first call to the last one's return.
    pub wall_ms: f64,
    /// The processor time of the process and of the programs that it ran, user and system, as
    /// the clock's ticks count it.
    pub cpu_ms: f64,
    /// The part of this processor time that the hub's thread used.
    pub hub_cpu_ms: f64,
    /// The system calls of the process and of the programs that it ran, counted in a round
    /// that is not timed.
    pub syscalls: u64,
}

/// One LUN of iSCSI targets of the kernel (LIO), over loopback.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Scsi {
    /// The LUN of each target that is attached.
    pub lun: u64,
    /// The targets, the smallest first.
    pub sizes: Vec<Size>,
    /// A target of which other LUNs are attached already.
    pub among: Among,
    /// A target while other devices keep udev's queue busy.
    pub busy: Busy,
}

/// One target, of which no LUN is attached before a round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Size {
    /// The number of LUNs that it presents.
    pub luns: u32,
    /// The ways, lunbd first.
    pub rows: Vec<Row>,
}

/// A target whose other LUNs are all attached.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Among {
    /// The number of other LUNs.
    pub present: u32,
    /// The ways, lunbd first.
    pub rows: Vec<Row>,
}

/// Changes of devices for which no way waits.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Busy {
    /// The number of LUNs that the target presents.
    pub luns: u32,
    /// Changes of other devices a second.
    pub rate: u32,
    /// How long udev works on each change, mostly waiting.
    pub each_ms: u64,
    /// How long the changes go on. They begin before the attach.
    pub lasting_ms: u64,
    /// The part of that time, by samples, in which udev's queue was not empty.
    pub busy_part: f64,
    /// The ways, lunbd first.
    pub rows: Vec<Row>,
}

/// Login, one LUN, and logout, as attach and detach.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LogIn {
    /// The ways by one portal, lunbd first.
    pub rows: Vec<Row>,
    /// The number of portals of `many`.
    pub portals: usize,
    /// lunbd with one unit by several portals at once.
    pub many: Row,
    /// The same over a slow network.
    #[serde(default)]
    pub far: Option<Far>,
}

/// [`LogIn`] over a network that delays packets.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Far {
    /// The time of a round trip, in milliseconds.
    pub round_trip: u64,
    /// The ways by one portal, lunbd first.
    pub rows: Vec<Row>,
    /// lunbd by as many portals as in [`LogIn::many`].
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
