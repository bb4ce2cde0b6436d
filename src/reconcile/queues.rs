//! Which of the steps that wait for a worker is next.

use std::collections::{BTreeMap, VecDeque};

use super::job::{Job, Priority};
use super::workers::Room;

#[derive(Default)]
pub(super) struct Queues {
    lanes: BTreeMap<Priority, VecDeque<Job>>,
}

impl Queues {
    /// Those that waited are thought over: these take their place. What was due first is
    /// taken first.
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

    /// Whether one of them may begin now.
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
