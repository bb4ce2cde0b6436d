//! One row of `results/sweeps.md`: the result of one whole sweep on one kernel.
//!
//! The sweep prints it, and `sweep-table` puts it into the table.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::job::TOLD;

/// The prefix, after [`TOLD`], of an output line with a row.
const MARK: &str = "sweep ";

const HEAD: &str = "\
# Whole sweeps

A run of `vm-tests/test` takes a part of each sweep, and the next seed takes another part:
`vm-tests/src/guest/rotation.rs` says how many seeds take every point. Each row is from a run that
took every point and passed. A point that an operation does not reach a second time is no kill and
no fault, and the row counts it. These commands write a row:

    LUNBD_VM_SWEEPS=whole vm-tests/test --vm-only TEST | tee sweep.log
    cargo run --package vm-tests --bin sweep-table < sweep.log

| sweep | kernel | what was done | where | seconds | TEST | date |
|---|---|---|---|--:|---|---|
";

/// The result of one whole sweep on one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepRow {
    /// The name of the sweep: `kills, SCSI`.
    pub sweep: String,
    /// The kernel's release.
    pub kernel: String,
    /// `93 kills`.
    pub done: String,
    /// `40 of the 40 points of journal, scsi`.
    pub points: String,
    /// The duration of the sweep.
    pub seconds: u64,
    /// The name of the test function.
    pub test: String,
    /// The day of the run.
    pub date: String,
}

impl SweepRow {
    /// The line that carries the row out of the guest, without [`TOLD`].
    ///
    /// # Panics
    /// Never: a row is strings and a number.
    #[must_use]
    pub fn line(&self) -> String {
        format!("{MARK}{}", serde_json::to_string(self).expect("strings"))
    }

    /// Whether a line that a test told has a row.
    #[must_use]
    pub fn is_in(told: &str) -> bool {
        told.starts_with(MARK)
    }

    /// Parses the row of a line of a run's output.
    #[must_use]
    pub fn of_line(line: &str) -> Option<Self> {
        let line = line.trim();
        let told = line.strip_prefix(TOLD).unwrap_or(line);
        serde_json::from_str(told.strip_prefix(MARK)?).ok()
    }

    /// Parses a row of the table.
    fn of_table(line: &str) -> Option<Self> {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", sweep, kernel, done, points, seconds, test, date, ""] = cells[..] else {
            return None;
        };
        Some(Self {
            sweep: sweep.to_owned(),
            kernel: kernel.to_owned(),
            done: done.to_owned(),
            points: points.to_owned(),
            seconds: seconds.parse().ok()?,
            test: test.trim_matches('`').to_owned(),
            date: date.to_owned(),
        })
    }

    fn key(&self) -> (String, String) {
        (self.sweep.clone(), self.kernel.clone())
    }
}

impl fmt::Display for SweepRow {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sweep,
            kernel,
            done,
            points,
            seconds,
            test,
            date,
        } = self;
        write!(
            formatter,
            "| {sweep} | {kernel} | {done} | {points} | {seconds} | `{test}` | {date} |"
        )
    }
}

/// The table in which the rows of a run's output replace the older rows of the same sweeps on
/// the same kernels.
#[must_use]
pub fn updated(table: &str, output: &str) -> String {
    let old = table.lines().filter_map(SweepRow::of_table);
    let new = output.lines().filter_map(SweepRow::of_line);
    let rows: BTreeMap<_, _> = old.chain(new).map(|row| (row.key(), row)).collect();
    let lines: Vec<String> = rows.values().map(|row| format!("{row}\n")).collect();
    format!("{HEAD}{}", lines.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(sweep: &str, date: &str) -> SweepRow {
        SweepRow {
            sweep: sweep.to_owned(),
            kernel: "6.1.0-56-amd64".to_owned(),
            done: "93 kills".to_owned(),
            points: "40 of the 40 points of journal, scsi".to_owned(),
            seconds: 80,
            test: "a_scsi_volume".to_owned(),
            date: date.to_owned(),
        }
    }

    #[test]
    fn the_table_of_this_repository_holds_what_the_command_writes() {
        let table = include_str!("../results/sweeps.md");
        assert_eq!(updated(table, ""), table);
    }

    #[test]
    fn a_new_row_replaces_the_older_one_of_its_sweep_and_leaves_the_others() {
        let (scsi, nbd) = (
            row("kills, SCSI", "2026-11-22"),
            row("kills, NBD", "2026-11-22"),
        );
        let output = format!("PASS\n     {}\n{TOLD}{}\n", scsi.line(), nbd.line());
        let first = updated("", &output);
        assert_eq!(first.lines().filter_map(SweepRow::of_table).count(), 2);
        let newer = row("kills, SCSI", "2026-11-23");
        let second = updated(&first, &newer.line());
        let rows: Vec<SweepRow> = second.lines().filter_map(SweepRow::of_table).collect();
        assert_eq!(rows, [nbd, newer]);
        assert_eq!(updated(&second, "no row\nsweep torn{"), second);
    }
}
