//! TLS of a device, as a table.

use vm_bench::figures::{Tls, TlsLoad};

use super::{Results, conditions, line};

/// The part as Markdown.
pub(crate) fn write_tls(results: &Results, tls: &Tls) -> String {
    let mut text = format!(
        "# One NBD device with the kernel's TLS and with a proxy's\n\n\
         {}\n\n\
         nbdkit's memory export over TCP and loopback. Requests go one after the other, with \
         `O_DIRECT`. The processor time is that of the whole machine: kernel, proxy and \
         server. The figures are medians of {} rounds. The ways take turns, and a first round is \
         not counted.\n\n\
         ![throughput](tls.svg)\n\n\
         | way | load | MiB/s | times the proxy's | processor s/GiB | times the proxy's |\n\
         |---|---|--:|--:|--:|--:|\n",
        conditions(results, "tls.json"),
        tls.rounds,
    );
    let proxied = tls.ways.last().map_or(&[][..], |way| &way.loads);
    for way in &tls.ways {
        for (load, proxied) in way.loads.iter().zip(proxied) {
            line(&mut text, &row(&way.way, load, proxied));
        }
    }
    text
}

fn row(way: &str, load: &TlsLoad, proxied: &TlsLoad) -> String {
    let (throughput, cpu) = (load.throughput.median, load.cpu.median);
    format!(
        "| {way} | {} | {throughput:.1} | {:.2} x | {cpu:.1} | {:.2} x |",
        load.load,
        throughput / proxied.throughput.median,
        cpu / proxied.cpu.median
    )
}
