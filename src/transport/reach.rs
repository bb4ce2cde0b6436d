//! By which session or remote port a SCSI device is reached.

use std::fmt;

use super::fc::{RemotePort, RportName};
use super::iscsi::Session;
use crate::error::Result;
use crate::id::{Hctl, Iqn, Portal, SessionId, Wwpn};
use crate::kernel::{Roots, sysfs};

/// By which session or remote port a SCSI device is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "transport", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Reach {
    /// An iSCSI session.
    Iscsi {
        /// Its number.
        session: SessionId,
        /// The portal that it was asked to log in to, or else the one that it is
        /// connected to; `None` where neither can be read.
        portal: Option<Portal>,
        /// The target; `None` where it cannot be read.
        target: Option<Iqn>,
    },
    /// A Fibre Channel remote port.
    Fc {
        /// The kernel's name of it, `rport-H:C-R`.
        rport: String,
        /// The target's port; `None` where it cannot be read.
        wwpn: Option<Wwpn>,
    },
}

impl fmt::Display for Reach {
    /// `session 3, 127.0.0.1:3260, iqn...` or `rport-2:0-1, 0x...`, without what
    /// cannot be read.
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

/// By what the device at this address is reached; `None` where it is by neither
/// iSCSI nor Fibre Channel, or where there is no device. What cannot be read of
/// it, as of a dead connection, is left out.
///
/// The device's own place in sysfs says it, so the cost is the same however many
/// sessions there are.
///
/// # Errors
/// Where the device's link cannot be followed.
pub fn reach(roots: &Roots, hctl: Hctl) -> Result<Option<Reach>> {
    // .../hostH/sessionN/targetH:C:T/H:C:T:L or .../hostH/rport-H:C-R/...
    let link = roots.sysfs.join("bus/scsi/devices").join(hctl.to_string());
    let Some(device) = sysfs::resolve(&link)? else {
        return Ok(None);
    };
    let host = format!("host{}", hctl.host);
    let names = device
        .ancestors()
        .filter_map(|dir| dir.file_name()?.to_str());
    let mut names = names.take_while(|name| *name != host);
    Ok(names.find_map(|name| {
        if let Some(id) = Session::of_name(name) {
            let session = Session::new(roots, id);
            let portals = session.device().map(|device| device.portals(roots));
            return Some(Reach::Iscsi {
                session: id,
                portal: portals.and_then(|portals| portals.into_iter().next()),
                target: session.target().ok().flatten(),
            });
        }
        let rport = RportName::parse(name)?;
        Some(Reach::Fc {
            rport: rport.to_string(),
            wwpn: RemotePort::new(roots, rport).wwpn().ok().flatten(),
        })
    }))
}
