//! Claim, flush, delete, confirm: in the order that loses nothing.

use super::Engine;
use super::claim::{Claim, claim};
use super::phases::Phases;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::kernel::{blockdev, worker};
use crate::scsi::{self, ScsiDevice};
use crate::uevent::{self, Watch};

/// What became of the dirty pages and of the device's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Flush {
    /// `fsync` and `BLKFLSBUF` both succeeded, under an exclusive claim.
    Done,
    /// The device served no opens any more and nobody had it open, so nothing
    /// was left to write; the text is the kernel's refusal.
    Unreachable(String),
    /// The device had no disk.
    NoDisk,
}

impl Engine {
    /// Takes the device down. The claim is held until the delete has returned,
    /// so that nobody can mount it in between.
    pub(super) fn take_down(
        &self,
        device: &ScsiDevice,
        watch: &mut Watch,
        phases: &mut Phases,
        deadline: Deadline,
    ) -> Result<Flush> {
        let (roots, mode) = (self.roots(), self.hub().mode());
        let Some(disk) = device.disk()? else {
            phases.enter(Stage::Delete);
            scsi::delete(device, watch, deadline)?;
            return Ok(Flush::NoDisk);
        };
        let devpath = uevent::devpath(roots, disk.dir())?;

        phases.enter(Stage::Claim);
        let claimed = claim(&disk, roots, mode, watch, deadline)?;
        let (flush, held) = match claimed {
            Claim::Held(file) => {
                phases.enter(Stage::Flush);
                let node = disk.node(roots);
                let file = worker::run(
                    Stage::Flush,
                    &format!("{} to write back", disk.name()),
                    deadline,
                    || device.describe(),
                    move || blockdev::flush(&file, &node).map(|()| file),
                )?;
                (Flush::Done, Some(file))
            }
            Claim::Unreachable(why) => (Flush::Unreachable(why.to_string()), None),
        };

        phases.enter(Stage::Delete);
        scsi::delete(device, watch, deadline)?;
        drop(held);

        phases.enter(Stage::Settle);
        uevent::settle_removal(watch, mode, roots, &devpath, disk.devno(), deadline)?;
        Ok(flush)
    }
}
