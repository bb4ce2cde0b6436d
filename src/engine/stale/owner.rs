//! The volume to which a unit belongs, from journals that this process does not hold.

use std::path::PathBuf;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::error::Result;
use crate::id::{Hctl, VolumeId};
use crate::scsi::Identity;

/// # Errors
/// As of [`JournalView::require_read`](crate::engine::journal::JournalView::require_read).
pub(super) fn require_all_read(
    engine: &Engine,
    directories: &[PathBuf],
    deadline: Deadline,
) -> Result<()> {
    directories
        .iter()
        .try_for_each(|directory| engine.read_journal_at(directory, deadline)?.require_read())
}

/// The volume to which a unit belongs, or which is meant to be at its address, as the
/// journals say now.
pub(super) fn owner_in(
    engine: &Engine,
    directories: &[PathBuf],
    identity: &Identity,
    hctl: Hctl,
    deadline: Deadline,
) -> Result<Option<VolumeId>> {
    for directory in directories {
        let journal = engine.read_journal_at(directory, deadline)?;
        if let Some(volume) = journal.owner_of(identity, hctl) {
            return Ok(Some(volume));
        }
        journal.require_read()?;
    }
    Ok(None)
}
