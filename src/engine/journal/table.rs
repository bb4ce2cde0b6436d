//! The records of a journal in memory.

use std::collections::BTreeMap;

use crate::engine::journal::conflict::Reservation;
use crate::engine::journal::record::{Detached, Record};
use crate::engine::journal::spec::VolumeSpec;
use crate::id::{VolumeId, Wwid};

/// The records as they are on the disk, and the volumes on which callers work.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) records: BTreeMap<VolumeId, Record>,
    /// The records of volumes whose detach is proven.
    pub(super) detached: BTreeMap<VolumeId, Record>,
    pub(super) in_flight: BTreeMap<VolumeId, InFlight>,
}

/// What a volume claims while a caller works on it. It may have no record yet.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    pub(super) spec: Option<VolumeSpec>,
    pub(super) names: Vec<Wwid>,
}

/// How many records of detached volumes are kept.
const MOST_DETACHED: usize = 1024;

impl Table {
    pub(super) fn insert(&mut self, record: Record) {
        let volume = record.volume.clone();
        self.remove(&volume);
        let records = match record.detached {
            Some(_) => &mut self.detached,
            None => &mut self.records,
        };
        records.insert(volume, record);
    }

    pub(super) fn remove(&mut self, volume: &VolumeId) {
        self.records.remove(volume);
        self.detached.remove(volume);
    }

    /// Takes the guards of the volumes beyond [`MOST_DETACHED`] that were detached longest ago.
    pub(super) fn guard_oldest_detached(&mut self) -> Vec<VolumeId> {
        let volumes = self.detached_too_long_ago();
        let guards = volumes.iter().cloned();
        self.in_flight
            .extend(guards.map(|volume| (volume, InFlight::default())));
        volumes
    }

    /// The volumes beyond [`MOST_DETACHED`] that were detached longest ago, except those on
    /// which a caller works.
    fn detached_too_long_ago(&self) -> Vec<VolumeId> {
        let too_many = self.detached.len().saturating_sub(MOST_DETACHED);
        if too_many == 0 {
            return Vec::new();
        }
        let idle = self.detached.values();
        let idle = idle.filter(|record| !self.in_flight.contains_key(&record.volume));
        let mut by_age: Vec<&Record> = idle.collect();
        by_age.sort_by_key(|record| record.detached.as_ref().map(Detached::order));
        let oldest = by_age.into_iter().take(too_many);
        oldest.map(|record| record.volume.clone()).collect()
    }

    /// The sequence number of the next proven detach.
    pub(super) fn next_sequence(&self) -> u64 {
        let known = self.detached.values();
        let known = known.filter_map(|record| Some(record.detached.as_ref()?.sequence));
        known.max().unwrap_or_default().saturating_add(1)
    }

    /// What all volumes claim.
    pub(super) fn reservations(&self) -> impl Iterator<Item = Reservation<'_>> {
        let in_flight = self.in_flight.iter().filter_map(|(volume, in_flight)| {
            // A caller that named no specification works with the one in the record.
            let known = || self.records.get(volume).map(|record| &record.spec);
            let (spec, names) = (in_flight.spec.as_ref().or_else(known)?, &*in_flight.names);
            Some(Reservation {
                volume,
                spec,
                names,
            })
        });
        let known = self.records.values().map(Reservation::of);
        known.chain(in_flight)
    }

    /// What the other volumes claim.
    pub(super) fn others<'a>(
        &'a self,
        volume: &'a VolumeId,
    ) -> impl Iterator<Item = Reservation<'a>> {
        let reservations = self.reservations();
        reservations.filter(move |other| other.volume != volume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::AttachRequest;
    use crate::id::Source;

    #[test]
    fn of_many_detached_volumes_the_newest_are_kept() {
        // Records of earlier versions have no sequence number.
        the_newest_are_kept(|number| number, |_| 0);
    }

    #[test]
    fn the_newest_detached_volumes_are_kept_after_the_clock_was_set_back() {
        let in_order = |number| u64::try_from(number).unwrap();
        the_newest_are_kept(|number| 2 * MOST_DETACHED - number, in_order);
    }

    fn the_newest_are_kept(second: fn(usize) -> usize, sequence: fn(usize) -> u64) {
        let record = |number: usize| {
            let at = format!("2026-01-01T00:00:{:05}Z", second(number));
            let source: Source = "scsi:1:0:0:1".parse().unwrap();
            Record {
                volume: format!("pvc-{}", MOST_DETACHED + 5 - number)
                    .parse()
                    .unwrap(),
                spec: VolumeSpec::of(&AttachRequest::new(source)),
                intent: None,
                outcome: None,
                boot: None,
                detached: Some(Detached {
                    safe_to_unmap: true,
                    not_looked_at: Vec::new(),
                    at,
                    sequence: sequence(number),
                }),
            }
        };
        let mut table = Table {
            records: BTreeMap::new(),
            detached: BTreeMap::new(),
            in_flight: BTreeMap::new(),
        };
        for number in 0..MOST_DETACHED {
            table.insert(record(number));
        }
        assert_eq!(table.detached_too_long_ago(), []);
        for number in MOST_DETACHED..MOST_DETACHED + 2 {
            table.insert(record(number));
        }
        let oldest = [0, 1].map(|number| record(number).volume);
        assert_eq!(table.detached_too_long_ago(), oldest);
        table
            .in_flight
            .insert(oldest[0].clone(), InFlight::default());
        assert_eq!(
            table.detached_too_long_ago(),
            [1, 2].map(|number| record(number).volume)
        );
    }
}
