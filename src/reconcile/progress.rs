//! What a reconciler reports of its progress.

use super::step::StepKind;
use crate::error::Stage;
use crate::id::VolumeId;

/// The counters of a reconciler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[non_exhaustive]
pub struct Counters {
    /// How often its loop woke, by an event, a step's end, a timer or a call.
    pub wakeups: u64,
    /// Refreshes of the status of all volumes.
    pub full_refreshes: u64,
    /// Refreshes of the status of only those volumes that an event concerned.
    pub partial_refreshes: u64,
    /// Plans made.
    pub plans: u64,
    /// Steps that ended.
    pub steps: u64,
    /// Steps that failed.
    pub failures: u64,
}

/// A step that a worker does.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct RunningStep {
    /// The volume.
    pub volume: VolumeId,
    /// The kind of the step.
    pub kind: StepKind,
    /// The stage that an attach or a detach has reached.
    pub stage: Option<Stage>,
}
