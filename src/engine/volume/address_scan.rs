//! What is at the addresses where a volume was meant to be, whosever it is: all
//! that is known of one that no attach has come to its end with.

use std::collections::BTreeSet;

use crate::engine::Engine;
use crate::engine::journal::{Record, VolumeGuard};
use crate::engine::unit::place::PathPlace;
use crate::error::Result;
use crate::id::{Hctl, Source, Wwid};
use crate::kernel::machine;
use crate::nbd::NbdDevice;
use crate::scsi::ScsiDevice;

/// See [`Engine::address_scan`].
#[derive(Debug, Default)]
pub(super) struct AddressScan {
    pub(in crate::engine) scsi: Vec<ScsiDevice>,
    nbd: Vec<NbdDevice>,
}

impl AddressScan {
    /// Whether nothing has come since `before`.
    pub(super) fn is_part_of(&self, before: &Self) -> bool {
        self.scsi.iter().all(|device| before.scsi.contains(device))
            && self.nbd.iter().all(|device| before.nbd.contains(device))
    }
}

impl Engine {
    /// What is at the addresses of a volume's sources, whosever it is.
    pub(super) fn address_scan(&self, record: &Record) -> Result<AddressScan> {
        let mut there = AddressScan::default();
        if let Some(nbd) = &record.spec.nbd {
            there.nbd = self.backends().of_backend(self.roots(), &nbd.backend)?;
            return Ok(there);
        }
        for source in &record.spec.sources {
            if !self.is_renumbered(record, source) {
                there.scsi.extend(self.at_source(source)?);
            }
        }
        Ok(there)
    }

    fn at_source(&self, source: &Source) -> Result<Vec<ScsiDevice>> {
        let mut there = Vec::new();
        for hctl in self.scsi_addresses_of(source)? {
            there.extend(ScsiDevice::find(self.roots(), hctl)?);
        }
        Ok(there)
    }

    /// None for an NBD source: no path of a SCSI unit, as the attach will say.
    pub(super) fn scsi_addresses_of(&self, source: &Source) -> Result<BTreeSet<Hctl>> {
        match source {
            Source::Nbd(_) => Ok(BTreeSet::new()),
            source => self.addresses_of(source),
        }
    }

    /// Whether a source is an address that the kernel has given anew since the record was
    /// begun, in an earlier boot, and no name of the unit says that it is there again.
    pub(super) fn is_renumbered(&self, record: &Record, source: &Source) -> bool {
        let is_known = record.names().first().is_some_and(Wwid::is_unique);
        let Some(boot) = &record.boot else {
            return false;
        };
        let is_address = matches!(source, Source::Scsi(_));
        let now = || machine::boot_id(self.roots());
        is_address && !is_known && now().is_some_and(|now| now != *boot)
    }

    /// Whether what is at a source's addresses is another volume's, or another unit
    /// than the volume is expected to be, or nothing says that it is the volume's any
    /// more. What has said nothing may be that.
    pub(super) fn leads_to_another(
        &self,
        guard: &VolumeGuard,
        record: &Record,
        source: &Source,
    ) -> Result<bool> {
        if self.is_renumbered(record, source) {
            return Ok(true);
        }
        let names = record.names();
        let expected = names.first();
        for device in self.at_source(source)? {
            let identity = device.cached_identity()?;
            let place = PathPlace::of(self.roots(), &device);
            let is_expected = |name: &Wwid| identity.names.is_empty() || identity.is(name);
            if guard.is_anothers(&identity, &place) || !expected.is_none_or(is_expected) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a scan for a volume is in the kernel still, and may bring something.
    pub(super) fn is_being_scanned(&self, record: &Record) -> Result<bool> {
        for source in &record.spec.sources {
            if self.are_scanned(&self.scsi_addresses_of(source)?)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
