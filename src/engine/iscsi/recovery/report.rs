//! What became of a session that was lost.

use std::fmt;
use std::time::Duration;

use crate::error::Error;
use crate::id::{Iqn, Portal, SessionId};

/// How it is with a session that was lost.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(
    feature = "serde",
    serde(tag = "outcome", content = "detail", rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum SessionRecoveryOutcome {
    /// It was logged in again here, and its devices run.
    Recovered,
    /// It serves I/O, by no doing of this process.
    Healthy,
    /// It was not had back yet, and I/O waits. Said of the first try, and again when
    /// another kind of failure is met; it is tried on.
    Failed(Error),
    /// It was lost for longer than its recovery timeout: I/O fails. It is tried on,
    /// and devices run again when it is had back.
    BudgetSpent,
    /// It is gone, or another process ends it: there is nothing to keep any more.
    Gone,
}

impl SessionRecoveryOutcome {
    /// A word for logs and labels.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Recovered => "recovered",
            Self::Healthy => "healthy",
            Self::Failed(_) => "failed",
            Self::BudgetSpent => "budget_spent",
            Self::Gone => "gone",
        }
    }

    /// Whether the session serves I/O.
    #[must_use]
    pub fn serves(&self) -> bool {
        matches!(self, Self::Recovered | Self::Healthy)
    }
}

/// What was found and done about one session.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SessionRecoveryReport {
    /// Its number.
    pub session: SessionId,
    /// With whom it is; `None` where sysfs does not say it any more.
    pub target: Option<Iqn>,
    /// Through which portal, as it was asked for.
    pub portal: Option<Portal>,
    /// How it is.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub outcome: SessionRecoveryOutcome,
    /// How long I/O still waits before it fails; `None` where the session serves
    /// I/O, where I/O waits for ever, or where nobody saw when it was lost.
    /// `seconds` when serialised.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "budget_left_seconds",
            serialize_with = "crate::engine::timing::as_seconds_if_any"
        )
    )]
    pub budget_left: Option<Duration>,
    /// How often a login again was begun.
    pub tries: u32,
}

impl fmt::Display for SessionRecoveryReport {
    /// `session 3 with IQN through PORTAL: logged in again`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session {}", self.session)?;
        if let (Some(target), Some(portal)) = (&self.target, &self.portal) {
            write!(f, " with {target} through {portal}")?;
        }
        f.write_str(": ")?;
        match &self.outcome {
            SessionRecoveryOutcome::Recovered => f.write_str("logged in again"),
            SessionRecoveryOutcome::Healthy => f.write_str("serves"),
            SessionRecoveryOutcome::Failed(error) => write!(f, "lost: {error:#}"),
            SessionRecoveryOutcome::BudgetSpent => {
                f.write_str("NOT recovered in time: I/O fails until it is")
            }
            SessionRecoveryOutcome::Gone => f.write_str("gone"),
        }?;
        match self.budget_left {
            Some(left) => write!(f, " (I/O waits for {} s more)", left.as_secs()),
            None => Ok(()),
        }
    }
}
