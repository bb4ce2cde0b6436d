//! What is at the addresses where a volume was meant to be, whosever it is: all
//! that is known of one that no attach has come to its end with.

use super::Engine;
use super::journal::{Record, Turn};
use crate::error::Result;
use crate::id::Source;
use crate::nbd::NbdDevice;
use crate::scsi::ScsiDevice;

/// See [`Engine::at_sources`].
#[derive(Debug, Default)]
pub(super) struct AtSources {
    pub(super) scsi: Vec<ScsiDevice>,
    nbd: Vec<NbdDevice>,
}

impl AtSources {
    /// Whether nothing has come since `before`.
    pub(super) fn is_part_of(&self, before: &Self) -> bool {
        self.scsi.iter().all(|device| before.scsi.contains(device))
            && self.nbd.iter().all(|device| before.nbd.contains(device))
    }
}

impl Engine {
    /// What is at the addresses of a volume's sources, whosever it is.
    pub(super) fn at_sources(&self, record: &Record) -> Result<AtSources> {
        let mut there = AtSources::default();
        if let Some(nbd) = &record.spec.nbd {
            there.nbd = NbdDevice::of_backend(self.roots(), &nbd.backend)?;
            return Ok(there);
        }
        for source in &record.spec.sources {
            there.scsi.extend(self.at_source(source)?);
        }
        Ok(there)
    }

    fn at_source(&self, source: &Source) -> Result<Vec<ScsiDevice>> {
        let mut there = Vec::new();
        // No path of a SCSI unit, as the attach will say.
        if matches!(source, Source::Nbd(_)) {
            return Ok(there);
        }
        for hctl in self.addresses_of(source)? {
            there.extend(ScsiDevice::find(self.roots(), hctl)?);
        }
        Ok(there)
    }

    /// Whether what is at a source's addresses is another volume's.
    pub(super) fn leads_to_another(&self, turn: &Turn, source: &Source) -> Result<bool> {
        for device in self.at_source(source)? {
            if turn.is_anothers(&device.cached_identity()?) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
