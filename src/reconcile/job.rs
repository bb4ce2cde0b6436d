//! A step between the plan and its end.

use std::time::{Duration, Instant};

use super::plan::Step;
use crate::engine::{Condition, ReconnectHandle, VolumeStatus};
use crate::error::Error;
use crate::id::Source;

/// A queue of steps, in the order in which steps are taken from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Priority {
    /// What goes. No attach is before it.
    Leaving,
    /// It failed before, and what it failed for may be over.
    Called,
    /// It has not failed.
    Fresh,
    /// It goes, and failed before.
    LeavingAgain,
    /// It failed before, and it is time for its next try.
    Again,
}

/// Which server, target or host a source leads to: where one of its volumes hangs the
/// others may hang as well.
pub(super) fn place_of(source: &Source) -> String {
    match source {
        Source::Nbd(uri) => format!("{:?}", uri.server()),
        Source::Iscsi(uri) => uri.target().to_string().to_lowercase(),
        Source::Fc(uri) => format!("{:?}", uri.ports()),
        Source::Scsi(hctl) => format!("host{}", hctl.host),
    }
}

/// A step that a worker takes.
pub(super) struct Job {
    pub(super) step: Step,
    pub(super) generation: u64,
    /// When a worker took it.
    pub(super) began: Instant,
    pub(super) lane: Priority,
    /// Since when it may be tried again.
    pub(super) due: Option<Instant>,
    /// The server, target or host at which it is counted with the others there.
    pub(super) place: Option<String>,
    /// It does not serve, or failed before.
    pub(super) is_failing: bool,
    pub(super) tries: u32,
    pub(super) reconnect_handle: Option<Box<ReconnectHandle>>,
}

/// How a step ended.
pub(super) enum Done {
    /// It is as this says.
    Stands(Box<VolumeStatus>),
    /// Nothing of it is left.
    Gone {
        safe_to_unmap: bool,
    },
    /// It was asked, and is the one, and serves.
    Serves,
    /// It is as large as it is wanted.
    Resized {
        old_size: u64,
        size: u64,
    },
    /// It came to its end; how it stands is to be looked for.
    Finished,
    /// An NBD device that still has no server.
    Disconnected {
        reconnect_handle: Option<Box<ReconnectHandle>>,
        error: Error,
        budget_left: Option<Duration>,
    },
    /// It was asked, and is otherwise than sysfs shows.
    Differs(Condition, String),
    Failed(Error),
}
