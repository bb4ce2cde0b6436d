//! Prints one line for each step; on a terminal the line shows progress.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

/// Shows the step while `work` runs.
pub(crate) fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    if !stderr().is_terminal() {
        eprintln!("{what}");
        return work();
    }
    let bar = ProgressBar::new_spinner().with_message(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed:.dim}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(120));
    let done = work();
    bar.finish_and_clear();
    eprintln!("{what} ({:.1} s)", start.elapsed().as_secs_f64());
    done
}
