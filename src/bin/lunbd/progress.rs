//! The current stage of a call, shown on a terminal only.

use std::io::{IsTerminal, stderr};
use std::sync::LazyLock;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use lunbd::engine::StageObserver;

use crate::threads;

const TURN: Duration = Duration::from_millis(100);

/// The progress lines on standard error; other lines are written while they are
/// suspended.
pub(crate) static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// A line on standard error that disappears when it is dropped. There is none if
/// standard error is no terminal, since a hidden bar would still have a thread.
pub(crate) struct Progress(Option<Bar>);

struct Bar {
    bar: ProgressBar,
    /// Dropping the sender ends the ticking. This thread replaces indicatif's own, which
    /// panics if it cannot start.
    ticking: Option<(SyncSender<()>, JoinHandle<()>)>,
}

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
        let (ended, end) = mpsc::sync_channel(0);
        let own = bar.clone();
        let tick = move || {
            while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(TURN) {
                own.tick();
            }
        };
        // Without the thread the line changes only with the stages.
        let ticking = threads::start("lunbd-tick", tick).ok();
        let ticking = ticking.map(|thread| (ended, thread));
        Self(Some(Bar { bar, ticking }))
    }

    pub(crate) fn observer(&self) -> StageObserver {
        let bar = self.0.as_ref().map(|bar| bar.bar.clone());
        StageObserver::new(move |stage| {
            if let Some(bar) = &bar {
                bar.set_message(stage.to_string());
            }
        })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(Bar { bar, ticking }) = self.0.take() {
            if let Some((ended, thread)) = ticking {
                drop(ended);
                let _drew = thread.join();
            }
            bar.finish_and_clear();
        }
    }
}
