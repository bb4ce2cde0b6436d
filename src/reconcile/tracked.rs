//! The data that a reconciler keeps about one volume.

use std::time::{Instant, SystemTime};

use super::failure::Failure;
use super::step::StepKind;
use crate::deadline::{Backoff, jittered};
use crate::engine::{Condition, ReconnectHandle};
use crate::error::Stage;

#[derive(Debug, Default)]
pub(super) struct Tracked {
    pub(super) activity: Activity,
    pub(super) failure: Option<Failure>,
    /// When the kernel reported the death of its link.
    pub(super) link_died_at: Option<Instant>,
    pub(super) reconnect_handle: Option<Box<ReconnectHandle>>,
    pub(super) path_retry: Option<PathRetry>,
    /// A device of it went away during a step, or changed while a step only asked it.
    pub(super) needs_refresh: bool,
    /// What the device reported, where sysfs shows something else. Valid until it is
    /// asked again or is gone.
    pub(super) verified_condition: Option<(Condition, String)>,
    /// Its loss was reported.
    pub(super) loss_was_reported: bool,
    /// The reason for which its step was refused.
    pub(super) refused_reason: Option<String>,
    /// The end of the server's certificate that an event has reported.
    pub(super) reported_certificate_end: Option<SystemTime>,
    /// The number of its last ended step among all ended steps.
    pub(super) last_ended_step: u64,
}

/// What the reconciler does with a volume.
#[derive(Debug, Default)]
pub(super) enum Activity {
    #[default]
    Idle,
    /// Its step waits for a worker.
    Queued,
    /// A worker does a step, which has reached this stage.
    Running(StepKind, Option<Stage>),
}

impl Tracked {
    /// Whether a step of it waits or runs.
    pub(super) fn is_busy(&self) -> bool {
        !matches!(self.activity, Activity::Idle)
    }

    /// The kind of the step that a worker does.
    pub(super) fn running(&self) -> Option<StepKind> {
        match self.activity {
            Activity::Running(kind, _) => Some(kind),
            Activity::Idle | Activity::Queued => None,
        }
    }

    /// Records that it does not serve I/O. Returns whether that was not reported yet.
    pub(super) fn mark_lost(&mut self) -> bool {
        !std::mem::replace(&mut self.loss_was_reported, true)
    }
}

/// When to attach the volume again, for its missing paths.
#[derive(Debug)]
pub(super) struct PathRetry {
    pub(super) at: Instant,
    pauses: Backoff,
}

impl PathRetry {
    pub(super) fn after(mut pauses: Backoff) -> Self {
        let at = Instant::now() + jittered(pauses.pause());
        Self { at, pauses }
    }

    /// The next one, after a longer pause.
    pub(super) fn next(self) -> Self {
        Self::after(self.pauses)
    }
}
