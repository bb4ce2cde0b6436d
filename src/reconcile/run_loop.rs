//! The loop of a reconciler.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::reconciler::{Reconciler, Shared};
use super::refresh::Scope;
use super::state::{RunState, State};
use super::workers::Workers;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::threads;

impl Reconciler {
    pub(super) fn begin_run(&self, until: Option<Deadline>) -> Result<Driving<'_>> {
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

    pub(super) fn go(&self, driving: &Driving<'_>) -> Result<()> {
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
                let ended_steps = state.ended_steps();
                drop(state);
                match self.look(&scope, ended_steps) {
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
                self.look_at_transports();
                state = self.shared.state();
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
            let limit = until.map_or(resync, |until| resync.at_most(until.remaining()));
            let wait = wait_limit(&state, limit.remaining());
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

    fn look_at_transports(&self) {
        let found = self.engine.scsi_transports();
        let mut state = self.shared.state();
        match found {
            Ok(found) => state.see_transports(found),
            Err(error) => {
                tracing::warn!(%error, "cannot read sessions and hosts");
                state.transports.look_later();
            }
        }
    }

    fn look(&self, scope: &Scope, ended_steps: u64) -> Result<()> {
        let began = Instant::now();
        let found = match scope {
            Scope::All => self.engine.survey(&self.journal)?,
            Scope::Some(volumes) => self.engine.survey_of(&self.journal, volumes)?,
        };
        self.engine.learn_contents(&self.journal, &found);
        let mut state = self.shared.state();
        let events = state.merge(found, scope, ended_steps, self.options.prove);
        match scope {
            Scope::All => state.counters.resyncs += 1,
            Scope::Some(_) => state.counters.looks += 1,
        }
        state.refresh.ended(began);
        self.shared.tell(state, events);
        Ok(())
    }
}

/// The time until the first timer, at most `limit`.
fn wait_limit(state: &State, limit: Duration) -> Duration {
    let next_start = state.workers.next_recovery_start();
    let timers = [state.next_timer(), state.next_slow_step(), next_start];
    let first = timers.into_iter().flatten().min();
    first.map_or(limit, |at| {
        limit.min(at.saturating_duration_since(Instant::now()))
    })
}

/// The right to run the reconciler.
pub(super) struct Driving<'a> {
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
