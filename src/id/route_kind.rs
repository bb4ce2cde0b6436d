//! The transport of a path to a logical unit.

use std::fmt;

use super::{Hctl, HostNo, Portal, SessionId, Wwpn};

/// The transport of a path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "transport", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum RouteKind {
    /// The caller named an address and no transport.
    Address {
        /// The address.
        hctl: Hctl,
    },
    /// An iSCSI session.
    Iscsi {
        /// The portal, as the caller named it.
        portal: Portal,
        /// The session; `None` if there is none.
        session: Option<SessionId>,
    },
    /// A local Fibre Channel port and the target's port that it sees.
    Fc {
        /// The SCSI host of the local port; `None` if no local port sees the target's.
        host: Option<HostNo>,
        /// The target's port, as the caller named it.
        wwpn: Wwpn,
        /// The kernel's name of the target's port on this host.
        rport: Option<String>,
    },
}

impl fmt::Display for RouteKind {
    /// Prints `scsi:2:0:0:1`, `session 3 to 10.0.0.1:3260` or `rport-2:0-1`. Without a
    /// session or a remote port it prints only the portal or the port's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { hctl } => write!(f, "scsi:{hctl}"),
            Self::Iscsi {
                portal,
                session: Some(session),
            } => write!(f, "session {session} to {portal}"),
            Self::Iscsi { portal, .. } => portal.fmt(f),
            Self::Fc {
                rport: Some(rport), ..
            } => f.write_str(rport),
            Self::Fc { wwpn, .. } => wwpn.fmt(f),
        }
    }
}
