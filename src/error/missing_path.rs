//! A path that an operation asked for and that is missing.

use std::fmt;

use crate::id::RouteKind;

/// A requested path that is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MissingPath {
    /// The route that the path would take.
    pub via: RouteKind,
    /// Why it is missing.
    pub why: String,
}

impl MissingPath {
    /// `why` prints the reason, with the causes of an error.
    pub(crate) fn new(via: RouteKind, why: &impl fmt::Display) -> Self {
        let why = format!("{why:#}");
        Self { via, why }
    }
}

impl fmt::Display for MissingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.via, self.why)
    }
}
