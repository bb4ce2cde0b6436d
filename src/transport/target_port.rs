//! The port of a target that a SCSI device is reached through.

use std::path::Path;

use super::iscsi::Session;
use super::reach::{TransportInfo, TransportReader};
use crate::id::{Hctl, Iqn, Wwpn};
use crate::kernel::{Roots, sysfs};

/// What a device is reached through, by the name that the target's side has in the world.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum TargetPort {
    /// An iSCSI target, and the tag of its portal group where that can be read. The LUNs
    /// of a target may be others in another portal group (RFC 7143, 4.2.7.1).
    Iscsi { target: Iqn, group: Option<u16> },
    /// A Fibre Channel port.
    Fc(Wwpn),
}

impl TargetPort {
    /// That of the device at this address, whose directory `dir` is; `None` where neither
    /// transport reaches it, or where its name cannot be read. The device itself may have
    /// gone, as long as its session or port is there.
    pub(crate) fn of(roots: &Roots, hctl: Hctl, dir: &Path) -> Option<Self> {
        Self::behind(roots, &TransportReader::new(roots).of(hctl, dir)?)
    }

    /// The same of what is known of the way there.
    pub(crate) fn behind(roots: &Roots, reach: &TransportInfo) -> Option<Self> {
        match reach {
            TransportInfo::Iscsi {
                session, target, ..
            } => {
                let group = Session::new(roots, *session).portal_group();
                let target = target.clone()?;
                Some(Self::Iscsi { target, group })
            }
            TransportInfo::Fc { wwpn, .. } => wwpn.map(Self::Fc),
        }
    }
}

impl Session {
    fn portal_group(&self) -> Option<u16> {
        sysfs::parse(&self.class().join("tpgt")).ok()
    }
}
