//! What a reconciler knows of one volume.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::plan::StepKind;
use crate::deadline::Backoff;
use crate::engine::{Condition, ReconnectHandle};
use crate::error::{Error, Stage};

/// A volume beside what stands of it.
#[derive(Debug, Default)]
pub(super) struct Tracked {
    pub(super) busy: bool,
    /// What a worker does with it now.
    pub(super) doing: Option<StepKind>,
    /// How far that has come.
    pub(super) stage: Option<Stage>,
    pub(super) failure: Option<Failure>,
    /// The kernel said that its link died, then.
    pub(super) died: Option<Instant>,
    pub(super) reconnect_handle: Option<Box<ReconnectHandle>>,
    /// When its missing paths, which were asked for and did not come, are asked
    /// for again.
    pub(super) path_retry: Option<PathRetry>,
    /// Something of it went away while a step was done, or changed while it was asked.
    pub(super) dirty: bool,
    /// What it was found to be when it was asked, where that is not what sysfs shows: it
    /// holds until it is asked again, or until that device has gone.
    pub(super) differs: Option<(Condition, String)>,
    /// It was said to be lost.
    pub(super) lost: bool,
    /// The end of the server's certificate that an event told of.
    pub(super) told_certificate_end: Option<SystemTime>,
    /// What it was refused for.
    pub(super) refused: Option<String>,
    /// The count of ended steps when its own last ended.
    pub(super) ended: u64,
}

#[derive(Debug)]
pub(super) struct PathRetry {
    pub(super) pauses: Backoff,
    pub(super) at: Instant,
}

#[derive(Debug)]
pub(super) struct Failure {
    /// What was tried.
    pub(super) step: StepKind,
    pub(super) error: Arc<Error>,
    pub(super) tries: u32,
    /// In which drive.
    pub(super) run: u64,
    pub(super) pauses: Backoff,
    /// `None` where something must change first.
    pub(super) next: Option<Instant>,
    /// What it failed for may be over.
    pub(super) is_called: bool,
}
