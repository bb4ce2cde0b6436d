//! The transports of SCSI units. Their present state shows whether a path may be back,
//! independent of which event announced the change.

use std::collections::BTreeSet;

use crate::engine::Engine;
use crate::error::Result;
use crate::id::{HostNo, Iqn, SessionId, Source};
use crate::iscsi::IscsiSession;
use crate::scsi;

/// The driver that creates a host for each session.
const OF_SESSIONS: &str = "iscsi_tcp";

/// A transport of SCSI units.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ScsiTransport {
    Host(HostNo),
    /// A session that serves I/O.
    Session {
        id: SessionId,
        host: HostNo,
        target: Iqn,
    },
}

impl ScsiTransport {
    /// Whether the transport is this host, or a session on it.
    pub(crate) fn is_on(&self, host: HostNo) -> bool {
        let (Self::Host(own) | Self::Session { host: own, .. }) = self;
        *own == host
    }

    /// Whether a path of this source may use the transport.
    pub(crate) fn may_lead_to(&self, source: &Source) -> bool {
        match (self, source) {
            (Self::Host(host) | Self::Session { host, .. }, Source::Scsi(hctl)) => {
                hctl.host == *host
            }
            (Self::Session { target, .. }, Source::Iscsi(uri)) => uri.target() == target,
            (Self::Host(_), Source::Fc(_)) => true,
            _ => false,
        }
    }
}

/// The transports that were found.
#[derive(Debug, Default)]
pub(crate) struct ScsiTransports {
    pub(crate) up: BTreeSet<ScsiTransport>,
    /// A session serves no I/O: it may be logging in, and no event announces the end of a
    /// login.
    pub(crate) is_changing: bool,
}

impl Engine {
    /// # Errors
    /// Those of reading sysfs.
    pub(crate) fn scsi_transports(&self) -> Result<ScsiTransports> {
        let mut found = ScsiTransports::default();
        let hosts = scsi::hosts_without_driver(self.roots(), OF_SESSIONS)?;
        found.up.extend(hosts.into_iter().map(ScsiTransport::Host));
        for session in IscsiSession::all(self.roots())? {
            let serves = session.state()?.as_deref() == Some(IscsiSession::LOGGED_IN);
            match (session.host()?, session.name()?) {
                (Some(host), Some(name)) if serves => {
                    let (id, target) = (session.id(), name.target);
                    let session = ScsiTransport::Session { id, host, target };
                    found.up.insert(session);
                }
                _ => found.is_changing |= session.is_there(),
            }
        }
        Ok(found)
    }
}
