//! The outcome of healing an NBD device.

use std::fmt;
use std::time::Duration;

use crate::error::Error;
use crate::id::{BackendId, NbdIndex, Source};
use crate::nbd::Difference;

/// The outcome of healing one device.
#[derive(Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(
    feature = "serde",
    serde(tag = "outcome", content = "detail", rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum HealOutcome {
    /// The device answers a read, and no connection of it is known to be dead. If another
    /// process made several, the kernel took no further one.
    Healthy,
    /// The kernel took a new connection for each dead one, and the device answers a read.
    /// Live connections were left as they were. The list has the differences that do not
    /// prevent it, such as an export that has grown: its device keeps its size until it is
    /// [resized](crate::Engine::resize). Other content ([`Difference::Content`]) may be that of
    /// another volume.
    ///
    /// If another process attached the device without a request timeout, the kernel does not
    /// show whether it took a connection: one that was offered for a dead one of this
    /// process counts as adopted.
    Adopted(Vec<Difference>),
    /// The device answers a read, but some of its connections are dead, and the error says
    /// why they were not replaced. Or another process made several, so that they may be dead,
    /// and the error says why no further one was made. A server that serves another volume on
    /// a new connection is `IdentityMismatch`.
    Degraded(Error),
    /// The device answered a read late, and no connection of it was dead: the kernel did not
    /// take the new one, which was closed.
    DiscardedByKernel,
    /// The server is back with another export, or with another volume for certain
    /// ([`Difference::Content`]): it was **not** connected, and requests still wait.
    GeometryChanged(Vec<Difference>),
    /// No server came back in time: requests fail with `EIO`. The device stays configured,
    /// and a later heal can reconnect it.
    BudgetSpent,
    /// No server was reached yet, or the healing failed.
    Failed(Error),
}

impl HealOutcome {
    /// A word for logs and labels.
    pub(in crate::engine) fn as_str(&self) -> &'static str {
        self.into()
    }

    /// Whether the device serves I/O.
    #[must_use]
    pub fn serves(&self) -> bool {
        matches!(
            self,
            Self::Healthy | Self::Adopted(_) | Self::Degraded(_) | Self::DiscardedByKernel
        )
    }
}

impl fmt::Display for HealOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Healthy => f.write_str("it is healthy"),
            Self::Adopted(_) => f.write_str("the kernel took new connections"),
            Self::Degraded(error) => write!(f, "it may lack a connection: {error}"),
            Self::DiscardedByKernel => f.write_str("it answered late"),
            Self::GeometryChanged(differences) => {
                let differences: Vec<String> =
                    differences.iter().map(ToString::to_string).collect();
                let differences = differences.join("; ");
                write!(f, "its server serves another export: {differences}")
            }
            Self::BudgetSpent => f.write_str(
                "no server came back within the dead-connection timeout, and its I/O fails",
            ),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

/// What a heal found and did for one device.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HealReport {
    /// The device.
    pub index: NbdIndex,
    /// Its source, which names its server.
    pub source: Source,
    /// The backend id that the kernel stores for it.
    pub backend: BackendId,
    /// The outcome.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub outcome: HealOutcome,
    /// The least time that requests still wait before they fail with `EIO`. `None` if the
    /// device serves I/O, if this process did not see when its link died, or if another
    /// process set the timeout, which the kernel does not show. In seconds when serialised.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "budget_left_seconds",
            serialize_with = "crate::deadline::as_seconds"
        )
    )]
    pub budget_left: Option<Duration>,
    /// How often the server was dialled.
    pub dials: u32,
}
