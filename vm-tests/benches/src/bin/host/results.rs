//! The kept results of a run of the bench, and their tables for a reader.

mod scale;
mod tls;

use std::fmt::Write;

pub(crate) use scale::write_scale;
use serde::{Deserialize, Serialize};
pub(crate) use tls::write_tls;
use vm_bench::figures::{Figures, LogIn, Row, Scsi, Series, Volumes};

/// The figures, and the conditions under which they were taken.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Results {
    /// `YYYY-MM-DD`, UTC.
    pub(crate) date: String,
    pub(crate) command: String,
    pub(crate) accelerator: String,
    pub(crate) host_processors: usize,
    /// The host's load average over one minute, before the boot and after it. If it is above
    /// the two virtual CPUs of the guest, other processes have slowed the guest down.
    pub(crate) load_average: [f64; 2],
    #[serde(flatten)]
    pub(crate) figures: Figures,
}

/// The conditions of the figures, and the file that has every round.
fn conditions(results: &Results, json: &str) -> String {
    let figures = &results.figures;
    format!(
        "Written by `{}` on {}: Linux {}, systemd-udevd {}, {} virtual CPUs, QEMU ({}) on a host \
         with {} CPUs whose load average was {:.1} before and {:.1} after. Every round is in \
         [{json}]({json}).",
        results.command,
        results.date,
        figures.kernel,
        figures.udev,
        figures.processors,
        results.accelerator,
        results.host_processors,
        results.load_average[0],
        results.load_average[1]
    )
}

fn medians(results: &Results) -> String {
    let rounds = results.figures.rounds;
    format!(" The figures are medians of {rounds} rounds unless a table says otherwise.\n\n")
}

/// The SCSI part as Markdown.
pub(crate) fn write(results: &Results, scsi: &Scsi) -> String {
    let mut text = format!(
        "# One LUN wanted: how long, and how many uevents\n\n\
         {}\
         All ways run in one boot and use one LIO iSCSI target for each size, over loopback. Nothing \
         else of the target is attached unless a table says so. \"After udev\" is the time from the \
         arrival of udev's own event for the disk to the return of the way. \"Processors\" is the work \
         of all processors during the attach, with that of the kernel, the target and udev.\n\n\
         ![time](attach-time.svg)\n\n![uevents](attach-uevents.svg)\n\n![busy](attach-busy.svg)\n\n",
        conditions(results, "attach.json") + &medians(results)
    );
    for size in &scsi.sizes {
        table(&mut text, &format!("One LUN of {}", size.luns), &size.rows);
    }
    let busy = &scsi.busy;
    let title = format!(
        "One LUN of {}, while devices of others change {} times a second for {} ms: udev works \
         {} ms on each change, so its queue is busy for {:.0} % of that time",
        busy.luns,
        busy.rate,
        busy.lasting_ms,
        busy.each_ms,
        busy.busy_part * 100.0
    );
    table(&mut text, &title, &busy.rows);
    let title = format!("One LUN more, {} attached already", scsi.among.present);
    table(&mut text, &title, &scsi.among.rows);
    if let Some((least, most)) = spread(scsi) {
        line(
            &mut text,
            &format!(
                "From {} to {} LUNs lunbd's slowest median is {:.0} % above its quickest.",
                scsi.sizes.first().map_or(0, |size| size.luns),
                scsi.sizes.last().map_or(0, |size| size.luns),
                (most / least - 1.0) * 100.0
            ),
        );
    }
    text
}

/// The logins as Markdown.
pub(crate) fn write_log_in(results: &Results, log_in: &LogIn) -> String {
    let mut text = format!(
        "# From nothing to a settled disk, and back\n\n\
         {}\
         One LIO iSCSI target over loopback, to which nobody is logged in before a round or after \
         it. An attach logs in, scans for one LUN and waits for udev; a detach deletes the device \
         and logs out. \"Processors\" is the work of all processors during an attach, with that of the \
         kernel, the target and udev.\n\n",
        conditions(results, "login.json") + &medians(results)
    );
    by_portals(&mut text, log_in.portals, &log_in.rows, &log_in.many, "");
    if let Some(far) = &log_in.far {
        let title = format!(", with a network round trip of {} ms", far.round_trip);
        text.push('\n');
        by_portals(&mut text, log_in.portals, &far.rows, &far.many, &title);
    }
    text
}

fn by_portals(text: &mut String, portals: usize, rows: &[Row], many: &Row, far: &str) {
    table(text, &format!("By one portal{far}"), rows);
    let title = format!("By {portals} portals at once{far}");
    table(text, &title, std::slice::from_ref(many));
    if let [lunbd, open_iscsi, ..] = rows {
        line(
            text,
            &format!(
                "Attach and detach by lunbd are {:.1} times as quick. With {portals} portals an attach \
                 takes {:.2} times as long as with one, and uses {:.2} times the processor time.",
                open_iscsi.whole.median / lunbd.whole.median,
                many.attach.median / lunbd.attach.median,
                many.attach_cpu.median / lunbd.attach_cpu.median
            ),
        );
    }
}

/// The volumes as Markdown.
pub(crate) fn write_volumes(results: &Results, volumes: &Volumes) -> String {
    let mut text = format!(
        "# {} NBD volumes, from nothing to attached and back\n\n\
         {}\
         One nbdkit server over a unix socket. Each way is taken once for its times and once more \
         for its system calls (those of the programs it runs, too), which the kernel's tracepoint \
         counts.\n\n\
         | way | | wall | times lunbd's | CPU | of that, lunbd's event thread | system calls |\n\
         |---|---|--:|--:|--:|--:|--:|\n",
        volumes.volumes,
        conditions(results, "volumes.json") + "\n\n",
    );
    for row in &volumes.rows {
        let first = volumes.rows.first().unwrap_or(row);
        let verbs = [
            ("attach", &row.attach, &first.attach),
            ("detach", &row.detach, &first.detach),
        ];
        for (verb, cost, base) in verbs {
            line(
                &mut text,
                &format!(
                    "| `{}` | {verb} | {:.2} s | {:.1} | {:.2} s | {:.0} ms | {} |",
                    row.way,
                    cost.wall_ms / 1000.0,
                    cost.wall_ms / base.wall_ms,
                    cost.cpu_ms / 1000.0,
                    cost.hub_cpu_ms,
                    cost.syscalls
                ),
            );
        }
    }
    text
}

/// lunbd's shortest and longest median over the sizes.
fn spread(scsi: &Scsi) -> Option<(f64, f64)> {
    let medians = || {
        let first = scsi.sizes.iter().filter_map(|size| size.rows.first());
        first.map(|row| row.attach.median)
    };
    let least = medians().min_by(f64::total_cmp)?;
    Some((least, medians().max_by(f64::total_cmp)?))
}

fn table(text: &mut String, title: &str, rows: &[Row]) {
    line(text, &format!("## {title}\n"));
    line(
        text,
        "| way | attach | times lunbd's | processors | detach | processes | uevents | after udev | rounds | done too early |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    );
    let base = rows.first().map_or(1.0, |row| row.attach.median);
    for row in rows {
        // Older figures lack some of them.
        let figure = |series: &Series, unit: &str, digits: usize| match series.rounds[..] {
            [] => "-".to_owned(),
            _ => format!("{:.digits$}{unit}", series.median),
        };
        line(
            text,
            &format!(
                "| `{}` | {:.0} ms | {:.2} | {} | {:.0} ms | {} | {:.0} | {} | {} | {} |",
                row.way,
                row.attach.median,
                row.attach.median / base,
                figure(&row.attach_cpu, " ms", 0),
                row.detach.median,
                figure(&row.processes, "", 0),
                row.uevents.median,
                figure(&row.after_own_event, " ms", 1),
                row.attach.rounds.len(),
                row.attached_early
            ),
        );
    }
    text.push('\n');
}

fn line(text: &mut String, content: &str) {
    let _fmt_to_string_cannot_fail = writeln!(text, "{content}");
}

#[cfg(test)]
mod tests {
    use vm_bench::figures::{Among, Busy, Cost, Far, Size, VolumesRow};

    use super::*;

    fn row(way: &str, attach: f64) -> Row {
        Row {
            way: way.to_owned(),
            attach: Series::of(vec![attach]),
            ..Row::default()
        }
    }

    fn results() -> Results {
        Results {
            date: "2026-01-01".into(),
            command: "vm-tests/bench".into(),
            accelerator: "tcg".into(),
            host_processors: 2,
            load_average: [0.1, 2.0],
            figures: Figures::default(),
        }
    }

    #[test]
    fn a_table_has_every_ways_ratio_and_the_end_says_how_flat_the_time_is() {
        let size = |luns, lunbd| Size {
            luns,
            rows: vec![row("lunbd", lunbd), row("by hand", 1500.0)],
        };
        let scsi = Scsi {
            lun: 9,
            sizes: vec![size(16, 1000.0), size(1024, 1100.0)],
            among: Among {
                present: 255,
                rows: Vec::new(),
            },
            busy: Busy {
                luns: 256,
                rate: 40,
                each_ms: 300,
                lasting_ms: 3000,
                busy_part: 0.5,
                rows: Vec::new(),
            },
        };
        let text = write(&results(), &scsi);
        assert!(text.contains("| `by hand` | 1500 ms | 1.50 |"), "{text}");
        assert!(text.contains("From 16 to 1024 LUNs lunbd's slowest median is 10 % above"));
    }

    #[test]
    fn many_volumes_are_compared_with_the_first_way_verb_by_verb() {
        let cost = |wall_ms| Cost {
            wall_ms,
            cpu_ms: 500.0,
            hub_cpu_ms: 30.0,
            syscalls: 4000,
        };
        let row = |way: &str, attach, detach| VolumesRow {
            way: way.to_owned(),
            attach: cost(attach),
            detach: cost(detach),
        };
        let volumes = Volumes {
            volumes: 200,
            rows: vec![row("beside", 2000.0, 1000.0), row("serial", 9000.0, 1500.0)],
        };
        let text = write_volumes(&results(), &volumes);
        for line in [
            "| `serial` | attach | 9.00 s | 4.5 | 0.50 s | 30 ms | 4000 |",
            "| `serial` | detach | 1.50 s | 1.5 |",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn logins_end_with_how_much_quicker_the_whole_is_and_what_more_portals_cost() {
        let whole = |row: Row, whole| Row {
            whole: Series::of(vec![whole]),
            ..row
        };
        let log_in = LogIn {
            rows: vec![
                whole(row("lunbd", 100.0), 200.0),
                whole(row("iscsiadm", 500.0), 700.0),
            ],
            portals: 8,
            many: row("lunbd", 130.0),
            far: Some(Far {
                round_trip: 20,
                rows: vec![
                    whole(row("lunbd", 300.0), 400.0),
                    whole(row("iscsiadm", 900.0), 1000.0),
                ],
                many: row("lunbd", 330.0),
            }),
        };
        let text = write_log_in(&results(), &log_in);
        assert!(text.contains("| `iscsiadm` | 500 ms | 5.00 |"), "{text}");
        assert!(text.contains("3.5 times as quick. With 8 portals an attach takes 1.30 times"));
        let title = "## By 8 portals at once, with a network round trip of 20 ms";
        assert!(text.contains(title), "{text}");
        assert!(text.contains("2.5 times as quick. With 8 portals an attach takes 1.10 times"));
    }
}
