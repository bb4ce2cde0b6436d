//! The state of a reconciler: the wanted and the attached volumes, and the steps between
//! them.

mod changes;
mod end_step;
mod merge;
mod next_task;
mod path_retry;
mod plan_steps;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::actual::Actual;
use super::component_index::ComponentIndex;
use super::desired::Desired;
use super::failure::Failure;
use super::failure_publisher::FailurePublisher;
use super::options::Options;
use super::plan::{Plan, plan};
use super::progress::{Counters, RunningStep};
use super::refresh::Refresh;
use super::run::Run;
use super::schedule::Schedule;
use super::step::{Step, step_for};
use super::tracked::{Activity, Tracked};
use super::transports::Transports;
use super::workers::Workers;
use crate::deadline::{Deadline, jittered};
use crate::engine::{Condition, VolumeStatus};
use crate::error::{Error, Result, Stage};
use crate::id::VolumeId;

pub(super) use next_task::Task;

/// The volumes as they are wanted and as they are, and the schedule of the steps between.
#[derive(Default)]
pub(super) struct State {
    options: Options,
    pub(super) run: Run,
    pub(super) schedule: Schedule,
    pub(super) refresh: Refresh,
    transports: Transports,
    desired: Desired,
    actual: Actual,
    components: ComponentIndex,
    tracked: BTreeMap<VolumeId, Tracked>,
    publisher: FailurePublisher,
    counters: Counters,
}

impl State {
    /// No volume is wanted yet, and the attached ones are unknown.
    pub(super) fn new(options: Options) -> Self {
        let mut state = Self {
            options,
            ..Self::default()
        };
        state.refresh.request_all_now();
        state
    }

    /// Begins a run of the loop. With a deadline it tries each step once, also those that failed
    /// before; without one it also recovers sessions.
    ///
    /// # Errors
    /// `InUse` if a run is under way.
    pub(super) fn begin_run(&mut self, until: Option<Deadline>) -> Result<()> {
        self.run.begin(until.is_some())?;
        let threads = self.options.threads.get();
        self.schedule.workers = Workers::new(threads, until.is_none());
        self.refresh.resync_after(self.options.resync);
        if until.is_some() {
            self.reset_backoff(Duration::ZERO);
            self.refresh.request_all_now();
        }
        // A step that failed in an `apply` has no time for its retry yet.
        self.schedule.require_plan();
        Ok(())
    }

    /// Sets the wanted volumes, and drops the failures of those whose options have changed.
    pub(super) fn set_desired(&mut self, desired: Desired) {
        for (volume, tracked) in &mut self.tracked {
            let (was, is) = (self.desired.wanted(volume), desired.wanted(volume));
            let is_respelt = was.zip(is).is_some_and(|(was, is)| !was.is_spelt_as(is));
            if was != is || is_respelt {
                if tracked.failure.take().is_some() {
                    self.publisher.change();
                }
                (tracked.refused_reason, tracked.path_retry) = (None, None);
            }
        }
        self.desired = desired;
        self.drop_queued_steps();
    }

    pub(super) fn desired(&self) -> &Desired {
        &self.desired
    }

    pub(super) fn counters(&self) -> Counters {
        self.counters
    }

    /// Publishes the failures again later, after a publication that failed.
    pub(super) fn publish_failures_later(&mut self) {
        self.publisher.retry();
    }

    pub(super) fn note_wakeup(&mut self) {
        self.counters.wakeups += 1;
    }

    /// Schedules all retries within this time, spread out.
    pub(super) fn reset_backoff(&mut self, within: Duration) {
        let count = u32::try_from(self.tracked.len()).unwrap_or(u32::MAX);
        let mut at = Instant::now();
        for tracked in self.tracked.values_mut() {
            at += jittered(within / count.max(1));
            tracked.refused_reason = None;
            if let Some(path_retry) = &mut tracked.path_retry {
                path_retry.at = path_retry.at.min(at);
            }
            if let Some(failure) = &mut tracked.failure {
                failure.retry_by(at);
                self.publisher.change();
            }
        }
        self.schedule.require_plan();
    }

    pub(super) fn is_idle(&self) -> bool {
        self.schedule.is_idle() && !self.refresh.is_wanted()
    }

    /// When the loop must wake without an event.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        let timers = [
            self.refresh.due(),
            self.schedule.next_plan(),
            self.transports.due(),
            self.publisher.due(),
        ];
        timers.into_iter().flatten().min()
    }

    pub(super) fn is_busy(&self, volume: &VolumeId) -> bool {
        self.tracked.get(volume).is_some_and(Tracked::is_busy)
    }

    /// The volumes with a step that waits or runs.
    pub(super) fn busy(&self) -> impl Iterator<Item = &VolumeId> {
        let busy = self.tracked.iter().filter(|(_, tracked)| tracked.is_busy());
        busy.map(|(volume, _)| volume)
    }

    /// The last error of each volume whose last step failed.
    pub(super) fn errors(&self) -> Vec<(VolumeId, Arc<Error>)> {
        let failures = self.failures();
        let errors =
            failures.map(|(volume, failure)| (volume.clone(), Arc::clone(failure.error())));
        errors.collect()
    }

    fn failures(&self) -> impl Iterator<Item = (&VolumeId, &Failure)> {
        let tracked = self.tracked.iter();
        tracked.filter_map(|(volume, tracked)| Some((volume, tracked.failure.as_ref()?)))
    }

    /// The remaining steps, by the known state.
    pub(super) fn plan(&self) -> Plan {
        plan(&self.desired, &self.actual)
    }

    /// The remaining step of one volume, by the known state.
    pub(super) fn step(&self, volume: &VolumeId) -> Option<Step> {
        step_for(volume, self.desired.wanted(volume), self.actual.get(volume))
    }

    /// Records the stage that a worker's call has reached.
    pub(super) fn record_stage(&mut self, volume: &VolumeId, reached: Stage) {
        let tracked = self.tracked.get_mut(volume);
        if let Some(Activity::Running(_, stage)) = tracked.map(|tracked| &mut tracked.activity) {
            *stage = Some(reached);
        }
    }

    pub(super) fn running_steps(&self) -> Vec<RunningStep> {
        let running_steps = self.tracked.iter().filter_map(|(volume, tracked)| {
            let Activity::Running(kind, stage) = tracked.activity else {
                return None;
            };
            let volume = volume.clone();
            Some(RunningStep {
                volume,
                kind,
                stage,
            })
        });
        running_steps.collect()
    }

    /// The status of a volume that is attached as wanted.
    pub(super) fn attached(&self, volume: &VolumeId) -> Option<&VolumeStatus> {
        let (wanted, status) = (self.desired.wanted(volume)?, self.actual.get(volume)?);
        let is_verified = status.condition == Condition::Complete
            && status.under_way.is_none()
            && status.verify_reason.is_none();
        let is_as_wanted = status.spec == wanted.spec && wanted.is_large_enough(status.size);
        (is_verified && is_as_wanted).then_some(status)
    }

    fn set_status(&mut self, status: VolumeStatus) {
        self.components.update(&status);
        self.actual.volumes.insert(status.volume.clone(), status);
    }

    /// Records that nothing of the volume is attached.
    fn remove_status(&mut self, volume: &VolumeId) {
        self.actual.volumes.remove(volume);
        self.components.remove(volume);
        if let Some(tracked) = self.tracked.get_mut(volume) {
            (
                tracked.link_died_at,
                tracked.reconnect_handle,
                tracked.loss_was_reported,
            ) = (None, None, false);
            (tracked.path_retry, tracked.verified_condition) = (None, None);
        }
        let is_wanted = self.desired.get(volume).is_some();
        if !is_wanted && !self.is_busy(volume) {
            let gone = self.tracked.remove(volume);
            if gone.is_some_and(|gone| gone.failure.is_some()) {
                self.publisher.change();
            }
        }
    }
}

#[cfg(test)]
mod tests;
