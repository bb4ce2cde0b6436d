//! A journal as a process reads it without holding it.

use crate::engine::journal::conflict::Reservation;
use crate::engine::journal::failing::Failing;
use crate::engine::journal::format::Problem;
use crate::engine::journal::record::Record;
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
}
