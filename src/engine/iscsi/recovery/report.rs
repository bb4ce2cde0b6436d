//! The reports about lost sessions.

use std::fmt;
use std::time::Duration;

use crate::error::Error;
use crate::id::{Iqn, Portal, SessionId};

/// The state of a session that was lost.
#[derive(Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(
    feature = "serde",
    serde(tag = "outcome", content = "detail", rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum SessionRecoveryOutcome {
    /// This process logged in again, and the session's devices run.
    Recovered,
    /// The session serves I/O; another process recovered it, or it was never lost.
    Healthy,
    /// The session is not recovered yet, and I/O waits. Reported for the first attempt,
    /// and again when the kind of failure changes; the attempts continue.
    Failed(Error),
    /// The session was lost for longer than its recovery timeout: I/O fails. The attempts
    /// continue, and the devices run again after the recovery.
    BudgetSpent,
    /// The session is gone, or another process ends it: there is nothing to recover.
    Gone,
}

impl SessionRecoveryOutcome {
    /// The outcome as a word for logs and labels.
    pub(super) fn as_str(&self) -> &'static str {
        self.into()
    }

    /// Whether the session serves I/O.
    #[must_use]
    pub fn serves(&self) -> bool {
        matches!(self, Self::Recovered | Self::Healthy)
    }
}

/// The outcome for one session.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SessionRecoveryReport {
    /// Its number in the kernel.
    pub session: SessionId,
    /// Its target; `None` where sysfs no longer shows it.
    pub target: Option<Iqn>,
    /// The portal as the login named it; `None` where sysfs no longer shows it.
    pub portal: Option<Portal>,
    /// The state of the session.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub outcome: SessionRecoveryOutcome,
    /// How long I/O still waits before it fails; `None` where the session serves I/O,
    /// where I/O waits without limit, or where the time of the loss is unknown.
    /// Serialised in seconds.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "budget_left_seconds",
            serialize_with = "crate::deadline::as_seconds"
        )
    )]
    pub budget_left: Option<Duration>,
    /// How many logins were attempted.
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
