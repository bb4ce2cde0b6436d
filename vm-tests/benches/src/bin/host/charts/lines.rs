//! Figures by the size of a target, both axes logarithmic.

use crate::svg::{self, line, text};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 76.0;
/// Room for the names at the lines' ends.
const RIGHT: f64 = 540.0;
const TOP: f64 = 88.0;
const BOTTOM: f64 = 376.0;
/// Names nearer to each other than this would overlap.
const APART: f64 = 18.0;
const GREY: &str = "#868e96";

/// A chart.
pub(super) struct Lines {
    pub(super) title: String,
    pub(super) subtitle: String,
    pub(super) x_label: String,
    pub(super) ways: Vec<Line>,
    /// Writes a figure with its unit.
    pub(super) write: fn(f64) -> String,
    /// Writes a figure of an axis.
    pub(super) write_tick: fn(f64) -> String,
}

/// One way's figures.
pub(super) struct Line {
    pub(super) label: String,
    pub(super) colour: &'static str,
    /// The points, ascending, with both figures above 0.
    pub(super) points: Vec<(f64, f64)>,
}

/// Converts figures to positions.
struct Axes {
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    fn x(&self, value: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * part(value, self.x)
    }

    fn y(&self, value: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * part(value, self.y)
    }
}

/// The position of a value between two others, by their logarithms.
fn part(value: f64, (low, high): (f64, f64)) -> f64 {
    (value / low).ln() / (high / low).ln()
}

impl Lines {
    pub(super) fn draw(&self) -> String {
        let mut svg = svg::begin(WIDTH, HEIGHT, &self.title, &self.subtitle);
        let points = || self.ways.iter().flat_map(|way| &way.points);
        let (x, y) = (range(points().map(|p| p.0)), range(points().map(|p| p.1)));
        // The ends of the y axis are ticks. Below the lowest line there is room for several names.
        let ticks = ticks((y.0 / 2.0, y.1));
        let ends = ticks.first().zip(ticks.last());
        let axes = Axes {
            x,
            y: ends.map_or(y, |(low, high)| (*low, *high)),
        };
        self.grid(&mut svg, &axes, &ticks);
        for way in self.ways.iter().rev() {
            curve(&mut svg, &axes, way);
        }
        self.names(&mut svg, &axes);
        svg::end(svg)
    }

    fn grid(&self, svg: &mut String, axes: &Axes, ticks: &[f64]) {
        for tick in ticks {
            let y = axes.y(*tick);
            line(
                svg,
                &format!("<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"#dee2e6\"/>"),
            );
            text(
                svg,
                LEFT - 8.0,
                y + 4.0,
                12,
                "end",
                &(self.write_tick)(*tick),
            );
        }
        let mut sizes: Vec<f64> = self
            .ways
            .iter()
            .flat_map(|way| &way.points)
            .map(|point| point.0)
            .collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        for size in sizes {
            let (x, mark) = (axes.x(size), BOTTOM + 5.0);
            line(
                svg,
                &format!("<path d=\"M{x:.1} {BOTTOM}V{mark}\" stroke=\"{GREY}\"/>"),
            );
            text(svg, x, BOTTOM + 21.0, 12, "middle", &format!("{size}"));
        }
        let middle = f64::midpoint(LEFT, RIGHT);
        text(svg, middle, BOTTOM + 44.0, 13, "middle", &self.x_label);
    }

    /// Writes each way's name and last figure at the end of its line.
    fn names(&self, svg: &mut String, axes: &Axes) {
        let mut names: Vec<(f64, f64, String, &str)> = self
            .ways
            .iter()
            .filter_map(|way| {
                let (x, y) = way.points.last()?;
                let name = format!("{}: {}", way.label, (self.write)(*y));
                Some((axes.x(*x), axes.y(*y), name, way.colour))
            })
            .collect();
        names.sort_by(|a, b| {
            (a.0, a.1)
                .partial_cmp(&(b.0, b.1))
                .unwrap_or(std::cmp::Ordering::Equal)
        });
        let mut last = (f64::NAN, f64::NAN);
        for (x, mut y, name, colour) in names {
            #[expect(clippy::float_cmp, reason = "of one size")]
            if last.0 == x {
                y = y.max(last.1 + APART);
            }
            last = (x, y);
            svg::coloured(svg, x + 10.0, y + 4.0, 13, colour, &name);
        }
    }
}

fn curve(svg: &mut String, axes: &Axes, way: &Line) {
    let places: Vec<(f64, f64)> = way
        .points
        .iter()
        .map(|(x, y)| (axes.x(*x), axes.y(*y)))
        .collect();
    let path: Vec<String> = places
        .iter()
        .map(|(x, y)| format!("{x:.1} {y:.1}"))
        .collect();
    let (path, colour) = (path.join("L"), way.colour);
    line(
        svg,
        &format!("<path d=\"M{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\"/>"),
    );
    for (x, y) in places {
        line(
            svg,
            &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>"),
        );
    }
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, 0.0), |(low, high), value| {
        (value.min(low), value.max(high))
    })
}

/// The ticks around a range above 0: 1, 2 and 5 times the powers of ten.
fn ticks((low, high): (f64, f64)) -> Vec<f64> {
    let mut ticks = Vec::new();
    let mut power = 10_f64.powf(low.log10().floor());
    if !power.is_finite() || power <= 0.0 {
        return ticks;
    }
    loop {
        for step in [1.0, 2.0, 5.0] {
            let tick = power * step;
            if tick <= low {
                ticks.clear();
            }
            ticks.push(tick);
            if tick >= high {
                return ticks;
            }
        }
        power *= 10.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ticks_hold_the_range_and_not_more() {
        assert_eq!(ticks((640.0, 26_500.0))[..2], [500.0, 1000.0]);
        assert_eq!(ticks((640.0, 26_500.0)).last(), Some(&50_000.0));
        assert_eq!(
            ticks((10.0, 630.0)),
            [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
        );
        assert!(ticks(range(std::iter::empty())).is_empty());
    }

    #[test]
    fn names_at_one_place_are_set_apart() {
        let way = |label: &str, at: f64| Line {
            label: label.to_owned(),
            colour: "#000",
            points: vec![(16.0, 700.0), (1024.0, at)],
        };
        let chart = Lines {
            title: "a < b".into(),
            subtitle: String::new(),
            x_label: "LUNs".into(),
            ways: vec![way("one", 700.0), way("two", 700.0)],
            write: |figure| format!("{figure} ms"),
            write_tick: |tick| tick.to_string(),
        };
        let svg = chart.draw();
        assert!(svg.contains("a &lt; b"));
        let height_of = |name: &str| {
            let element = svg.lines().find(|element| element.contains(name)).unwrap();
            let (_, y) = element.split_once("y=\"").unwrap();
            y.split('"').next().unwrap().parse::<f64>().unwrap()
        };
        assert!((height_of("two: 700 ms") - height_of("one: 700 ms")).abs() >= APART);
    }
}
