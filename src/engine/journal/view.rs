//! A journal as somebody sees it who does not hold it.

use super::conflict::Reservation;
use super::failing::Failing;
use super::format::Problem;
use super::record::Record;
use crate::id::{Hctl, VolumeId};
use crate::scsi::Identity;

/// What a journal held at one look. Each record is whole; while its holder works,
/// two of them may be of two moments.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct JournalView {
    /// Its records, by volume.
    pub records: Vec<Record>,
    /// Those of volumes whose detach is proven, by volume: see
    /// [`Journal::detached`](super::Journal::detached).
    pub detached: Vec<Record>,
    /// Files that are no records. None was touched.
    pub problems: Vec<Problem>,
    /// The volumes that its holder fails to bring to what is wanted, and when it
    /// tries each again, by the word of a `reconcile::Reconciler`
    /// that runs; empty where none does.
    pub failing: Vec<Failing>,
}

impl JournalView {
    /// The volume that a unit is, or that is meant to be at its address.
    pub(in crate::engine) fn owner_of(&self, identity: &Identity, hctl: Hctl) -> Option<VolumeId> {
        Reservation::owner(self.records.iter().map(Reservation::of), identity, hctl)
    }
}
