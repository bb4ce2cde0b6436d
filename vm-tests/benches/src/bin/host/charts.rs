//! The bench's figures as charts.

mod bars;
mod lines;
mod scale;
mod tls;

use std::collections::BTreeMap;

use bars::{Bar, Bars, Group};
use lines::{Line, Lines};
pub(crate) use scale::draw_scale;
pub(crate) use tls::draw_tls;
use vm_bench::figures::{Row, Scsi};

use crate::host_bench::HostResults;
use crate::results::Results;

/// The colours in the order of the rows: lunbd first, the scan by hand second.
const COLOURS: [&str; 5] = ["#0b7285", "#5f3dc4", "#c92a2a", "#e67700", "#5c940d"];

/// Every chart of the SCSI part, with the name of its file.
pub(crate) fn draw(results: &Results, scsi: &Scsi) -> Vec<(&'static str, String)> {
    let conditions = format!(
        "Linux {}, systemd-udevd {}, QEMU ({}), {}",
        results.figures.kernel, results.figures.udev, results.accelerator, results.date
    );
    let of_sizes = |title: &str, value: fn(&Row) -> f64, write: fn(f64) -> String, write_tick| {
        let lines = Lines {
            title: title.to_owned(),
            subtitle: format!("LIO iSCSI target over loopback; {conditions}"),
            x_label: "LUNs that the target presents".to_owned(),
            ways: lines_of(scsi, value),
            write,
            write_tick,
        };
        lines.draw()
    };
    vec![
        (
            "attach-time.svg",
            of_sizes(
                "From the call to a settled disk, one LUN wanted (median)",
                |row| row.attach.median,
                seconds,
                |tick| format!("{} s", tick / 1000.0),
            ),
        ),
        (
            "attach-uevents.svg",
            of_sizes(
                "Kernel uevents, one LUN wanted (median)",
                |row| row.uevents.median,
                |count| format!("{count:.0}"),
                |tick| tick.to_string(),
            ),
        ),
        ("attach-busy.svg", busy(scsi, &conditions)),
    ]
}

/// The charts of the host's benchmarks, with the names of their files.
pub(crate) fn draw_host(results: &HostResults) -> [(&'static str, String); 2] {
    let subtitle = format!(
        "median; Linux {}, {} processors, {}",
        results.kernel, results.processors, results.date
    );
    let bar = |name: &str, label: &str, colour| {
        let figure = results.figures.iter().find(|figure| figure.name == name)?;
        Some(Bar {
            label: label.to_owned(),
            length: figure.nanos,
            value: time(figure.nanos),
            colour,
        })
    };
    let group = |title: &str, bars: Vec<Option<Bar>>| Group {
        title: title.to_owned(),
        bars: bars.into_iter().flatten().collect(),
    };
    let of_waiters = |count: &str| {
        let name = format!(
            "uevent/to its watch, others present/{}",
            count.replace(',', "")
        );
        bar(&name, &format!("{count} waiting"), COLOURS[0])
    };
    let events = Bars {
        title: "One uevent".to_owned(),
        subtitle: subtitle.clone(),
        groups: vec![
            group(
                "is parsed",
                vec![bar("uevent/parse a disk's add", "a disk's add", COLOURS[0])],
            ),
            group(
                "is handed to the one who waits for it, and read, while others wait for theirs",
                ["1", "100", "10,000"].map(of_waiters).into(),
            ),
        ],
    };
    let inventory = Bars {
        title: "The inventory of a machine with 10,000 SCSI disks".to_owned(),
        subtitle,
        groups: vec![group(
            "the same tree in memory for both; lsblk shows less",
            vec![
                bar(
                    "inventory of 10000/lunbd",
                    "lunbd, in the process",
                    COLOURS[0],
                ),
                bar(
                    "inventory of 10000/lsblk --sysroot --json",
                    "lsblk --sysroot --json",
                    COLOURS[1],
                ),
            ],
        )],
    };
    [
        ("host-events.svg", events.draw()),
        ("host-inventory.svg", inventory.draw()),
    ]
}

/// Criterion's nanoseconds in a readable unit.
pub(crate) fn time(nanos: f64) -> String {
    match nanos {
        ..1e3 => format!("{nanos:.0} ns"),
        1e3..1e6 => format!("{:.1} us", nanos / 1e3),
        1e6..1e9 => format!("{:.1} ms", nanos / 1e6),
        _ => format!("{:.1} s", nanos / 1e9),
    }
}

/// One line for each way, with a point for each size at which it was measured.
fn lines_of(scsi: &Scsi, value: fn(&Row) -> f64) -> Vec<Line> {
    let mut order = Vec::new();
    let mut points: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for size in &scsi.sizes {
        for row in &size.rows {
            if !order.contains(&row.way.as_str()) {
                order.push(row.way.as_str());
            }
            let point = (f64::from(size.luns), value(row));
            points.entry(&row.way).or_default().push(point);
        }
    }
    let coloured = order.into_iter().zip(COLOURS.iter().cycle());
    coloured
        .map(|(way, colour)| Line {
            label: way.to_owned(),
            colour,
            points: points.remove(way).unwrap_or_default(),
        })
        .collect()
}

/// The attach beside other LUNs and beside changes of other devices.
fn busy(scsi: &Scsi, conditions: &str) -> String {
    let busy = &scsi.busy;
    let quiet = scsi.sizes.iter().find(|size| size.luns == busy.luns);
    let quiet = quiet.map_or(&[][..], |size| &size.rows);
    let groups = [
        ("nothing else goes on".to_owned(), quiet),
        (
            format!(
                "others keep udev's queue busy: {} slow changes a second for {} ms",
                busy.rate, busy.lasting_ms
            ),
            &busy.rows[..],
        ),
        (
            format!("{} other LUNs are attached already", scsi.among.present),
            &scsi.among.rows[..],
        ),
    ];
    let bars = Bars {
        title: format!("The same attach of one LUN of {}, while", busy.luns),
        subtitle: format!("median, from the call to a settled disk; {conditions}"),
        groups: groups
            .map(|(title, rows)| Group {
                title,
                bars: bars_of(rows),
            })
            .into(),
    };
    bars.draw()
}

fn bars_of(rows: &[Row]) -> Vec<Bar> {
    let base = rows.first().map_or(1.0, |row| row.attach.median);
    let bar = |(row, colour): (&Row, &&'static str)| {
        let time = row.attach.median;
        let is_first = rows.first().is_some_and(|first| first.way == row.way);
        let value = if is_first {
            seconds(time)
        } else {
            format!("{}, {:.1} times lunbd's", seconds(time), time / base)
        };
        Bar {
            label: row.way.clone(),
            length: time,
            value,
            colour,
        }
    };
    rows.iter().take(2).zip(&COLOURS).map(bar).collect()
}

fn seconds(millis: f64) -> String {
    let seconds = millis / 1000.0;
    if seconds < 0.1 {
        format!("{millis:.0} ms")
    } else if seconds < 10.0 {
        format!("{seconds:.2} s")
    } else {
        format!("{seconds:.0} s")
    }
}
