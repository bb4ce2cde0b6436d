//! The benchmarks that need no other kernel: those of criterion, run here and drawn.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::available_parallelism;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::charts;
use crate::lab;

const BENCHES: [&str; 3] = ["uevent", "inventory", "plan"];

/// The benchmarks' results, and the conditions of the run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HostResults {
    /// `YYYY-MM-DD`, UTC.
    pub(crate) date: String,
    pub(crate) command: String,
    /// `uname -r`.
    pub(crate) kernel: String,
    pub(crate) processors: usize,
    /// The load average over one minute, before and after. It includes the benchmarks' own
    /// load.
    pub(crate) load_average: [f64; 2],
    pub(crate) figures: Vec<Figure>,
}

/// One benchmark.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    /// The median of criterion's samples.
    pub(crate) nanos: f64,
}

/// Runs the benchmarks, and returns the files of their results.
pub(crate) fn run(
    date: String,
    command: String,
    load_average: impl Fn() -> Result<f64>,
) -> Result<Vec<(&'static str, String)>> {
    let before = load_average()?;
    let figures = measure()?;
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let results = HostResults {
        date,
        command,
        kernel: kernel.trim().to_owned(),
        processors: available_parallelism()?.get(),
        load_average: [before, load_average()?],
        figures,
    };
    files(&results)
}

/// The figures, their page and their charts, by file name.
pub(crate) fn files(results: &HostResults) -> Result<Vec<(&'static str, String)>> {
    let mut files = vec![
        ("host.md", tables(results)),
        ("host.json", serde_json::to_string_pretty(results)?),
    ];
    files.extend(charts::draw_host(results));
    Ok(files)
}

fn measure() -> Result<Vec<Figure>> {
    let begun = SystemTime::now();
    let mut bench = Command::new(lab::cargo());
    bench.args(["bench", "--package", "lunbd-benches"]);
    bench.args(BENCHES.iter().flat_map(|name| ["--bench", name]));
    let status = bench.status().context("cargo bench")?;
    if !status.success() {
        bail!("cargo bench ended with {status}");
    }
    let mut figures = Vec::new();
    let criterions = lab::target_directory()?.join("criterion");
    collect(&criterions, begun, &mut figures)?;
    figures.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(figures)
}

/// Collects the figures that were written since `begun`: others are from an earlier run.
fn collect(dir: &Path, begun: SystemTime, figures: &mut Vec<Figure>) -> Result<()> {
    let benchmark = dir.join("new/benchmark.json");
    let written = fs::metadata(&benchmark).and_then(|file| file.modified());
    if written.is_ok_and(|written| written >= begun) {
        let name = &read(&benchmark)?["full_id"];
        let median = &read(&dir.join("new/estimates.json"))?["median"]["point_estimate"];
        figures.push(Figure {
            name: name.as_str().context("a benchmark's name")?.to_owned(),
            nanos: median.as_f64().context("a median")?,
        });
    }
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), begun, figures)?;
        }
    }
    Ok(())
}

fn read(file: &Path) -> Result<Value> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    serde_json::from_str(&text).with_context(|| file.display().to_string())
}

fn tables(results: &HostResults) -> String {
    let mut text = format!(
        "# Benchmarks without a VM\n\n\
         Written by `{}` on {}: criterion's medians, Linux {}, {} processors, load average {:.1} \
         before and {:.1} after (in [host.json](host.json)). The machine of 10,000 disks is a \
         directory in memory.\n\n\
         ![events](host-events.svg)\n\n![inventory](host-inventory.svg)\n\n\
         | | median |\n|---|--:|\n",
        results.command,
        results.date,
        results.kernel,
        results.processors,
        results.load_average[0],
        results.load_average[1]
    );
    for figure in &results.figures {
        let time = charts::time(figure.nanos);
        let _fmt_to_string_cannot_fail = writeln!(text, "| {} | {time} |", figure.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_since_is_taken_and_what_is_of_an_earlier_run_is_not() {
        let dir = std::env::temp_dir().join(format!("lunbd-criterion-{}", std::process::id()));
        let one = dir.join("group/one/new");
        fs::create_dir_all(&one).unwrap();
        fs::write(one.join("benchmark.json"), r#"{"full_id":"group/one"}"#).unwrap();
        let median = r#"{"median":{"point_estimate":12.5}}"#;
        fs::write(one.join("estimates.json"), median).unwrap();
        let names = |begun| {
            let mut figures = Vec::new();
            collect(&dir, begun, &mut figures).unwrap();
            figures
                .into_iter()
                .map(|figure| (figure.name, figure.nanos))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names(SystemTime::UNIX_EPOCH),
            [("group/one".to_owned(), 12.5)]
        );
        let later = SystemTime::now() + std::time::Duration::from_secs(60);
        assert_eq!(names(later), []);
        fs::remove_dir_all(&dir).unwrap();
    }
}
