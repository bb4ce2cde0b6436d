//! The queues of steps that wait for a worker.

use std::collections::{BTreeMap, VecDeque};

use super::job::{Job, Priority};
use super::workers::Capacity;

#[derive(Default)]
pub(super) struct Queues {
    by_priority: BTreeMap<Priority, VecDeque<Job>>,
}

impl Queues {
    /// Replaces the waiting steps by `jobs`, which come from a new plan. The earliest due
    /// step is first. Of steps that are due together, each endpoint has one before any endpoint
    /// has a second, since all steps at one endpoint may hang.
    pub(super) fn fill(&mut self, jobs: Vec<Job>) {
        self.by_priority.clear();
        let mut at_endpoint = BTreeMap::new();
        let mut ranked: Vec<(usize, Job)> = Vec::new();
        for job in jobs {
            let name = job.endpoint.as_ref().map(|endpoint| endpoint.name.clone());
            let before: &mut usize = at_endpoint.entry((job.priority, name)).or_default();
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

    pub(super) fn len(&self) -> usize {
        self.by_priority.values().map(VecDeque::len).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_priority.values().all(VecDeque::is_empty)
    }

    pub(super) fn has_job_for(&self, capacity: &Capacity) -> bool {
        let mut jobs = self.by_priority.values().flatten();
        jobs.any(|job| capacity.admits(job.priority, job.endpoint.as_ref()))
    }

    pub(super) fn take(&mut self, capacity: &Capacity) -> Option<Job> {
        self.by_priority.values_mut().find_map(|queue| {
            let is_admitted = |job: &Job| capacity.admits(job.priority, job.endpoint.as_ref());
            let at = queue.iter().position(is_admitted)?;
            queue.remove(at)
        })
    }
}
