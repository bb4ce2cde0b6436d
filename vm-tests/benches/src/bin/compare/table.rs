//! The figures for a reader.

use vm_bench::figures::Row;

/// Prints the ways, and compares the others with the first.
pub(crate) fn print(title: &str, rows: &[Row]) {
    println!(
        "{title:<41} {:>10} {:>10} {:>10}   lunbd is quicker by",
        "attach", "detach", "whole"
    );
    let Some(first) = rows.first() else { return };
    for row in rows {
        let median = |row: &Row| [&row.attach, &row.detach, &row.whole].map(|s| s.median);
        let (times, base) = (median(row), median(first));
        let ratio = if std::ptr::eq(row, first) {
            String::new()
        } else {
            let times = times.iter().zip(base).map(|(time, base)| time / base);
            let ratios = times.map(|ratio| format!("{ratio:>7.1} x"));
            ratios.collect()
        };
        let times = times.map(|time| format!("{time:>8.1} ms"));
        println!("  {:<39} {}  {ratio}", row.way, times.concat());
    }
    for row in rows {
        if row.attached_early + row.detached_early > 0 {
            println!(
                "  {}: done before the disk was settled in {} attaches, before it was gone in {} detaches",
                row.way, row.attached_early, row.detached_early
            );
        }
    }
    for row in rows {
        let mut facts = vec![
            format!("{} processes started", row.processes.median),
            format!("{} uevents an attach", row.uevents.median),
        ];
        if !row.after_own_event.rounds.is_empty() {
            let after = row.after_own_event.median;
            facts.push(format!(
                "back {after:.1} ms after udev's own event of the disk"
            ));
        }
        println!("  {}: {}", row.way, facts.join(", "));
    }
    for row in rows {
        print_stages("attach", &row.attach_stages);
        print_stages("detach", &row.detach_stages);
    }
    println!();
}

fn print_stages(call: &str, stages: &[(String, f64)]) {
    if !stages.is_empty() {
        let stages = stages
            .iter()
            .map(|(stage, millis)| format!("{stage} {millis:.1}"));
        println!(
            "  {call} by lunbd, ms: {}",
            stages.collect::<Vec<_>>().join(", ")
        );
    }
}
