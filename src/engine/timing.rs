//! The time that the stages of a call take.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::telemetry::{self, Call};
use crate::error::Stage;

/// One stage and how long it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Phase {
    /// The stage.
    pub stage: Stage,
    /// How long it took; serialised as `seconds`.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "seconds", serialize_with = "crate::deadline::as_seconds")
    )]
    pub took: Duration,
}

/// Called with each stage as a call enters it. Paths that are probed in parallel call it
/// from their own threads.
#[derive(Clone)]
pub struct StageObserver(Arc<dyn Fn(Stage) + Send + Sync>);

impl StageObserver {
    /// Calls `observe` at each stage.
    pub fn new(observe: impl Fn(Stage) + Send + Sync + 'static) -> Self {
        Self(Arc::new(observe))
    }
}

impl fmt::Debug for StageObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StageObserver")
    }
}

/// The stages of a part of a call, measured by its own timer.
pub(super) struct StageTimings(Vec<Phase>);

/// Creates the timers of the parts of a call.
#[derive(Clone)]
pub(super) struct TimerFactory {
    call: Call,
    observer: Option<StageObserver>,
}

impl TimerFactory {
    pub(super) fn timer(&self) -> StageTimer {
        StageTimer::new(self.call, self.observer.as_ref())
    }
}

/// The timer of one call: for each stage, even a failed one, it opens a span, calls the
/// observer and records the time.
pub(super) struct StageTimer {
    call: Call,
    done: Vec<Phase>,
    /// The stages of the slowest parallel part so far.
    part: Vec<Phase>,
    current: Option<(Stage, Instant, tracing::span::EnteredSpan)>,
    observer: Option<StageObserver>,
}

impl StageTimer {
    pub(super) fn new(call: Call, observer: Option<&StageObserver>) -> Self {
        Self {
            call,
            done: Vec::new(),
            part: Vec::new(),
            current: None,
            observer: observer.cloned(),
        }
    }

    /// Ends the current stage before parallel parts begin, each with a timer of its own.
    pub(super) fn factory(&mut self) -> TimerFactory {
        self.end_stage();
        TimerFactory {
            call: self.call,
            observer: self.observer.clone(),
        }
    }

    /// Adopts the stages of the slowest parallel part.
    pub(super) fn adopt_if_longer(&mut self, part: StageTimings) {
        let total = |phases: &[Phase]| phases.iter().map(|phase| phase.took).sum::<Duration>();
        if total(&part.0) > total(&self.part) {
            self.part = part.0;
        }
    }

    pub(super) fn enter(&mut self, stage: Stage) {
        self.end_stage();
        if let Some(StageObserver(observe)) = &self.observer {
            observe(stage);
        }
        let span = tracing::info_span!("stage", %stage).entered();
        self.current = Some((stage, Instant::now(), span));
    }

    fn end_stage(&mut self) {
        self.done.append(&mut self.part);
        if let Some((stage, since, span)) = self.current.take() {
            drop(span);
            let took = since.elapsed();
            telemetry::stage(self.call, stage, took);
            self.done.push(Phase { stage, took });
        }
    }

    pub(super) fn part(self) -> StageTimings {
        StageTimings(self.finish())
    }

    pub(super) fn finish(mut self) -> Vec<Phase> {
        self.end_stage();
        std::mem::take(&mut self.done)
    }
}

impl Drop for StageTimer {
    fn drop(&mut self) {
        self.end_stage();
    }
}
