//! One more device beside other devices, as a chart.

use vm_bench::figures::{Scale, ScaleWay};

use super::COLOURS;
use super::lines::{Line, Lines};
use crate::results::Results;

/// Draws the system calls of an attach and a detach. Both axes are logarithmic, so the device
/// itself counts as one of those that are attached.
pub(crate) fn draw_scale(results: &Results, scale: &Scale) -> String {
    let line = |(way, colour): (&ScaleWay, &'static str)| Line {
        label: way.way.clone(),
        colour,
        points: way
            .beside
            .iter()
            .map(|beside| (f64::from(beside.others + 1), beside.syscalls()))
            .collect(),
    };
    let lines = Lines {
        title: "System calls of one attach and one detach (median)".to_owned(),
        subtitle: format!(
            "Linux {}, systemd-udevd {}, QEMU ({}), {}",
            results.figures.kernel, results.figures.udev, results.accelerator, results.date
        ),
        x_label: "devices that are attached, this one among them".to_owned(),
        ways: scale.ways.iter().zip(COLOURS).map(line).collect(),
        write: |count| format!("{count:.0}"),
        write_tick: |tick| tick.to_string(),
    };
    lines.draw()
}
