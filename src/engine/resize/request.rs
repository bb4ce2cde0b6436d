//! What to resize, and the result.

use std::path::PathBuf;

use crate::engine::detach::DetachTarget;
use crate::engine::timing::{Phase, StageObserver};
use crate::id::{BackendId, Hctl, Source, Wwid};

/// What to resize, and what the caller expects of it.
#[derive(Debug, Clone)]
pub struct ResizeRequest {
    pub(in crate::engine) target: DetachTarget,
    pub(super) more: Vec<Source>,
    pub(super) expected: Option<Wwid>,
    pub(super) backend: Option<BackendId>,
    pub(in crate::engine) at_least: Option<u64>,
    pub(super) interrupted_at: Option<u64>,
    pub(super) observer: Option<StageObserver>,
}

impl ResizeRequest {
    /// A resize to the size that the array or the NBD server reports.
    pub fn new(target: impl Into<DetachTarget>) -> Self {
        Self {
            target: target.into(),
            more: Vec::new(),
            expected: None,
            backend: None,
            at_least: None,
            interrupted_at: None,
            observer: None,
        }
    }

    /// Resizes only the unit that has this name.
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// Adds another source of the same unit, as [`DetachRequest::path`](crate::DetachRequest::path)
    /// does.
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

    /// The size in bytes to which the array or the NBD server was resized: where a path or the
    /// server reports less, the resize fails.
    #[must_use]
    pub fn at_least(mut self, bytes: u64) -> Self {
        self.at_least = Some(bytes);
        self
    }

    /// The size in bytes before an earlier resize that was interrupted. An NBD device begins with
    /// it again if its connection serves no more.
    #[cfg(feature = "journal")]
    #[must_use]
    pub(in crate::engine) fn interrupted_at(mut self, size_before: u64) -> Self {
        self.interrupted_at = Some(size_before);
        self
    }

    /// Calls `observer` for each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

/// A unit whose paths and map all have the size that the unit itself reports, or an NBD device with
/// the size that its server reports.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Resized {
    /// The node of its map, of its first path, or of the NBD device.
    pub node: PathBuf,
    /// The size in bytes before.
    pub old_size: u64,
    /// The size in bytes now.
    pub size: u64,
    /// The unit's names.
    pub names: Vec<Wwid>,
    /// The addresses of its paths; each has the new size.
    pub paths: Vec<Hctl>,
    /// The name of its map, which has the new size.
    pub map: Option<String>,
    /// The time that each stage took.
    pub phases: Vec<Phase>,
    /// Whether a path or the map had another size before.
    pub changed: bool,
}
