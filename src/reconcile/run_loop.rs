//! The loop of a reconciler.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::reconciler::Reconciler;
use super::refresh::Scope;
use super::shared::Shared;
use super::state::Task;
use crate::deadline::Deadline;
use crate::engine::journal::Failing;
use crate::error::{Result, Stage};
use crate::kernel::threads;

impl Reconciler {
    /// Runs the loop, its workers and the session recovery. With a deadline, the run ends then,
    /// or once each step was tried.
    pub(super) fn run_until(&self, until: Option<Deadline>) -> Result<()> {
        /// The kernel answers at once in a network namespace with its multicasts.
        const LIMIT: Duration = Duration::from_secs(10);
        self.shared.state().begin_run(until)?;
        let _end_run = EndRun(&self.shared);
        let shared = Arc::clone(&self.shared);
        let on_change = move |change| {
            let mut state = shared.state();
            let before = state.next_timer();
            let event = state.handle_change(&change);
            let must_wake = state.schedule.needs_plan() || state.next_timer() != before;
            shared.send(state, event);
            if must_wake {
                shared.wake.notify_all();
            }
        };
        let _listening = self.engine.listen(on_change, Deadline::after(LIMIT))?;
        self.engine.purge_stale_locks();
        thread::scope(|scope| {
            let end_threads = EndThreads(&self.shared);
            let not_started = |error| threads::not_started(&error).at(Stage::Converge);
            let start_worker = || {
                let thread = thread::Builder::new().name("lunbd-reconcile".to_owned());
                let started = thread.spawn_scoped(scope, || self.work(until));
                started.map_err(not_started)?;
                self.shared.state().schedule.workers.note_started();
                Ok(())
            };
            let start_recovery = || {
                let thread = thread::Builder::new().name("lunbd-recover".to_owned());
                let started = thread.spawn_scoped(scope, || self.recover_sessions());
                started.map_err(not_started)?;
                self.shared.state().schedule.workers.note_recovery_started();
                Ok(())
            };
            let result = self.run_loop(until, start_worker, start_recovery);
            drop(end_threads);
            // The run has ended, so no process tries the failed steps again.
            let _logged_already = self.publish_failures(Vec::new());
            result
        })
    }

    fn run_loop(
        &self,
        until: Option<Deadline>,
        start_worker: impl Fn() -> Result<()>,
        start_recovery: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let shared = &self.shared;
        loop {
            let mut state = shared.state();
            let task = state.next_task(until);
            if state.schedule.has_job() {
                // A step that hangs no longer counts, so there may be room for another.
                shared.work.notify_all();
            }
            match task {
                Task::EndRun => return Ok(()),
                Task::Refresh(scope, ended_steps) => {
                    drop(state);
                    match self.refresh(&scope, ended_steps) {
                        Err(error) if until.is_some() => return Err(error),
                        Err(error) => {
                            tracing::warn!(%error, "cannot read the volumes' status");
                            shared.state().refresh.request_again();
                        }
                        Ok(()) => {}
                    }
                }
                Task::RefreshTransports => {
                    drop(state);
                    self.refresh_transports();
                }
                Task::SendPlanEvents(events) => {
                    shared.send(state, events);
                    shared.work.notify_all();
                    shared.changed.notify_all();
                }
                Task::StartWorker => {
                    drop(state);
                    self.retry_start(start_worker(), until.is_some())?;
                }
                Task::StartSessionRecovery => {
                    drop(state);
                    self.retry_start(start_recovery(), false)?;
                }
                Task::PublishFailures(failures) => {
                    drop(state);
                    if self.publish_failures(failures).is_err() {
                        shared.state().publish_failures_later();
                    }
                }
                Task::Wait(limit) => {
                    shared.wake.wait_for(&mut state, limit);
                    state.note_wakeup();
                }
            }
        }
    }

    /// If a thread could not be started, this has the loop try again in a while. It returns the
    /// error if there is no thread at all and the caller waits.
    fn retry_start(&self, started: Result<()>, is_caller_waiting: bool) -> Result<()> {
        let Err(error) = started else {
            return Ok(());
        };
        let mut state = self.shared.state();
        let workers = &mut state.schedule.workers;
        if is_caller_waiting && workers.are_none() {
            return Err(error);
        }
        workers.note_start_failed(Instant::now());
        drop(state);
        tracing::warn!(%error, "cannot start a thread, and will try again");
        Ok(())
    }

    fn refresh_transports(&self) {
        match self.engine.scsi_transports() {
            Ok(found) => self.shared.state().merge_transports(found),
            Err(error) => {
                tracing::warn!(%error, "cannot read sessions and hosts");
                self.shared.state().refresh_transports_later();
            }
        }
    }

    fn refresh(&self, scope: &Scope, ended_steps: u64) -> Result<()> {
        let began = Instant::now();
        let found = match scope {
            Scope::All => self.engine.survey(&self.journal)?,
            Scope::Some(volumes) => self.engine.survey_of(&self.journal, volumes)?,
        };
        self.engine.record_contents(&self.journal, &found);
        let mut state = self.shared.state();
        let events = state.merge(found, scope, ended_steps, self.options.verify_new);
        state.refresh.note_ended(began);
        self.shared.send(state, events);
        Ok(())
    }

    /// Publishes the failing volumes for other readers of the journal.
    fn publish_failures(&self, failing: Vec<Failing>) -> Result<()> {
        /// Only the loop waits for the write.
        const LIMIT: Duration = Duration::from_secs(2);
        let published = self
            .journal
            .publish_failures(failing, Deadline::after(LIMIT));
        published.inspect_err(|error| tracing::warn!(%error, "cannot publish the failures"))
    }
}

/// Ends the run when it is dropped, so that another can begin.
struct EndRun<'a>(&'a Shared);

impl Drop for EndRun<'_> {
    fn drop(&mut self) {
        self.0.state().run.end();
    }
}

/// Ends the workers and the session recovery when it is dropped.
struct EndThreads<'a>(&'a Shared);

impl Drop for EndThreads<'_> {
    fn drop(&mut self) {
        let session_recovery = self.0.state().run.end_threads();
        if let Some(session_recovery) = session_recovery {
            session_recovery.stop();
        }
        self.0.work.notify_all();
        self.0.changed.notify_all();
    }
}
