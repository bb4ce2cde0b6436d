//! What became of an NBD device that was looked at.

use std::time::Duration;

use crate::error::Error;
use crate::id::{BackendId, NbdIndex, Source};
use crate::nbd::Difference;

/// How the healing of one device came out.
#[derive(Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(
    feature = "serde",
    serde(tag = "outcome", content = "detail", rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum HealOutcome {
    /// The device answers a read: there is nothing to heal.
    Healthy,
    /// The kernel took a new connection for each that was dead, and the device answers
    /// a read. Connections that lived were left as they were. What the server says
    /// otherwise than before, and does no harm, is listed: an export that has grown,
    /// for one, whose device keeps its size until it is [resized](crate::Engine::resize).
    ///
    /// Of a device that another process attached without a request timeout the kernel
    /// does not show whether it took a connection: one that was offered for a dead one of
    /// this process is taken for adopted.
    Adopted(Vec<Difference>),
    /// The device answers a read, but not over all of its connections: some are dead,
    /// and the error says why they were not replaced.
    Degraded(Error),
    /// The device answers a read late, and no connection of it was dead: the kernel
    /// did not take the new one, which was closed.
    DiscardedByKernel,
    /// The server is back with another export, or with another volume for certain
    /// ([`Difference::Content`]): it was **not** connected, and requests still wait.
    GeometryChanged(Vec<Difference>),
    /// No server came back in time: requests fail with `EIO`. The device stays
    /// configured, and a later heal revives it.
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

/// What was found and done about one device.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HealReport {
    /// The device.
    pub index: NbdIndex,
    /// Where its server is.
    pub source: Source,
    /// The id that the kernel keeps with it.
    pub backend: BackendId,
    /// How it came out.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub outcome: HealOutcome,
    /// How long requests still wait before they fail with `EIO`, at the least;
    /// `None` where the device serves I/O, where nobody saw when its link died, or
    /// where another process has said how long that may be, which the kernel shows
    /// to nobody. `seconds` when serialised.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "budget_left_seconds",
            serialize_with = "crate::engine::timing::as_seconds_if_any"
        )
    )]
    pub budget_left: Option<Duration>,
    /// How often the server was dialled.
    pub dials: u32,
}
