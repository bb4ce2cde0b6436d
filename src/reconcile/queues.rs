//! The queues of steps that wait for a worker.

use std::collections::{BTreeMap, VecDeque};

use super::job::{Job, Priority};
use super::workers::Room;

#[derive(Default)]
pub(super) struct Queues {
    lanes: BTreeMap<Priority, VecDeque<Job>>,
}

impl Queues {
    /// Replaces the waiting steps by `jobs`, which come from a new plan. The earliest due
    /// step is first.
    pub(super) fn fill(&mut self, mut jobs: Vec<Job>) {
        self.lanes.clear();
        jobs.sort_by_key(|job| job.due);
        for job in jobs {
            self.lanes.entry(job.lane).or_default().push_back(job);
        }
    }

    pub(super) fn waiting(&self) -> impl Iterator<Item = &Job> {
        self.lanes.values().flatten()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.values().all(VecDeque::is_empty)
    }

    /// Whether a waiting step may begin now.
    pub(super) fn has_one(&self, room: &Room) -> bool {
        self.waiting()
            .any(|job| room.is_for(job.lane, job.place.as_deref()))
    }

    pub(super) fn take(&mut self, room: &Room) -> Option<Job> {
        self.lanes.values_mut().find_map(|lane| {
            let is_next = |job: &Job| room.is_for(job.lane, job.place.as_deref());
            let at = lane.iter().position(is_next)?;
            lane.remove(at)
        })
    }
}

#[cfg(test)]
mod tests;
