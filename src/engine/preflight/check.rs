//! The result of one check.

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Finding {
    /// As it should be.
    Good,
    /// Attach and detach work with restrictions.
    Limited,
    /// Attach or detach will fail.
    Missing,
}

/// One check of the machine.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// The result.
    pub finding: Finding,
    /// What was seen.
    pub seen: String,
    /// How to mend it; empty if there is nothing to mend.
    pub remedy: &'static str,
}

impl Check {
    pub(in crate::engine) fn good(name: &'static str, seen: impl Into<String>) -> Self {
        Self {
            name,
            finding: Finding::Good,
            seen: seen.into(),
            remedy: "",
        }
    }

    pub(in crate::engine) fn limited(
        name: &'static str,
        seen: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self {
            name,
            finding: Finding::Limited,
            seen: seen.into(),
            remedy,
        }
    }

    pub(in crate::engine) fn missing(
        name: &'static str,
        seen: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self {
            name,
            finding: Finding::Missing,
            seen: seen.into(),
            remedy,
        }
    }
}
