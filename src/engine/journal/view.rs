//! A journal as a process reads it without holding it.

use crate::engine::journal::conflict::Reservation;
use crate::engine::journal::failing::Failing;
use crate::engine::journal::format::{FaultKind, Problem};
use crate::engine::journal::record::Record;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, VolumeId};
use crate::scsi::Identity;

/// What a journal held when it was read. Each record is whole; while the journal's holder
/// works, two records may be from two moments.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct JournalView {
    /// Its records, by volume.
    pub records: Vec<Record>,
    /// The records of volumes whose detach is proven, by volume: see
    /// [`Journal::detached`](super::Journal::detached).
    pub detached: Vec<Record>,
    /// Files that are not records. None was touched.
    pub problems: Vec<Problem>,
    /// The volumes whose steps fail, and when each is tried again, as the running
    /// `reconcile::Reconciler` of the journal's holder reports; empty if none runs.
    pub failing: Vec<Failing>,
}

impl JournalView {
    /// The volume to which a unit belongs, or which is meant to be at its address.
    pub(in crate::engine) fn owner_of(&self, identity: &Identity, hctl: Hctl) -> Option<VolumeId> {
        Reservation::owner(self.records.iter().map(Reservation::of), identity, hctl)
    }

    /// Fails if a file may be the record of an unknown volume. A file that was set aside is
    /// no longer a record.
    ///
    /// # Errors
    /// `NotSupported` if a later version wrote the file; else `NotReady`.
    pub(in crate::engine) fn require_read(&self) -> Result<()> {
        let is_unknown = |problem: &&Problem| problem.kind != FaultKind::SetAsideEarlier;
        let unknown = || self.problems.iter().filter(is_unknown);
        // No later start of this version can read the file of a later one.
        let newer = unknown().find(|problem| problem.kind == FaultKind::Newer);
        let Some(problem) = newer.or_else(|| unknown().next()) else {
            return Ok(());
        };
        let kind = match problem.kind {
            FaultKind::Newer => ErrorKind::NotSupported,
            _ => ErrorKind::NotReady,
        };
        let message = format!(
            "a file of the journal may be the record of this device, and cannot be read: {}",
            problem.text
        );
        Err(Error::new(kind, message)
            .at(Stage::Journal)
            .with_path(&problem.file))
    }
}
