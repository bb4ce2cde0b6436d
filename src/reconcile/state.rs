//! The state of a reconciler: the wanted and the attached volumes, the steps under way,
//! and the times of retries.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::actual::Actual;
use super::desired::Desired;
use super::failure_publisher::FailurePublisher;
use super::plan::{Plan, Step, StepKind, plan, step_for};
use super::queues::Queues;
use super::refresh::Refresh;
use super::tracked::Tracked;
use super::transports::Transports;
use super::workers::Workers;
use crate::deadline::jittered;
use crate::engine::{Condition, SessionRecoveryStop, VolumeStatus};
use crate::error::{Error, Stage};
use crate::id::VolumeId;

/// The counters of a reconciler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[non_exhaustive]
pub struct Counters {
    /// How often its loop woke, by an event, a step's end, a timer or a call.
    pub wakeups: u64,
    /// Looks at all volumes.
    pub resyncs: u64,
    /// Looks at only those volumes that an event concerned.
    pub looks: u64,
    /// Plans made.
    pub plans: u64,
    /// Steps that ended.
    pub steps: u64,
    /// Steps that failed.
    pub failures: u64,
}

/// A step that is under way.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct AtWork {
    /// The volume.
    pub volume: VolumeId,
    /// The kind of the step.
    pub kind: StepKind,
    /// The stage that an attach or a detach has reached.
    pub stage: Option<Stage>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) desired: Desired,
    /// Counts the changes of the wanted volumes.
    pub(super) generation: u64,
    pub(super) actual: Actual,
    pub(super) tracked: BTreeMap<VolumeId, Tracked>,
    /// The volume of each device path component, such as `2:0:0:1`, `nbd3` or `dm-0`.
    pub(super) by_component: HashMap<String, VolumeId>,
    /// The components of each volume.
    pub(super) parts: BTreeMap<VolumeId, Vec<String>>,
    pub(super) refresh: Refresh,
    pub(super) transports: Transports,
    pub(super) publisher: FailurePublisher,
    pub(super) replan: bool,
    pub(super) queues: Queues,
    pub(super) workers: Workers,
    pub(super) retry_at: Option<Instant>,
    /// Counts the ended steps. A look that began before a step ended says nothing about
    /// that step's volume.
    pub(super) ended: u64,
    pub(super) stopped: bool,
    pub(super) driver: RunState,
    /// Counts the runs of the loop.
    runs: u64,
    /// Whether this run tries each step only once.
    pub(super) once: bool,
    /// Ends the wait of the session recovery.
    pub(super) session_recovery: Option<SessionRecoveryStop>,
    pub(super) counters: Counters,
}

/// The reason to ask a device whose link may be dead.
pub(super) const MAY_HAVE_DIED: &str = "the death of its link may have been missed";

/// Whether the loop runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum RunState {
    #[default]
    Idle,
    Running,
    /// The worker threads must end.
    Ended,
}

pub(super) fn sooner(one: Option<Instant>, two: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(two).min()
}

impl State {
    pub(super) fn want(&mut self, desired: Desired) {
        for (volume, tracked) in &mut self.tracked {
            let (was, is) = (self.desired.wanted(volume), desired.wanted(volume));
            let is_respelt = was.zip(is).is_some_and(|(was, is)| !was.is_spelt_as(is));
            if was != is || is_respelt {
                if tracked.failure.take().is_some() {
                    self.publisher.change();
                }
                (tracked.refused, tracked.path_retry) = (None, None);
            }
        }
        self.desired = desired;
        self.generation += 1;
        self.replan = true;
    }

    /// Starts a run of the loop.
    pub(super) fn begin(&mut self, once: bool) {
        (self.driver, self.once) = (RunState::Running, once);
        self.runs += 1;
        // A step that failed in an `apply` has no time for its retry yet.
        self.replan = true;
    }

    pub(super) fn runs(&self) -> u64 {
        self.runs
    }

    /// Schedules all retries within this time, spread out.
    pub(super) fn reset_backoff(&mut self, within: Duration) {
        let count = u32::try_from(self.tracked.len()).unwrap_or(u32::MAX);
        let mut at = Instant::now();
        for tracked in self.tracked.values_mut() {
            at += jittered(within / count.max(1));
            tracked.refused = None;
            if let Some(path_retry) = &mut tracked.path_retry {
                path_retry.at = path_retry.at.min(at);
            }
            if let Some(failure) = &mut tracked.failure {
                failure.next = Some(failure.next.map_or(at, |next| next.min(at)));
                self.publisher.change();
            }
        }
        self.replan = true;
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queues.is_empty()
            && self.workers.are_idle()
            && !self.replan
            && !self.refresh.is_wanted()
    }

    pub(super) fn ended_steps(&self) -> u64 {
        self.ended
    }

    /// When the loop must wake without an event.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        let timers = sooner(self.refresh.due(), self.retry_at);
        let timers = sooner(timers, self.transports.due());
        sooner(timers, self.publisher.due())
    }

    /// When another thread may be needed.
    pub(super) fn next_slow_step(&self) -> Option<Instant> {
        let waits = !self.queues.is_empty();
        waits.then(|| self.workers.next_slow(Instant::now()))
    }

    /// Whether a waiting step may begin.
    pub(super) fn has_a_step(&self, threads: usize) -> bool {
        let room = || self.workers.room(threads, Instant::now());
        !self.queues.is_empty() && self.queues.has_one(&room())
    }

    pub(super) fn lacks_a_worker(&self, threads: usize) -> bool {
        let waiting = self.queues.waiting().count();
        let lacks = self.workers.lack_one(threads, waiting, Instant::now());
        lacks && self.has_a_step(threads)
    }

    pub(super) fn retry_is_due(&self) -> bool {
        self.retry_at.is_some_and(|at| at <= Instant::now())
    }

    pub(super) fn is_busy(&self, volume: &VolumeId) -> bool {
        self.tracked.get(volume).is_some_and(|tracked| tracked.busy)
    }

    pub(super) fn error(&self, volume: &VolumeId) -> Option<Arc<Error>> {
        let failure = self.tracked.get(volume)?.failure.as_ref()?;
        Some(Arc::clone(&failure.error))
    }

    pub(super) fn errors(&self) -> Vec<(VolumeId, Arc<Error>)> {
        let failed = self.tracked.iter().filter_map(|(volume, tracked)| {
            let failure = tracked.failure.as_ref()?;
            Some((volume.clone(), Arc::clone(&failure.error)))
        });
        failed.collect()
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
    pub(super) fn record_stage(&mut self, volume: &VolumeId, stage: Stage) {
        if let Some(tracked) = self.tracked.get_mut(volume) {
            tracked.stage = Some(stage);
        }
    }

    pub(super) fn at_work(&self) -> Vec<AtWork> {
        let at_work = self.tracked.iter().filter_map(|(volume, tracked)| {
            Some(AtWork {
                volume: volume.clone(),
                kind: tracked.doing?,
                stage: tracked.stage,
            })
        });
        at_work.collect()
    }

    pub(super) fn busy(&self) -> impl Iterator<Item = &VolumeId> {
        let busy = self.tracked.iter().filter(|(_, tracked)| tracked.busy);
        busy.map(|(volume, _)| volume)
    }

    /// The status of a volume that is attached as wanted.
    pub(super) fn attached(&self, volume: &VolumeId) -> Option<&VolumeStatus> {
        let (wanted, there) = (self.desired.wanted(volume)?, self.actual.get(volume)?);
        let stands = there.condition == Condition::Complete
            && there.under_way.is_none()
            && there.verify_reason.is_none();
        let suits = there.spec == wanted.spec && wanted.is_large_enough(there.size);
        (stands && suits).then_some(there)
    }
}
