//! A chart of times as bars.

use crate::svg::{self, line, text};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 30.0;
/// Where the bars begin. Their names are to the left.
const BARS: f64 = 290.0;
/// Where the longest bar ends. Its value is to the right.
const LONGEST: f64 = 640.0;
const TOP: f64 = 96.0;
const HEIGHT: f64 = 20.0;

/// A chart.
pub(super) struct Bars {
    pub(super) title: String,
    pub(super) subtitle: String,
    pub(super) groups: Vec<Group>,
}

/// Bars under one title.
pub(super) struct Group {
    pub(super) title: String,
    pub(super) bars: Vec<Bar>,
}

/// One figure.
pub(super) struct Bar {
    pub(super) label: String,
    pub(super) length: f64,
    /// The text to the right of the bar.
    pub(super) value: String,
    pub(super) colour: &'static str,
}

impl Bars {
    pub(super) fn draw(&self) -> String {
        let mut body = String::new();
        let bars = self.groups.iter().flat_map(|group| &group.bars);
        let longest = bars.map(|bar| bar.length).fold(0.0, f64::max);
        let mut y = TOP;
        for group in &self.groups {
            text(&mut body, LEFT, y + 14.0, 15, "start", &group.title);
            y += 26.0;
            for bar in &group.bars {
                let width = (LONGEST - BARS) * bar.length / longest;
                let (middle, colour) = (y + 15.0, bar.colour);
                text(&mut body, BARS - 10.0, middle, 13, "end", &bar.label);
                line(
                    &mut body,
                    &format!(
                        "<rect x=\"{BARS}\" y=\"{y}\" width=\"{width:.1}\" height=\"{HEIGHT}\" fill=\"{colour}\"/>"
                    ),
                );
                text(
                    &mut body,
                    BARS + width + 8.0,
                    middle,
                    13,
                    "start",
                    &bar.value,
                );
                y += HEIGHT + 6.0;
            }
            y += 16.0;
        }
        let mut svg = svg::begin(WIDTH, y + 8.0, &self.title, &self.subtitle);
        svg.push_str(&body);
        svg::end(svg)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_fills_the_room_and_the_others_are_in_proportion() {
        let bar = |length| Bar {
            label: "a way".into(),
            length,
            value: String::new(),
            colour: "#000",
        };
        let group = Group {
            title: "quiet".into(),
            bars: vec![bar(500.0), bar(1000.0)],
        };
        let chart = Bars {
            title: String::new(),
            subtitle: String::new(),
            groups: vec![group],
        };
        let svg = chart.draw();
        assert!(svg.contains("width=\"350.0\" height=\"20\""));
        assert!(svg.contains("width=\"175.0\" height=\"20\""));
    }
}
