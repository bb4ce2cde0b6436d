//! The schedule of a reconciler: when it makes a plan, the steps that wait, and the steps that
//! run.

use std::time::Instant;

use super::job::Job;
use super::queues::Queues;
use super::workers::Workers;

#[derive(Default)]
pub(super) struct Schedule {
    needs_plan: bool,
    /// When a delayed step is due, which a new plan queues.
    plan_at: Option<Instant>,
    queues: Queues,
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
        self.queues.fill(Vec::new());
        (self.needs_plan, self.plan_at) = (true, None);
    }

    /// Queues the steps of a new plan.
    pub(super) fn queue(&mut self, jobs: Vec<Job>) {
        self.queues.fill(jobs);
        self.needs_plan = false;
    }

    /// Takes the next step for which one of this many threads is free.
    pub(super) fn take_job(&mut self, threads: usize) -> Option<Job> {
        let began = Instant::now();
        let mut job = self.queues.take(&self.workers.capacity(threads, began))?;
        job.began = began;
        let (volume, endpoint) = (job.step.volume.clone(), job.endpoint.clone());
        self.workers.begin(volume, job.priority, endpoint, began);
        Some(job)
    }

    /// Whether a waiting step may begin.
    pub(super) fn has_job(&self, threads: usize) -> bool {
        let capacity = || self.workers.capacity(threads, Instant::now());
        !self.queues.is_empty() && self.queues.has_job_for(&capacity())
    }

    pub(super) fn needs_worker(&self, threads: usize) -> bool {
        let waiting = self.queues.len();
        let needs_one = self.workers.needs_thread(threads, waiting, Instant::now());
        needs_one && self.has_job(threads)
    }

    /// When a running step may become slow, so that a waiting step needs another thread.
    pub(super) fn next_slow_step(&self) -> Option<Instant> {
        let waits = !self.queues.is_empty();
        waits.then(|| self.workers.next_slow(Instant::now()))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queues.is_empty() && self.workers.are_idle() && !self.needs_plan
    }
}
