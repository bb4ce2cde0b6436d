//! What a detach is asked.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::engine::timing::StageObserver;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BackendId, ParseIdError, Source, Wwid};

/// What to detach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetachTarget {
    /// What an attach of this source brought.
    Source(Source),
    /// A node, or a link to it: of a disk or of a multipath map.
    Device(PathBuf),
    /// A SCSI unit, by a [unique](Wwid::is_unique) name of it. Any other name is refused
    /// where a device has it: that may be another unit's.
    Unit(Wwid),
}

impl From<Source> for DetachTarget {
    fn from(source: Source) -> Self {
        Self::Source(source)
    }
}

impl FromStr for DetachTarget {
    type Err = Error;

    /// A path from the root; `unit:` and a name of the unit in any of its
    /// spellings; or a source.
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
    pub(in crate::engine) abandon: bool,
    pub(super) keep_sessions: bool,
    pub(super) observer: Option<StageObserver>,
}

impl DetachRequest {
    /// A detach that loses nothing, or is refused.
    pub fn new(target: impl Into<DetachTarget>) -> Self {
        Self {
            target: target.into(),
            more: Vec::new(),
            expected: None,
            backend: None,
            abandon: false,
            keep_sessions: false,
            observer: None,
        }
    }

    /// Detaches only the SCSI unit that has this name. Where the source leads nowhere any
    /// more, it finds the unit's paths by a [unique](Wwid::is_unique) name.
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// Another source of the same SCSI unit: the paths that a unit without a
    /// [unique](Wwid::is_unique) name has through other targets are found by it alone.
    #[must_use]
    pub fn path(mut self, source: impl Into<Source>) -> Self {
        self.more.push(source.into());
        self
    }

    /// The id that an NBD source was attached under, where it was given one.
    #[must_use]
    pub fn backend(mut self, id: BackendId) -> Self {
        self.backend = Some(id);
        self
    }

    /// Goes on where the device cannot be written back, in half of the time: a
    /// server or a target that is gone for good. **What was not written is
    /// lost**; what the device is in use for is refused as ever.
    #[must_use]
    pub fn abandon_unwritten(mut self) -> Self {
        self.abandon = true;
        self
    }

    /// Leaves the iSCSI sessions that the engine made logged in, also where no
    /// device is left on one.
    #[must_use]
    pub fn keep_sessions(mut self) -> Self {
        self.keep_sessions = true;
        self
    }

    /// Has `observer` told each stage.
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
