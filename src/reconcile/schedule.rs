//! The schedule of a reconciler: when it makes a plan, the steps that wait, and the steps that
//! run.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use super::job::{Job, Priority};
use super::workers::{Capacity, Workers};

#[derive(Default)]
pub(super) struct Schedule {
    needs_plan: bool,
    /// When a delayed step is due. A new plan then queues it.
    plan_at: Option<Instant>,
    /// The steps that wait for a worker.
    queues: BTreeMap<Priority, VecDeque<Job>>,
    pub(super) workers: Workers,
}

impl Schedule {
    pub(super) fn require_plan(&mut self) {
        self.needs_plan = true;
    }

    pub(super) fn require_plan_at(&mut self, at: Instant) {
        self.plan_at = Some(self.plan_at.map_or(at, |earlier| earlier.min(at)));
    }

    pub(super) fn needs_plan(&self) -> bool {
        self.needs_plan
    }

    pub(super) fn is_plan_due(&self) -> bool {
        self.needs_plan || self.plan_at.is_some_and(|at| at <= Instant::now())
    }

    pub(super) fn next_plan(&self) -> Option<Instant> {
        self.plan_at
    }

    /// Drops the steps that wait, and the times of the last plan. A new plan follows.
    pub(super) fn clear(&mut self) {
        self.queues.clear();
        (self.needs_plan, self.plan_at) = (true, None);
    }

    /// Queues the steps of a new plan. The earliest due step is first. Of steps that are due
    /// together, each endpoint has one before any endpoint has a second, since all steps at one
    /// endpoint may hang.
    pub(super) fn queue(&mut self, jobs: Vec<Job>) {
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
            self.queues.entry(job.priority).or_default().push_back(job);
        }
        self.needs_plan = false;
    }

    /// Takes the next step for which a thread is free.
    pub(super) fn take_job(&mut self) -> Option<Job> {
        let began = Instant::now();
        let capacity = self.workers.capacity(began);
        let mut job = self.queues.values_mut().find_map(|queue| {
            let at = queue.iter().position(|job| is_admitted(job, &capacity))?;
            queue.remove(at)
        })?;
        job.began = began;
        let (volume, endpoint) = (job.step.volume.clone(), job.endpoint.clone());
        self.workers.begin(volume, job.priority, endpoint, began);
        Some(job)
    }

    fn waiting(&self) -> impl Iterator<Item = &Job> {
        self.queues.values().flatten()
    }

    /// Whether a waiting step may begin.
    pub(super) fn has_job(&self) -> bool {
        let capacity = self.workers.capacity(Instant::now());
        self.waiting().any(|job| is_admitted(job, &capacity))
    }

    pub(super) fn needs_worker(&self) -> bool {
        let waiting = self.waiting().count();
        self.workers.needs_thread(waiting, Instant::now()) && self.has_job()
    }

    /// When a running step may become slow, so that a waiting step needs another thread.
    pub(super) fn next_slow_step(&self) -> Option<Instant> {
        let mut waiting = self.waiting();
        waiting
            .next()
            .map(|_| self.workers.next_slow(Instant::now()))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting().next().is_none() && self.workers.are_idle() && !self.needs_plan
    }
}

fn is_admitted(job: &Job, capacity: &Capacity) -> bool {
    capacity.admits(job.priority, job.endpoint.as_ref())
}
