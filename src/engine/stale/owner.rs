//! The volume to which a unit belongs, from journals that this process does not hold.

use std::path::{Path, PathBuf};

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::journal::{FaultKind, JournalView};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, VolumeId};
use crate::scsi::Identity;

/// # Errors
/// `NotReady` if a file of a journal may be a record and cannot be read as one.
pub(super) fn require_all_read(
    engine: &Engine,
    directories: &[PathBuf],
    deadline: Deadline,
) -> Result<()> {
    directories.iter().try_for_each(|directory| {
        let journal = engine.read_journal_at(directory, deadline)?;
        require_read(directory, &journal)
    })
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
        require_read(directory, &journal)?;
    }
    Ok(None)
}

/// # Errors
/// `NotReady` if a file may be the record of an unknown volume. A file that was set aside
/// is no longer a record.
fn require_read(directory: &Path, journal: &JournalView) -> Result<()> {
    let is_unknown = |kind: FaultKind| kind != FaultKind::SetAsideEarlier;
    let mut problems = journal.problems.iter();
    let Some(problem) = problems.find(|problem| is_unknown(problem.kind)) else {
        return Ok(());
    };
    let (file, directory) = (problem.file.display(), directory.display());
    let message = format!(
        "{file} in the journal {directory} may be the record of this device, and cannot be \
         read: {}",
        problem.text
    );
    Err(Error::new(ErrorKind::NotReady, message).at(Stage::Journal))
}
