//! The progress of many volumes at once: moving lines on a terminal, and the events as
//! plain lines.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use lunbd::id::VolumeId;
use lunbd::reconcile::{Event, Events, Reconciler, RunningStep, SequencedEvent};
use lunbd::{Deadline, Result};

use crate::envelope::{self, Type};
use crate::progress::BARS;
use crate::{exit, threads};

/// Shows a reconciler's events and progress until the reconciler is gone.
pub(crate) struct ProgressDisplay {
    printer: JoinHandle<ExitCode>,
    /// Dropping the sender ends the drawing.
    drawing: Option<(SyncSender<()>, JoinHandle<()>)>,
}

impl ProgressDisplay {
    /// Starts the display. With `once`, failed steps are not retried.
    ///
    /// # Errors
    /// `Io` if the printing thread cannot be started.
    pub(crate) fn of(reconciler: &Arc<Reconciler>, once: bool, json: bool) -> Result<Self> {
        let events = reconciler.subscribe();
        let printer = {
            let weak = Arc::downgrade(reconciler);
            threads::start("lunbd-print", move || {
                print_all(events, &weak, (once, json))
            })?
        };
        // Progress lines are for a terminal; a pipe gets only the events.
        let drawing = io::stderr().is_terminal().then(|| {
            let (ended, end) = mpsc::sync_channel(0);
            let weak = Arc::downgrade(reconciler);
            let started = threads::start("lunbd-draw", move || draw(&weak, &end));
            // Only the drawing needs this thread.
            started.ok().map(|thread| (ended, thread))
        });
        let drawing = drawing.flatten();
        Ok(Self { printer, drawing })
    }

    /// Ends the drawing, drops the reconciler and prints the remaining events. Returns the
    /// exit code of the printing.
    pub(crate) fn end(self, reconciler: Arc<Reconciler>) -> ExitCode {
        if let Some((ended, drawing)) = self.drawing {
            drop(ended);
            let _drew = drawing.join();
        }
        let _cleared = BARS.clear();
        drop(reconciler);
        self.printer.join().unwrap_or(ExitCode::FAILURE)
    }
}

fn print_all(mut events: Events, reconciler: &Weak<Reconciler>, how: (bool, bool)) -> ExitCode {
    while let Some(event) = events.next(Deadline::after(Duration::MAX)) {
        if let Err(error) = BARS.suspend(|| print(&event, how)) {
            // The reader is gone: the reconciler stops after the steps under way.
            if let Some(reconciler) = reconciler.upgrade() {
                reconciler.stop();
            }
            return exit::print(|_| Err(error));
        }
    }
    ExitCode::SUCCESS
}

fn print(event: &SequencedEvent, (once, json): (bool, bool)) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match &event.event {
        _ if json => envelope::write(&mut out, Type::Event, event)?,
        // The error is printed with the remaining steps.
        Event::Failed { volume, step, .. } if once => writeln!(out, "{volume}: {step} failed")?,
        _ => writeln!(out, "{event}")?,
    }
    out.flush()
}

/// Draws the running steps until the other end of `end` is dropped.
fn draw(reconciler: &Weak<Reconciler>, end: &mpsc::Receiver<()>) {
    const TURN: Duration = Duration::from_millis(100);
    /// More lines would scroll.
    const MOST: usize = 10;
    let total = BARS.add(ProgressBar::new(0));
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos} of {len} steps {elapsed}") {
        total.set_style(style);
    }
    let mut lines: BTreeMap<VolumeId, ProgressBar> = BTreeMap::new();
    let mut most = 0;
    while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(TURN) {
        let Some(reconciler) = reconciler.upgrade() else {
            break;
        };
        let steps = reconciler.plan().steps;
        let left = steps.iter().filter(|step| step.kind.acts()).count();
        let running = reconciler.running_steps();
        drop(reconciler);
        most = most.max(left);
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        total.set_length(count(most));
        total.set_position(count(most.saturating_sub(left)));
        lines.retain(|volume, line| {
            let stays = running.iter().any(|step| step.volume == *volume);
            if !stays {
                line.finish_and_clear();
            }
            stays
        });
        for RunningStep {
            volume,
            kind,
            stage,
            ..
        } in running
        {
            if lines.len() >= MOST && !lines.contains_key(&volume) {
                continue;
            }
            let line = lines.entry(volume).or_insert_with_key(|volume| {
                let line = BARS.add(ProgressBar::new_spinner());
                if let Ok(style) =
                    ProgressStyle::with_template("{spinner} {prefix}: {msg} {elapsed}")
                {
                    line.set_style(style);
                }
                line.set_prefix(volume.to_string());
                line
            });
            let stage = stage.map_or_else(String::new, |stage| format!(", {stage}"));
            line.set_message(format!("{kind}{stage}"));
            line.tick();
        }
    }
    for line in lines.values() {
        line.finish_and_clear();
    }
    total.finish_and_clear();
}
