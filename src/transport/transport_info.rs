//! Finds the session or remote port that leads to a SCSI device.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::path::Path;

use super::fc::{RemotePort, RportName};
use super::iscsi::Session;
use crate::error::Result;
use crate::id::{Hctl, Iqn, Portal, SessionId, Wwpn};
use crate::kernel::{Roots, sysfs};

/// The session or remote port that leads to a SCSI device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "transport", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum TransportInfo {
    /// An iSCSI session.
    Iscsi {
        /// The session's number.
        session: SessionId,
        /// The portal that the login asked for, or else the portal that the session is
        /// connected to; `None` if neither can be read.
        portal: Option<Portal>,
        /// The target; `None` if it cannot be read.
        target: Option<Iqn>,
    },
    /// A Fibre Channel remote port.
    Fc {
        /// The kernel's name of the port, `rport-H:C-R`.
        rport: String,
        /// The target's port; `None` if it cannot be read.
        wwpn: Option<Wwpn>,
    },
}

impl fmt::Display for TransportInfo {
    /// Prints `session 3, 127.0.0.1:3260, iqn...` or `rport-2:0-1, 0x...`, without the
    /// parts that cannot be read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Iscsi {
                session,
                portal,
                target,
            } => {
                write!(f, "session {session}")?;
                if let Some(portal) = portal {
                    write!(f, ", {portal}")?;
                }
                target.iter().try_for_each(|target| write!(f, ", {target}"))
            }
            Self::Fc { rport, wwpn } => {
                f.write_str(rport)?;
                wwpn.iter().try_for_each(|wwpn| write!(f, ", {wwpn}"))
            }
        }
    }
}

/// The transport to the device at this address; `None` if it is neither iSCSI nor Fibre
/// Channel, or if there is no device. Parts that cannot be read, as on a dead connection,
/// are left out.
///
/// The answer comes from the device's own place in sysfs, so the cost does not depend on
/// the number of sessions.
///
/// # Errors
/// Those of following the device's link.
pub fn transport_of(roots: &Roots, hctl: Hctl) -> Result<Option<TransportInfo>> {
    let link = roots.sysfs.join("bus/scsi/devices").join(hctl.to_string());
    let device = sysfs::resolve(&link)?;
    Ok(device.and_then(|dir| TransportReader::new(roots).of(hctl, &dir)))
}

/// Answers [`transport_of`] for many devices, and reads only once what all devices of a target
/// share.
#[derive(Debug)]
pub(crate) struct TransportReader<'a> {
    roots: &'a Roots,
    /// By the target's directory.
    known: HashMap<OsString, Option<TransportInfo>>,
}

impl<'a> TransportReader<'a> {
    pub(crate) fn new(roots: &'a Roots) -> Self {
        let known = HashMap::new();
        Self { roots, known }
    }

    /// As [`transport_of`], for the device with the directory `dir`, whose path has no link.
    pub(crate) fn of(&mut self, hctl: Hctl, dir: &Path) -> Option<TransportInfo> {
        // .../hostH/sessionN/targetH:C:T/H:C:T:L or .../hostH/rport-H:C-R/...
        let target = dir.parent()?;
        if let Some(known) = self.known.get(target.as_os_str()) {
            return known.clone();
        }
        let host = format!("host{}", hctl.host);
        let names = target
            .ancestors()
            .filter_map(|dir| dir.file_name()?.to_str());
        let mut names = names.take_while(|name| *name != host);
        let found = names.find_map(|name| TransportInfo::read(self.roots, name));
        self.known.insert(target.into(), found.clone());
        found
    }
}

impl TransportInfo {
    /// `None` if the device of this name is neither a session nor a port.
    fn read(roots: &Roots, name: &str) -> Option<Self> {
        if let Some(id) = Session::of_name(name) {
            let session = Session::new(roots, id);
            let portals = session.device().map(|device| device.portals(roots));
            return Some(Self::Iscsi {
                session: id,
                portal: portals.and_then(|portals| portals.into_iter().next()),
                target: session.target().ok().flatten(),
            });
        }
        let rport = RportName::parse(name)?;
        Some(Self::Fc {
            rport: rport.to_string(),
            wwpn: RemotePort::new(roots, rport).wwpn().ok().flatten(),
        })
    }
}
