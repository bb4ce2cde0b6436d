//! The state that the steps of one call share: its deadline and the time that its stages
//! take.

use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::engine::telemetry::{self, Call};
use crate::engine::timing::{Phase, StageObserver};
use crate::error::Stage;

/// The stages of a part of a call, measured by its own timer.
pub(super) struct StageTimings(Vec<Phase>);

/// Creates the contexts of the parallel parts of a call.
#[derive(Clone)]
pub(super) struct PartFactory {
    call: Call,
    observer: Option<StageObserver>,
}

impl PartFactory {
    pub(super) fn part(&self, deadline: Deadline) -> CallContext {
        CallContext::new(self.call, self.observer.as_ref(), deadline)
    }
}

/// The deadline of one call, and the timer of its stages: for each stage, even a failed one,
/// it opens a span, calls the observer and records the time.
pub(super) struct CallContext {
    pub(super) deadline: Deadline,
    call: Call,
    done: Vec<Phase>,
    /// The stages of the slowest parallel part so far.
    part: Vec<Phase>,
    current: Option<(Stage, Instant, tracing::span::EnteredSpan)>,
    observer: Option<StageObserver>,
}

impl CallContext {
    pub(super) fn new(call: Call, observer: Option<&StageObserver>, deadline: Deadline) -> Self {
        Self {
            deadline,
            call,
            done: Vec::new(),
            part: Vec::new(),
            current: None,
            observer: observer.cloned(),
        }
    }

    /// Ends the current stage before parallel parts begin, each with a context of its own.
    pub(super) fn parts(&mut self) -> PartFactory {
        self.end_stage();
        PartFactory {
            call: self.call,
            observer: self.observer.clone(),
        }
    }

    /// Adopts the stages of the slowest parallel part.
    pub(super) fn keep_slowest_part(&mut self, part: StageTimings) {
        let total = |phases: &[Phase]| phases.iter().map(|phase| phase.took).sum::<Duration>();
        if total(&part.0) > total(&self.part) {
            self.part = part.0;
        }
    }

    /// Runs `step` with another deadline.
    pub(super) fn with_deadline<T>(
        &mut self,
        deadline: Deadline,
        step: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let whole = std::mem::replace(&mut self.deadline, deadline);
        let result = step(self);
        self.deadline = whole;
        result
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

    /// The stages of this part.
    pub(super) fn into_timings(self) -> StageTimings {
        StageTimings(self.finish())
    }

    pub(super) fn finish(mut self) -> Vec<Phase> {
        self.end_stage();
        std::mem::take(&mut self.done)
    }
}

impl Drop for CallContext {
    fn drop(&mut self) {
        self.end_stage();
    }
}
