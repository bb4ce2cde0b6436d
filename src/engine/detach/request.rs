//! The request of a detach.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::engine::timing::StageObserver;
use crate::engine::usage::claim::FlushPolicy;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BackendId, ParseIdError, Source, Wwid};

/// What to detach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetachTarget {
    /// The device that an attach of this source brought.
    Source(Source),
    /// A node of a disk or of a multipath map, or a link to it.
    Device(PathBuf),
    /// A SCSI unit, by one of its [unique](Wwid::is_unique) names. Any other name is
    /// refused where a device has it, since another unit may share it.
    Unit(Wwid),
}

impl From<Source> for DetachTarget {
    fn from(source: Source) -> Self {
        Self::Source(source)
    }
}

impl FromStr for DetachTarget {
    type Err = Error;

    /// Parses an absolute path of a node, `unit:` with a name of the unit in any of its
    /// spellings, or a source.
    fn from_str(text: &str) -> Result<Self> {
        if text.starts_with('/') {
            return Ok(Self::Device(PathBuf::from(text)));
        }
        if let Some(name) = text.strip_prefix("unit:") {
            return Ok(Self::Unit(name.parse()?));
        }
        text.parse()
            .map(Self::Source)
            .map_err(|error: ParseIdError| {
                let message = format!("{error}, the path of a disk's node, or unit:NAME");
                Error::new(ErrorKind::InvalidInput, message)
            })
    }
}

impl fmt::Display for DetachTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(source) => source.fmt(f),
            Self::Device(path) => path.display().fmt(f),
            Self::Unit(name) => write!(f, "unit:{name}"),
        }
    }
}

/// What to detach, and how.
#[derive(Debug, Clone)]
pub struct DetachRequest {
    pub(in crate::engine) target: DetachTarget,
    pub(super) more: Vec<Source>,
    pub(in crate::engine) expected: Option<Wwid>,
    pub(in crate::engine) backend: Option<BackendId>,
    pub(in crate::engine) flush_policy: FlushPolicy,
    pub(in crate::engine) keep_sessions: bool,
    pub(in crate::engine) observer: Option<StageObserver>,
}

impl DetachRequest {
    /// A detach that fails rather than lose data. If a multipath map queues its I/O and has no
    /// path, the detach waits for one until the deadline, and the map keeps what it queued.
    /// If the table of a map that does not queue has no path, the detach ends as `NotReady`.
    pub fn new(target: impl Into<DetachTarget>) -> Self {
        Self {
            target: target.into(),
            more: Vec::new(),
            expected: None,
            backend: None,
            flush_policy: FlushPolicy::Require,
            keep_sessions: false,
            observer: None,
        }
    }

    /// Detaches only the SCSI unit that has this name. Where the source leads nowhere any
    /// more, the unit's paths are found by this name if it is [unique](Wwid::is_unique).
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// Adds another source of the same SCSI unit. A unit without a
    /// [unique](Wwid::is_unique) name needs it: the paths through other targets are not
    /// found otherwise.
    #[must_use]
    pub fn path(mut self, source: impl Into<Source>) -> Self {
        self.more.push(source.into());
        self
    }

    /// The backend id of an NBD source that was attached with
    /// [`NbdOptions::backend`](crate::engine::NbdOptions::backend).
    #[must_use]
    pub fn backend(mut self, id: BackendId) -> Self {
        self.backend = Some(id);
        self
    }

    /// Goes on where the device cannot be written back within half of the time, for a
    /// server or a target that is gone for good. **Unwritten data is lost.** A device in
    /// use is still refused. A multipath map that queues its I/O and has no path when half of the
    /// time has passed is told to fail it: a process that this one cannot see
    /// ([`not_looked_at`](crate::engine::Detachment::not_looked_at)) then loses its writes too.
    #[must_use]
    pub fn abandon_unwritten(mut self) -> Self {
        self.flush_policy = FlushPolicy::Abandon;
        self
    }

    /// Keeps the iSCSI sessions of the engine logged in, even where no device is left on
    /// one.
    #[must_use]
    pub fn keep_sessions(mut self) -> Self {
        self.keep_sessions = true;
        self
    }

    /// Calls `observer` for each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

impl From<DetachTarget> for DetachRequest {
    fn from(target: DetachTarget) -> Self {
        Self::new(target)
    }
}

impl From<Source> for DetachRequest {
    fn from(source: Source) -> Self {
        Self::new(source)
    }
}
