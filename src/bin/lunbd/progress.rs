//! The stage that a call is in, on a terminal; nothing in a pipe.

use std::io::{IsTerminal, stderr};
use std::sync::LazyLock;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use lunbd::engine::StageObserver;

/// All that moves on standard error; other lines are written while it is suspended.
pub(crate) static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// A line on standard error that is gone when it is dropped. There is none where
/// standard error is no terminal: a hidden bar would have a thread all the same.
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    pub(crate) fn of(what: &str) -> Self {
        if !stderr().is_terminal() {
            return Self(None);
        }
        let bar = BARS.add(ProgressBar::new_spinner());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix}: {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_prefix(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(Some(bar))
    }

    pub(crate) fn observer(&self) -> StageObserver {
        let bar = self.0.clone();
        StageObserver::new(move |stage| {
            if let Some(bar) = &bar {
                bar.set_message(stage.to_string());
            }
        })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
