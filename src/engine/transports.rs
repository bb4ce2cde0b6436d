//! What leads to SCSI units: by what stands of it, and not by who announces what, is
//! known whether a path may be back.

use std::collections::BTreeSet;

use super::Engine;
use crate::error::Result;
use crate::id::{HostNo, Iqn, SessionId, Source};
use crate::iscsi::IscsiSession;
use crate::scsi;

/// The driver each of whose hosts comes and goes with its session.
const OF_SESSIONS: &str = "iscsi_tcp";

/// What leads to SCSI units.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ScsiTransport {
    Host(HostNo),
    /// It serves I/O.
    Session {
        id: SessionId,
        host: HostNo,
        target: Iqn,
    },
}

impl ScsiTransport {
    /// Whether it is this host, or a session on it.
    pub(crate) fn is_on(&self, host: HostNo) -> bool {
        let (Self::Host(own) | Self::Session { host: own, .. }) = self;
        *own == host
    }

    /// Whether a path of this source may lead over it.
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

/// What was found of it.
#[derive(Debug, Default)]
pub(crate) struct ScsiTransports {
    pub(crate) standing: BTreeSet<ScsiTransport>,
    /// A session serves no I/O: it may be at its login, whose end no event tells.
    pub(crate) is_changing: bool,
}

impl Engine {
    /// # Errors
    /// Where sysfs cannot be read.
    pub(crate) fn scsi_transports(&self) -> Result<ScsiTransports> {
        let mut found = ScsiTransports::default();
        let hosts = scsi::hosts_but_of(self.roots(), OF_SESSIONS)?;
        found
            .standing
            .extend(hosts.into_iter().map(ScsiTransport::Host));
        for session in IscsiSession::all(self.roots())? {
            let serves = session.state()?.as_deref() == Some(IscsiSession::LOGGED_IN);
            match (session.host()?, session.name()?) {
                (Some(host), Some(name)) if serves => {
                    let (id, target) = (session.id(), name.target);
                    let session = ScsiTransport::Session { id, host, target };
                    found.standing.insert(session);
                }
                _ => found.is_changing |= session.is_there(),
            }
        }
        Ok(found)
    }
}
