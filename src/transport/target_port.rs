//! The target port that leads to a SCSI device.

use std::path::Path;

use super::iscsi::Session;
use super::transport_info::{TransportInfo, TransportReader};
use crate::id::{Hctl, Iqn, Wwpn};
use crate::kernel::{Roots, sysfs};

/// The target's end of the path to a device, by its world-wide name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum TargetPort {
    /// An iSCSI target, and the tag of its portal group if that can be read. The LUNs of a
    /// target may differ between its portal groups (RFC 7143, 4.2.7.1).
    Iscsi { target: Iqn, group: Option<u16> },
    /// A Fibre Channel port.
    Fc(Wwpn),
}

impl TargetPort {
    /// The target port of the device at this address, whose directory is `dir`; `None` if
    /// neither transport leads to it, or if its name cannot be read. The device itself may
    /// be gone, as long as its session or port exists.
    pub(crate) fn of(roots: &Roots, hctl: Hctl, dir: &Path) -> Option<Self> {
        Self::of_transport(roots, &TransportReader::new(roots).of(hctl, dir)?)
    }

    /// The same, from transport data that is already known.
    pub(crate) fn of_transport(roots: &Roots, transport: &TransportInfo) -> Option<Self> {
        match transport {
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
