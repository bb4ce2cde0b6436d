//! A step on its way from the plan through a worker to its result.

use std::time::{Duration, Instant};

use super::step::Step;
use crate::engine::{Condition, ReconnectHandle, VolumeStatus};
use crate::error::Error;
use crate::id::Source;
use crate::nbd::Difference;

/// The queues of steps, in the order in which workers take steps from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Priority {
    /// First attempts to detach. No attach goes before them.
    Detach,
    /// Steps that failed before, and whose obstacle may be gone.
    Unblocked,
    /// Steps that have not failed.
    FirstTry,
    /// Detaches that failed before.
    DetachRetry,
    /// Steps that failed before and are due for a retry.
    Retry,
}

/// The server, target or host of a step's volume: where one of its volumes hangs, others may
/// hang as well.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    pub(super) name: String,
    /// The step is a heal or a retry, so it counts from its beginning. A first attach counts
    /// when it is slow.
    pub(super) may_hang: bool,
}

impl Endpoint {
    pub(super) fn of(source: &Source, may_hang: bool) -> Self {
        let name = match source {
            Source::Nbd(uri) => format!("{:?}", uri.server()),
            Source::Iscsi(uri) => uri.target().to_string().to_lowercase(),
            Source::Fc(uri) => format!("{:?}", uri.ports()),
            Source::Scsi(hctl) => format!("host{}", hctl.host),
        };
        Self { name, may_hang }
    }
}

/// A step that a worker takes.
pub(super) struct Job {
    pub(super) step: Step,
    /// When a worker took the step.
    pub(super) began: Instant,
    pub(super) priority: Priority,
    /// The earliest time of its retry.
    pub(super) due: Option<Instant>,
    /// The endpoint whose limit of concurrent steps counts it; `None` for a detach.
    pub(super) endpoint: Option<Endpoint>,
    /// The volume does not serve I/O, or its step failed before.
    pub(super) is_failing: bool,
    pub(super) tries: u32,
    pub(super) reconnect_handle: Option<Box<ReconnectHandle>>,
}

/// The result of a step.
pub(super) enum Outcome {
    /// The volume is attached with this status.
    Attached(Box<VolumeStatus>),
    /// Nothing of the volume is left.
    Detached {
        safe_to_unmap: bool,
    },
    /// The device answered, is the expected one and serves I/O.
    Serves,
    /// As `Serves`, over new connections: how their server differs from the earlier one.
    Adopted(Vec<Difference>),
    /// The volume has its new size.
    Resized {
        old_size: u64,
        size: u64,
    },
    /// The step ended, and a refresh must find the volume's status.
    Unknown,
    /// The volume does not serve I/O: its NBD device still has no server, or its SCSI unit does
    /// not answer.
    NotServing(NotServing),
    /// The device answered, and differs from what sysfs shows.
    Differs(Condition, String),
    Failed(Error),
}

/// Why a volume does not serve I/O.
pub(super) struct NotServing {
    pub(super) error: Error,
    /// How long requests still wait; `None` for a SCSI unit, and if the time at which the last
    /// connection died is unknown.
    pub(super) budget_left: Option<Duration>,
    /// For the next attempt.
    pub(super) reconnect_handle: Option<Box<ReconnectHandle>>,
}

impl NotServing {
    pub(super) fn because(error: Error) -> Self {
        Self {
            error,
            budget_left: None,
            reconnect_handle: None,
        }
    }
}
