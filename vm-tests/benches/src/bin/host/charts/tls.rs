//! TLS of a device, as a chart.

use vm_bench::figures::Tls;

use super::COLOURS;
use super::bars::{Bar, Bars, Group};
use crate::results::Results;

/// Draws the throughput of each way, by load. The bars of a load are relative to its quickest
/// way, since loads differ by a factor of a hundred.
pub(crate) fn draw_tls(results: &Results, tls: &Tls) -> String {
    let loads = tls.ways.first().map_or(&[][..], |way| &way.loads);
    let group = |(at, title): (usize, String)| {
        let of_ways = tls.ways.iter().filter_map(|way| way.loads.get(at));
        let most = of_ways
            .map(|load| load.throughput.median)
            .fold(0.0, f64::max);
        let bars = tls.ways.iter().zip(COLOURS).filter_map(|(way, colour)| {
            let throughput = way.loads.get(at)?.throughput.median;
            Some(Bar {
                label: way.way.clone(),
                length: throughput / most,
                value: format!("{throughput:.1} MiB/s"),
                colour,
            })
        });
        Group {
            title,
            bars: bars.collect(),
        }
    };
    let titles = loads.iter().map(|load| load.load.clone()).enumerate();
    let bars = Bars {
        title: "One NBD device with and without TLS (median throughput)".to_owned(),
        subtitle: format!(
            "Linux {}, QEMU ({}), {}; nbdkit over loopback, one request after the other",
            results.figures.kernel, results.accelerator, results.date
        ),
        groups: titles.map(group).collect(),
    };
    bars.draw()
}
