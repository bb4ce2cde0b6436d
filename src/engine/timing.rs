//! The time that the stages of a call take.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Stage;

/// One stage and how long it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Phase {
    /// The stage.
    pub stage: Stage,
    /// How long it took; serialised as `seconds`.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "seconds", serialize_with = "crate::deadline::as_seconds")
    )]
    pub took: Duration,
}

/// Called with each stage as a call enters it. Paths that are probed in parallel call it
/// from their own threads.
#[derive(Clone)]
pub struct StageObserver(pub(super) Arc<dyn Fn(Stage) + Send + Sync>);

impl StageObserver {
    /// Calls `observe` at each stage.
    pub fn new(observe: impl Fn(Stage) + Send + Sync + 'static) -> Self {
        Self(Arc::new(observe))
    }
}

impl fmt::Debug for StageObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StageObserver")
    }
}
