//! The loop that keeps volumes as they are wanted.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::actual::Actual;
use super::desired::Desired;
use super::event::Event;
use super::followers::{Events, Followers};
use super::options::Options;
use super::plan::{self, Plan};
use super::refresh::Scope;
use super::state::{AtWork, Counters, RunState, State};
use super::workers::Workers;
use crate::deadline::Deadline;
use crate::engine::{Engine, Journal, ReapReport, ReapRequest, VolumeStatus};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::VolumeId;
use crate::kernel::threads;

/// Keeps the volumes of a journal as they are wanted. It is shared by reference: one thread
/// [runs](Self::run) it, others set what is wanted, wait for volumes, and follow the events.
pub struct Reconciler {
    pub(super) engine: Arc<Engine>,
    pub(super) journal: Journal,
    pub(super) options: Options,
    pub(super) shared: Arc<Shared>,
}

#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Wakes the loop.
    pub(super) wake: Condvar,
    /// Wakes the workers.
    pub(super) work: Condvar,
    /// Wakes the callers that wait for a volume.
    pub(super) changed: Condvar,
    followers: Followers,
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Sends the events of the last change of the state before another thread can change it,
    /// so that they come in the order of the changes.
    pub(super) fn tell(
        &self,
        state: MutexGuard<'_, State>,
        events: impl IntoIterator<Item = Event>,
    ) {
        let events = events.into_iter();
        let told: Vec<_> = events.map(|event| self.followers.tell(event)).collect();
        drop(state);
        // A subscriber of the log may ask for the state, so its lock is free by now.
        for event in told {
            tracing::info!(sequence = event.sequence, %event, "reconciled");
        }
    }
}

impl fmt::Debug for Reconciler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let journal = self.journal.directory();
        f.debug_struct("Reconciler")
            .field("journal", &journal)
            .finish_non_exhaustive()
    }
}

impl Reconciler {
    /// No volume is wanted yet, and nothing is done before [`run`](Self::run) or
    /// [`apply`](Self::apply). **These detach each volume of the journal that is not
    /// [set](Self::set) as wanted by then**.
    #[must_use]
    pub fn new(engine: Arc<Engine>, journal: Journal, options: Options) -> Self {
        let shared = Arc::<Shared>::default();
        shared.state().refresh.now();
        Self {
            engine,
            journal,
            options,
            shared,
        }
    }

    /// The journal.
    #[must_use]
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Sets what is wanted from now on. Steps that are under way finish first; steps that have
    /// not begun are planned again.
    pub fn set(&self, desired: Desired) {
        self.shared.state().want(desired);
        self.shared.wake.notify_all();
        self.shared.changed.notify_all();
    }

    /// The steps that are known to be left.
    #[must_use]
    pub fn plan(&self) -> Plan {
        self.shared.state().plan()
    }

    /// The steps to which [`set`](Self::set) of this would lead, as the machine is now. It
    /// does nothing and sets nothing.
    ///
    /// # Errors
    /// If sysfs cannot be read.
    pub fn preview(&self, desired: &Desired) -> Result<Plan> {
        let actual = Actual::read(&self.engine, &self.journal)?;
        Ok(plan::plan(desired, &actual))
    }

    /// The volumes that this machine uses, or may use: those that are wanted, from that moment
    /// on, and those whose detach is not proven yet. Like the journal, this outlives the
    /// process. No other machine may be given one of these volumes. A volume whose record was
    /// set aside is not among them: while [`Journal::problems`] is not empty, the set is
    /// incomplete.
    #[must_use]
    pub fn in_use(&self) -> BTreeSet<VolumeId> {
        // The journal is read last: a wanted volume enters it and leaves it while the volume is
        // busy.
        let state = self.shared.state();
        let wanted = state.desired.iter().map(|(volume, _)| volume.clone());
        let mut volumes: BTreeSet<VolumeId> = wanted.collect();
        volumes.extend(state.busy().cloned());
        volumes.extend(self.journal.records().into_iter().map(|r| r.volume));
        volumes
    }

    /// The steps under way at this moment, by the volumes' names, for a display.
    #[must_use]
    pub fn at_work(&self) -> Vec<AtWork> {
        self.shared.state().at_work()
    }

    /// Follows the events from now on.
    #[must_use]
    pub fn subscribe(&self) -> Events {
        self.shared.followers.add()
    }

    /// The counters as they are now.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.state().counters
    }

    /// Waits until a volume is attached as it is wanted, and was read back.
    ///
    /// # Errors
    /// `NotFound` if it is not wanted; `TimedOut` at stage `converge`, with its last error.
    pub fn wait_attached(&self, volume: &VolumeId, deadline: Deadline) -> Result<VolumeStatus> {
        let mut state = self.shared.state();
        loop {
            if let Some(there) = state.attached(volume) {
                return Ok(there.clone());
            }
            if state.desired.get(volume).is_none() {
                let message = format!("volume {volume} is not wanted");
                return Err(Error::new(ErrorKind::NotFound, message).at(Stage::Converge));
            }
            if deadline.has_passed() {
                let what = format!("volume {volume} to be attached as it is wanted");
                let error = Error::timed_out(Stage::Converge, deadline, &what);
                let step = || state.step(volume).map(|step| step.to_string());
                let last = state.error(volume).map(|error| format!("{error:#}"));
                return Err(match last.or_else(step) {
                    Some(last) => error.with_last_seen(last),
                    None => error,
                });
            }
            self.shared
                .changed
                .wait_for(&mut state, deadline.max_sleep());
        }
    }

    /// Brings the volumes to what is wanted, once: it tries each step one time, and also does
    /// the steps that another step makes possible. Returns the steps that are left: none if all
    /// is as wanted, and else the [`errors`](Self::errors) say why.
    ///
    /// # Errors
    /// `InUse` if it runs already; `TimedOut` at stage `converge`: the steps under way have
    /// finished, and the others have not begun; where sysfs cannot be read.
    pub fn apply(&self, deadline: Deadline) -> Result<Plan> {
        let driving = self.begin_run(Some(deadline))?;
        self.shared.state().reset_backoff(Duration::ZERO);
        self.shared.state().refresh.now();
        self.go(&driving)?;
        let state = self.shared.state();
        if deadline.has_passed() && !state.is_idle() {
            let error = Error::timed_out(Stage::Converge, deadline, "all volumes to converge");
            let left = state.plan().steps.len();
            return Err(error.with_last_seen(format!("{left} volumes differ from what is wanted")));
        }
        Ok(state.plan())
    }

    /// The last error of each volume whose last step failed.
    #[must_use]
    pub fn errors(&self) -> Vec<(VolumeId, Arc<Error>)> {
        self.shared.state().errors()
    }

    /// Removes the SCSI devices whose unit is gone on the array, except those of the journal's
    /// volumes, as [`Engine::reap_beside`] does. It may be called while the reconciler
    /// [runs](Self::run). A process that cannot call this uses
    /// [`Engine::reap_beside_those_in`] with the journal's directory.
    ///
    /// # Errors
    /// As [`Engine::reap`].
    pub fn reap(&self, request: &ReapRequest, deadline: Deadline) -> Result<ReapReport> {
        self.engine.reap_beside(&self.journal, request, deadline)
    }

    /// Keeps the volumes as they are wanted, until it is [stopped](Self::stop). The failure of
    /// a step is an [`Event`], and the step is tried again. Once a volume with a login is
    /// wanted, or if an earlier process left one in the journal, it also recovers the sessions
    /// of this machine that lunbd made: see [`Engine::recover_sessions`].
    ///
    /// # Errors
    /// `InUse` if it runs already; where it cannot be begun.
    pub fn run(&self) -> Result<()> {
        let driving = self.begin_run(None)?;
        self.go(&driving)
    }

    /// Ends [`run`](Self::run) for good: it returns when the steps under way have finished. A
    /// process that cannot wait for that may exit: the next process goes on by the journal.
    pub fn stop(&self) {
        self.shared.state().stopped = true;
        self.shared.wake.notify_all();
    }

    fn begin_run(&self, until: Option<Deadline>) -> Result<Driving<'_>> {
        let mut state = self.shared.state();
        if state.driver != RunState::Idle {
            let message = "it runs already";
            return Err(Error::new(ErrorKind::InUse, message).at(Stage::Converge));
        }
        state.begin(until.is_some());
        drop(state);
        let of = self;
        Ok(Driving { of, until })
    }

    fn go(&self, driving: &Driving<'_>) -> Result<()> {
        /// The kernel answers at once where its multicasts are.
        const LIMIT: Duration = Duration::from_secs(10);
        let shared = Arc::clone(&self.shared);
        let hear = move |cause| {
            let mut state = shared.state();
            let before = state.next_timer();
            let event = state.take_in(&cause);
            let wake = state.replan || state.next_timer() != before;
            shared.tell(state, event);
            if wake {
                shared.wake.notify_all();
            }
        };
        let _listening = self.engine.listen(hear, Deadline::after(LIMIT))?;
        self.engine.purge_stale_locks();
        thread::scope(|scope| {
            let end = EndOfWork(&self.shared);
            let start_worker = || {
                let worker = thread::Builder::new().name("lunbd-reconcile".to_owned());
                let started = worker.spawn_scoped(scope, || self.work(driving.until));
                started.map_err(|error| threads::not_started(&error).at(Stage::Converge))?;
                self.shared.state().workers.start_one();
                Ok(())
            };
            self.shared.state().workers = Workers::default();
            let start_keeper = || {
                let keeper = thread::Builder::new().name("lunbd-keep".to_owned());
                let started = keeper.spawn_scoped(scope, || self.recover_sessions());
                started
                    .map(drop)
                    .map_err(|error| threads::not_started(&error).at(Stage::Converge))
            };
            if driving.until.is_none() {
                self.shared.state().workers.want_recovery();
            }
            let result = self.turn(driving.until, start_worker, start_keeper);
            drop(end);
            // No process tries them again.
            self.tell_failing(Vec::new());
            result
        })
    }

    fn turn(
        &self,
        until: Option<Deadline>,
        start_worker: impl Fn() -> Result<()>,
        start_keeper: impl Fn() -> Result<()>,
    ) -> Result<()> {
        /// Within this time after a look at everything, all failed steps are tried again.
        const SPREAD: Duration = Duration::from_secs(30);
        let mut resync = Deadline::after(self.options.resync);
        let mut state = self.shared.state();
        loop {
            let passed = until.is_some_and(|deadline| deadline.has_passed());
            if state.stopped || passed {
                return Ok(());
            }
            if resync.has_passed() {
                if until.is_none() {
                    state.reset_backoff(SPREAD.min(self.options.resync / 10));
                }
                state.refresh.now();
            }
            if let Some(scope) = state.refresh.take() {
                if matches!(scope, Scope::All) {
                    resync = Deadline::after(self.options.resync);
                }
                let epoch = state.ended_steps();
                drop(state);
                let looked = self.look(&scope, epoch);
                match looked {
                    Err(error) if until.is_some() => return Err(error),
                    Err(error) => {
                        tracing::warn!(%error, "the volumes could not be looked for");
                        self.shared.state().refresh.later();
                    }
                    Ok(()) => {}
                }
                state = self.shared.state();
                continue;
            }
            if state.transports.take() {
                drop(state);
                let found = self.engine.scsi_transports();
                state = self.shared.state();
                match found {
                    Ok(found) => state.see_transports(found),
                    Err(error) => {
                        tracing::warn!(%error, "cannot read sessions and hosts");
                        state.transports.look_later();
                    }
                }
                continue;
            }
            if state.replan || state.retry_is_due() {
                let events = state.plan_now();
                self.shared.tell(state, events);
                state = self.shared.state();
                self.shared.work.notify_all();
                self.shared.changed.notify_all();
            }
            if until.is_some() && state.is_idle() {
                return Ok(());
            }
            if state.lacks_a_worker(self.options.threads.get()) {
                drop(state);
                self.started(start_worker(), until.is_some())?;
                state = self.shared.state();
                continue;
            }
            if state.workers.must_start_recovery(Instant::now()) {
                drop(state);
                let started = start_keeper();
                if started.is_ok() {
                    self.shared.state().workers.mark_recovery_started();
                }
                self.started(started, false)?;
                state = self.shared.state();
                continue;
            }
            if state.has_a_step(self.options.threads.get()) {
                // A step that hangs no longer counts, so there is room for another.
                self.shared.work.notify_all();
            }
            if let Some(failing) = state.take_failing() {
                drop(state);
                self.tell_failing(failing);
                state = self.shared.state();
                continue;
            }
            let mut wait = resync.remaining();
            let next_start = state.workers.next_recovery_start();
            for timer in [state.next_timer(), state.next_slow_step(), next_start] {
                let left = timer.map(|at| at.saturating_duration_since(Instant::now()));
                wait = wait.min(left.unwrap_or(wait));
            }
            if let Some(deadline) = until {
                wait = wait.min(deadline.remaining());
            }
            self.shared.wake.wait_for(&mut state, wait);
            state.counters.wakeups += 1;
        }
    }

    /// If a thread could not be started, this has the loop try again in a while. It returns the
    /// error if there is no thread at all and the caller waits.
    fn started(&self, started: Result<()>, is_waited_for: bool) -> Result<()> {
        let Err(error) = started else {
            return Ok(());
        };
        let mut state = self.shared.state();
        if is_waited_for && state.workers.are_none() {
            return Err(error);
        }
        tracing::warn!(%error, "the loop waits for a thread");
        state.workers.fail_to_start(Instant::now());
        Ok(())
    }

    fn look(&self, scope: &Scope, epoch: u64) -> Result<()> {
        let began = Instant::now();
        let found = match scope {
            Scope::All => self.engine.survey(&self.journal)?,
            Scope::Some(volumes) => self.engine.survey_of(&self.journal, volumes)?,
        };
        self.engine.learn_contents(&self.journal, &found);
        let mut state = self.shared.state();
        let events = state.merge(found, scope, epoch, self.options.prove);
        match scope {
            Scope::All => state.counters.resyncs += 1,
            Scope::Some(_) => state.counters.looks += 1,
        }
        state.refresh.ended(began);
        self.shared.tell(state, events);
        Ok(())
    }
}

/// The right to run the reconciler.
struct Driving<'a> {
    of: &'a Reconciler,
    until: Option<Deadline>,
}

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        self.of.shared.state().driver = RunState::Idle;
    }
}

/// Ends the workers and the session recovery when it is dropped.
struct EndOfWork<'a>(&'a Shared);

impl Drop for EndOfWork<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.driver = RunState::Ended;
        let session_recovery = state.session_recovery.take();
        drop(state);
        if let Some(session_recovery) = session_recovery {
            session_recovery.stop();
        }
        self.0.work.notify_all();
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_the_order_in_which_the_state_changed() {
        const THREADS: u64 = 8;
        const EACH: u64 = 500;
        let shared = Shared::default();
        let mut events = shared.followers.add();
        let change = || {
            for _ in 0..EACH {
                let mut state = shared.state();
                state.counters.steps += 1;
                let volume = format!("pvc-{}", state.counters.steps).parse().unwrap();
                shared.tell(state, [Event::Healed { volume }]);
                thread::yield_now();
            }
        };
        let limit = Deadline::after(Duration::from_secs(60));
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(change);
            }
            for number in 1..=THREADS * EACH {
                let event = events.next(limit).expect("in time");
                assert_eq!(event.sequence, number);
                assert_eq!(event.to_string(), format!("pvc-{number}: serves again"));
            }
        });
    }
}
