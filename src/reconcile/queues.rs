//! The queues of steps that wait for a worker.

use std::collections::{BTreeMap, VecDeque};

use super::job::{Job, Priority};
use super::workers::Room;

#[derive(Default)]
pub(super) struct Queues {
    by_priority: BTreeMap<Priority, VecDeque<Job>>,
}

impl Queues {
    /// Replaces the waiting steps by `jobs`, which come from a new plan. The earliest due
    /// step is first. Of steps that are due together, each place has one before any place
    /// has a second, since all steps at one place may hang.
    pub(super) fn fill(&mut self, jobs: Vec<Job>) {
        self.by_priority.clear();
        let mut at_place = BTreeMap::new();
        let mut ranked: Vec<(usize, Job)> = Vec::new();
        for job in jobs {
            let before: &mut usize = at_place
                .entry((
                    job.priority,
                    job.place.as_ref().map(|place| place.name.clone()),
                ))
                .or_default();
            ranked.push((*before, job));
            *before += 1;
        }
        // Each unblocked volume is due at once, whenever its event came.
        let due = |job: &Job| job.due.filter(|_| job.priority != Priority::Unblocked);
        ranked.sort_by_key(|(before, job)| (due(job), *before));
        for (_, job) in ranked {
            self.by_priority
                .entry(job.priority)
                .or_default()
                .push_back(job);
        }
    }

    pub(super) fn waiting(&self) -> impl Iterator<Item = &Job> {
        self.by_priority.values().flatten()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_priority.values().all(VecDeque::is_empty)
    }

    /// Whether a waiting step may begin now.
    pub(super) fn has_one(&self, room: &Room) -> bool {
        self.waiting()
            .any(|job| room.is_for(job.priority, job.place.as_ref()))
    }

    pub(super) fn take(&mut self, room: &Room) -> Option<Job> {
        self.by_priority.values_mut().find_map(|queue| {
            let is_next = |job: &Job| room.is_for(job.priority, job.place.as_ref());
            let at = queue.iter().position(is_next)?;
            queue.remove(at)
        })
    }
}

#[cfg(test)]
mod tests;
