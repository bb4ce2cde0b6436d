//! The story as an SVG: a lane of time for each way to the disk, with a tick for every uevent
//! and the result.

use std::fmt::Write;

use vm_bench::story::{Figures, Run};

use crate::svg::{self, line, text};

const WIDTH: f64 = 860.0;
const MARGIN: f64 = 30.0;
const LANE: f64 = 96.0;
const TOP: f64 = 84.0;
/// More ticks than this in a lane cannot be told apart.
const TICKS: usize = 600;
const COLOURS: [&str; 3] = ["#0b7285", "#c92a2a", "#5f3dc4"];

/// Draws `figures`.
pub(crate) fn draw(figures: &Figures) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a handful of lanes")]
    let height = TOP + LANE * figures.runs.len() as f64 + 46.0;
    let last = figures
        .runs
        .iter()
        .map(|run| run.quiet_at)
        .max()
        .unwrap_or(0)
        .max(1);
    let title = format!("One disk wanted, {} LUNs behind the host", figures.luns);
    let subtitle = format!(
        "each tick is a kernel uevent; Linux {}, systemd-udevd",
        figures.kernel
    );
    let mut svg = svg::begin(WIDTH, height, &title, &subtitle);
    let mut y = TOP;
    for (run, colour) in figures.runs.iter().zip(COLOURS.iter().cycle()) {
        lane(&mut svg, run, colour, y, last);
        y += LANE;
    }
    axis(&mut svg, y, last);
    svg::end(svg)
}

fn lane(svg: &mut String, run: &Run, colour: &str, y: f64, last: u64) {
    let uevents = run.uevents_at.len();
    let disks = if run.disks == 1 {
        "1 disk".to_owned()
    } else {
        format!("{} disks", run.disks)
    };
    let label = format!("{}: {disks}", run.what);
    text(svg, MARGIN, y + 18.0, 15, "start", &label);
    let figures = format!("{uevents} uevents, quiet after {}", seconds(run.quiet_at));
    text(svg, WIDTH - MARGIN, y + 18.0, 15, "end", &figures);
    let (top, height) = (y + 30.0, 34.0);
    let end = (x(run.quiet_at, last) - MARGIN).max(1.5);
    line(
        svg,
        &format!(
            "<rect x=\"{MARGIN}\" y=\"{top}\" width=\"{end:.1}\" height=\"{height}\" fill=\"{colour}\" fill-opacity=\"0.15\"/>"
        ),
    );
    let step = uevents.div_ceil(TICKS).max(1);
    let mut path = String::new();
    for at in run.uevents_at.iter().step_by(step) {
        let _fmt_to_string_cannot_fail = write!(path, "M{:.1} {top}v{height}", x(*at, last));
    }
    line(
        svg,
        &format!("<path d=\"{path}\" stroke=\"{colour}\" stroke-width=\"1.2\"/>"),
    );
}

fn axis(svg: &mut String, y: f64, last: u64) {
    let (left, right) = (MARGIN, WIDTH - MARGIN);
    line(
        svg,
        &format!("<path d=\"M{left} {y}H{right}\" stroke=\"#868e96\"/>"),
    );
    for part in 0..=4 {
        let at = last * part / 4;
        let (position, mark) = (x(at, last), y + 5.0);
        line(
            svg,
            &format!("<path d=\"M{position:.1} {y}V{mark}\" stroke=\"#868e96\"/>"),
        );
        let anchor = match part {
            0 => "start",
            4 => "end",
            _ => "middle",
        };
        text(svg, position, y + 22.0, 12, anchor, &seconds(at));
    }
}

/// The position of a moment on the axis.
#[expect(clippy::cast_precision_loss, reason = "milliseconds of one boot")]
fn x(at: u64, last: u64) -> f64 {
    MARGIN + (WIDTH - 2.0 * MARGIN) * (at.min(last) as f64 / last as f64)
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds of one boot")]
fn seconds(millis: u64) -> String {
    format!("{:.1} s", millis as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_has_its_figures_in_the_picture() {
        let run = |what: &str, uevents, quiet_at| Run {
            what: what.into(),
            disks: 1,
            uevents_at: vec![5; uevents],
            quiet_at,
        };
        let figures = Figures {
            kernel: "6.1 <x>".into(),
            luns: 256,
            runs: vec![run("targeted", 10, 240), run("wildcard", 2550, 79_000)],
        };
        let svg = draw(&figures);
        assert!(svg.contains("10 uevents, quiet after 0.2 s"));
        assert!(svg.contains("2550 uevents, quiet after 79.0 s"));
        assert!(svg.contains("6.1 &lt;x>"));
        assert!(
            svg.matches('M').count() < 1300,
            "ticks that cannot be told apart are left out"
        );
    }
}
