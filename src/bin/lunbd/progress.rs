//! The stage that a call is in, on a terminal; nothing in a pipe.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use lunbd::engine::StageObserver;

/// A line on standard error that is gone when it is dropped.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn of(what: &str) -> Self {
        // indicatif draws nothing where standard error is no terminal.
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix}: {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_prefix(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    pub(crate) fn observer(&self) -> StageObserver {
        let bar = self.0.clone();
        StageObserver::new(move |stage| bar.set_message(stage.to_string()))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
