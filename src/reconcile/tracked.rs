//! The data that a reconciler keeps about one volume.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::plan::StepKind;
use crate::deadline::Backoff;
use crate::engine::{Condition, ReconnectHandle};
use crate::error::{Error, Stage};

#[derive(Debug, Default)]
pub(super) struct Tracked {
    pub(super) busy: bool,
    /// The step that a worker does with it now.
    pub(super) doing: Option<StepKind>,
    /// The stage that this step has reached.
    pub(super) stage: Option<Stage>,
    pub(super) failure: Option<Failure>,
    /// When the kernel reported the death of its link.
    pub(super) died: Option<Instant>,
    pub(super) reconnect_handle: Option<Box<ReconnectHandle>>,
    /// When to ask again for its missing paths.
    pub(super) path_retry: Option<PathRetry>,
    /// A device of it went away during a step, or changed while a step only asked it.
    pub(super) dirty: bool,
    /// What the device reported, where sysfs shows something else. Valid until it is
    /// asked again or is gone.
    pub(super) differs: Option<(Condition, String)>,
    /// Its loss was reported.
    pub(super) lost: bool,
    /// The reason for which its step was refused.
    pub(super) refused: Option<String>,
    /// The end of the server's certificate that an event has reported.
    pub(super) told_certificate_end: Option<SystemTime>,
    /// The count of all ended steps when its own last step ended.
    pub(super) ended: u64,
}

#[derive(Debug)]
pub(super) struct PathRetry {
    pub(super) pauses: Backoff,
    pub(super) at: Instant,
}

#[derive(Debug)]
pub(super) struct Failure {
    /// The failed step.
    pub(super) step: StepKind,
    pub(super) error: Arc<Error>,
    pub(super) tries: u32,
    /// The run of the loop in which it failed.
    pub(super) run: u64,
    pub(super) pauses: Backoff,
    /// The time of the next attempt; `None` where something must change first.
    pub(super) next: Option<Instant>,
    /// The obstacle may be gone.
    pub(super) is_unblocked: bool,
}
