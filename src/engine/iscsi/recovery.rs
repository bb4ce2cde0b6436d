//! Recovers lunbd's iSCSI sessions after their connections were lost.

mod attempt;
mod devices;
mod once;
mod options;
mod report;
mod spawn;
mod state;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::engine::{Engine, telemetry};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::iscsi::pdu::AsyncMessage;
use crate::iscsi::{
    ConnectionStatus, Digests, IscsiSession, SessionNotice, SessionWaker, SessionWatch,
};
use crate::kernel::Roots;
use crate::scsi::CallScheduler;
use attempt::{AttemptDone, RecoveryAttempt};
pub use options::SessionRecoveryOptions;
pub use report::{SessionRecoveryOutcome, SessionRecoveryReport};
use state::RecoveryState;

/// How often the sessions are looked at without a notice of the kernel, which may have had no
/// memory to send one.
const SCAN_INTERVAL: Duration = Duration::from_secs(10);
/// After this time the parameters of a new session are readable.
const NEW_SESSION_DELAY: Duration = Duration::from_secs(1);
/// A session that is lost again sooner than this is not logged in again at once.
const MIN_RELOGIN_INTERVAL: Duration = Duration::from_millis(500);
/// The longest pause that a target may request: it could ask for 18 hours, and I/O waits.
const MAX_REQUESTED_PAUSE: Duration = Duration::from_secs(60);

impl Engine {
    /// Recovers the iSCSI sessions that lunbd created, in this process or in an earlier one,
    /// until the caller drops the returned value. It logs in again to each session whose
    /// connection is lost, with growing pauses, and pending I/O continues without an error. It
    /// goes on after the session's recovery timeout, and then sets the session's offline
    /// devices to `running`. It also does so for a session that is logged in when the recovery
    /// begins, since the process that recovered that session may have been killed before it
    /// came to the devices. When a target asks for a logout, lunbd logs out and logs in again.
    ///
    /// Sessions of other programs, such as iscsid, are not touched. Several processes may
    /// recover sessions: for each session one of them acts at a time. Linux 5.10 with
    /// `iscsi_tcp`, root, in the initial network namespace; where the module is not loaded
    /// yet, the recovery waits for it.
    ///
    /// # Errors
    /// `NotPermitted`; `NotSupported` in another network namespace.
    pub fn recover_sessions(&self, options: SessionRecoveryOptions) -> Result<SessionRecovery> {
        let (attempt_sender, attempts) = mpsc::channel();
        Ok(SessionRecovery {
            roots: self.roots().clone(),
            scheduler: self.scheduler.clone(),
            options,
            watch: SessionWatch::open(self.roots())?,
            stopped: Arc::default(),
            attempt_sender,
            attempts,
            recoveries: BTreeMap::new(),
            known: BTreeMap::new(),
            next_scan: Instant::now(),
            sets_devices_running: true,
        })
    }
}

/// Recovers sessions: see [`Engine::recover_sessions`]. It starts work only in
/// [`next`](Self::next). A re-login that is under way when it is dropped ends within 10
/// seconds, except where a source of [credentials](SessionRecoveryOptions::credentials) does
/// not answer.
#[derive(Debug)]
pub struct SessionRecovery {
    roots: Roots,
    scheduler: CallScheduler,
    options: SessionRecoveryOptions,
    watch: SessionWatch,
    stopped: Arc<AtomicBool>,
    attempt_sender: Sender<AttemptDone>,
    attempts: Receiver<AttemptDone>,
    recoveries: BTreeMap<SessionId, RecoveryState>,
    known: BTreeMap<SessionId, Known>,
    next_scan: Instant,
    /// The next scan also sets the offline devices of logged-in sessions to running.
    sets_devices_running: bool,
}

/// The data of one of lunbd's sessions that were read while it was logged in.
#[derive(Debug, Default)]
struct Known {
    digests: Option<Digests>,
    recovered: Option<Instant>,
    /// The target asked for no login before this.
    not_before: Option<Instant>,
}

/// Ends the waits of a [`SessionRecovery`] from another thread.
#[derive(Debug, Clone)]
pub struct SessionRecoveryStop {
    stopped: Arc<AtomicBool>,
    waker: SessionWaker,
}

impl SessionRecoveryStop {
    /// Makes [`SessionRecovery::next`] return without waiting, from now on.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl SessionRecovery {
    /// Returns a handle that ends its waits.
    #[must_use]
    pub fn stopper(&self) -> SessionRecoveryStop {
        SessionRecoveryStop {
            stopped: Arc::clone(&self.stopped),
            waker: self.watch.waker(),
        }
    }

    /// Waits for the next reports and returns them; empty when the deadline passes without
    /// any, or after [`SessionRecoveryStop::stop`]. The first call also finds the sessions
    /// that were lost before.
    ///
    /// # Errors
    /// Those of reading sysfs or of receiving the kernel's notices.
    pub fn next(&mut self, deadline: Deadline) -> Result<Vec<SessionRecoveryReport>> {
        loop {
            let mut reports = Vec::new();
            if self.next_scan <= Instant::now() {
                self.scan_sessions()?;
            }
            while let Ok(done) = self.attempts.try_recv() {
                reports.extend(self.finish_attempt(done)?);
            }
            for id in self.due() {
                reports.extend(self.start_attempt(id)?);
            }
            for id in self.overdue() {
                reports.extend(self.check_overdue(id)?);
            }
            let stopped = self.stopped.load(Ordering::Acquire);
            if !reports.is_empty() || deadline.has_passed() || stopped {
                return Ok(reports);
            }
            let recoveries = self.recoveries.values();
            let next = recoveries.flat_map(|recovery| [recovery.due(), recovery.overdue()]);
            let next = next.flatten().fold(self.next_scan, Instant::min);
            let pause = next.saturating_duration_since(Instant::now());
            let limit = deadline.at_most(pause);
            if let Some(notice) = self.watch.next(limit)? {
                self.handle_notice(notice)?;
            }
        }
    }

    /// The sessions whose attempt should have ended by now.
    fn overdue(&self) -> Vec<SessionId> {
        let now = Instant::now();
        let recoveries = self.recoveries.iter();
        let overdue =
            recoveries.filter(|(_, recovery)| recovery.overdue().is_some_and(|ends| ends <= now));
        overdue.map(|(id, _)| *id).collect()
    }

    fn due(&self) -> Vec<SessionId> {
        let now = Instant::now();
        let recoveries = self.recoveries.iter();
        let due = recoveries.filter(|(_, recovery)| recovery.due().is_some_and(|due| due <= now));
        due.map(|(id, _)| *id).collect()
    }

    /// Reads the state of all sessions of lunbd.
    fn scan_sessions(&mut self) -> Result<()> {
        self.next_scan = Instant::now() + SCAN_INTERVAL;
        let mut there = BTreeMap::new();
        let mut devices_are_left = false;
        for session in IscsiSession::all(&self.roots)? {
            let id = session.id();
            if !session.is_lunbd_owned()? {
                continue;
            }
            let mut known = self.known.remove(&id).unwrap_or_default();
            match session.connection_status()? {
                Some(ConnectionStatus::LoggedIn) => {
                    let digests = session.digests()?;
                    // If the session was lost in between, the kernel may have forgotten the
                    // digests.
                    if session.connection_status()? == Some(ConnectionStatus::LoggedIn) {
                        known.digests = Some(digests);
                    }
                    // A rescan that failed during the loss may end only after the recovery.
                    let recovered = known.recovered;
                    let is_fresh = recovered.is_some_and(|at| at.elapsed() < SCAN_INTERVAL * 2);
                    if self.sets_devices_running || is_fresh {
                        devices_are_left |= !self.set_offline_running(&session);
                    }
                }
                Some(connection_status) if connection_status.is_lost() => {
                    track(&mut self.recoveries, &session, &known);
                }
                _ => {}
            }
            there.insert(id, known);
        }
        self.known = there;
        self.sets_devices_running = devices_are_left;
        Ok(())
    }

    /// Returns `false` where no thread could be started.
    fn set_offline_running(&self, session: &IscsiSession) -> bool {
        let begun = devices::set_running_in_background(&self.roots, &self.scheduler, session);
        if let Err(error) = &begun {
            tracing::warn!(session = %session.id(), %error, "its devices are checked again later");
        }
        begun.is_ok()
    }

    fn handle_notice(&mut self, notice: SessionNotice) -> Result<()> {
        match notice {
            SessionNotice::Lost(id) => {
                let session = IscsiSession::new(&self.roots, id);
                if session.is_lunbd_owned()? {
                    self.track_known(&session).record_loss(Instant::now());
                }
            }
            SessionNotice::AsyncMessage(id, message) => {
                let session = IscsiSession::new(&self.roots, id);
                if session.is_lunbd_owned()? {
                    self.handle_async_message(&session, message);
                }
            }
            SessionNotice::Created(_) => {
                self.next_scan = self.next_scan.min(Instant::now() + NEW_SESSION_DELAY);
            }
            SessionNotice::Resync => self.next_scan = Instant::now(),
        }
        Ok(())
    }

    fn track_known(&mut self, session: &IscsiSession) -> &mut RecoveryState {
        let known = self.known.entry(session.id()).or_default();
        track(&mut self.recoveries, session, known)
    }

    /// Acts on the requests that a target may send (RFC 7143, 11.9.1). Like iscsid, it answers
    /// a request to negotiate with a new login.
    fn handle_async_message(&mut self, session: &IscsiSession, message: AsyncMessage) {
        let id = session.id();
        let [connection, wait, _] = message.parameters;
        tracing::info!(session = %id, ?message, "the target sent an asynchronous message");
        match message.event {
            1 | 4 => {
                // A target that asks repeatedly still gets a pause between logins.
                self.track_known(session).request_logout();
            }
            // The session has one connection, number 0.
            2 | 3 if message.event == 3 || connection == 0 => {
                let wait = Duration::from_secs(wait.into()).min(MAX_REQUESTED_PAUSE);
                let until = Instant::now() + wait;
                self.known.entry(id).or_default().not_before = Some(until);
                if let Some(recovery) = self.recoveries.get_mut(&id) {
                    recovery.not_before(Some(until));
                }
            }
            _ => {}
        }
    }

    /// Starts a re-login for a session that is due, where it is still lost.
    fn start_attempt(&mut self, id: SessionId) -> Result<Option<SessionRecoveryReport>> {
        let Some(recovery) = self.recoveries.get_mut(&id) else {
            return Ok(None);
        };
        let connection_status = connection_status_of(recovery)?;
        match connection_status {
            ConnectionStatus::Ending => {
                let was_lost = recovery.was_lost();
                return self.conclude(id, was_lost.then_some(SessionRecoveryOutcome::Gone));
            }
            ConnectionStatus::LoggedIn if !recovery.must_log_out() => {
                if recovery.look_once_more(Instant::now()) {
                    return Ok(None);
                }
                let was_lost = recovery.was_lost();
                return self.conclude(id, was_lost.then_some(SessionRecoveryOutcome::Healthy));
            }
            ConnectionStatus::LoggedIn => {}
            ConnectionStatus::Lost | ConnectionStatus::GivenUp => recovery.set_lost(),
        }
        let known = self.known.get(&id).and_then(|known| known.digests);
        let attempt = RecoveryAttempt {
            roots: self.roots.clone(),
            scheduler: self.scheduler.clone(),
            session: recovery.session().clone(),
            credentials: self.options.credentials.clone(),
            digests: known.unwrap_or(self.options.digests),
            logs_out_first: recovery.must_log_out(),
        };
        recovery.begin(Instant::now() + attempt::ATTEMPT_OVERDUE);
        if let Err(error) = attempt.start(self.attempt_sender.clone(), self.watch.waker()) {
            let outcome = Err(error);
            return self.finish_attempt(AttemptDone {
                session: id,
                outcome,
            });
        }
        if connection_status == ConnectionStatus::GivenUp && recovery.first_budget_report() {
            return self
                .report(id, SessionRecoveryOutcome::BudgetSpent)
                .map(Some);
        }
        Ok(None)
    }

    /// Reports on an attempt that no deadline ends, such as in a file system that does not
    /// answer for the credentials, and on the session's state. No second attempt starts
    /// meanwhile.
    fn check_overdue(&mut self, id: SessionId) -> Result<Option<SessionRecoveryReport>> {
        let Some(recovery) = self.recoveries.get_mut(&id) else {
            return Ok(None);
        };
        recovery.check_again_at(Instant::now() + SCAN_INTERVAL);
        let outcome = match connection_status_of(recovery)? {
            ConnectionStatus::Ending => {
                return self.conclude(id, Some(SessionRecoveryOutcome::Gone));
            }
            ConnectionStatus::LoggedIn if !recovery.must_log_out() => {
                return self.conclude(id, Some(SessionRecoveryOutcome::Healthy));
            }
            ConnectionStatus::GivenUp if recovery.first_budget_report() => {
                SessionRecoveryOutcome::BudgetSpent
            }
            _ if recovery.is_new_failure(ErrorKind::TimedOut) => {
                let what = "the current re-login attempt; no other starts meanwhile";
                let error = Error::wait_expired(Stage::Session, attempt::ATTEMPT_OVERDUE, what);
                let state = recovery.session().state()?;
                let state = state.unwrap_or_else(|| "gone".to_owned());
                SessionRecoveryOutcome::Failed(
                    error.with_last_seen(format!("session {id} is {state}")),
                )
            }
            _ => return Ok(None),
        };
        self.report(id, outcome).map(Some)
    }

    /// Processes the end of an attempt.
    fn finish_attempt(&mut self, done: AttemptDone) -> Result<Option<SessionRecoveryReport>> {
        let AttemptDone {
            session: id,
            outcome,
        } = done;
        let Some(recovery) = self.recoveries.get_mut(&id) else {
            return Ok(None);
        };
        match outcome {
            Ok(attempt::AttemptOutcome::Recovered) => {
                let known = self.known.entry(id).or_default();
                known.recovered = Some(Instant::now());
                known.not_before = None;
                self.conclude(id, Some(SessionRecoveryOutcome::Recovered))
            }
            // Another process works on it, or the session is up, or gone.
            Ok(attempt::AttemptOutcome::NotOurs) => {
                recovery.end(Instant::now());
                Ok(None)
            }
            Err(error) => {
                tracing::debug!(session = %id, %error, "the session is not recovered yet");
                if error.kind() == ErrorKind::NotPermitted {
                    recovery.is_refused();
                }
                recovery.end(Instant::now());
                let is_new = recovery.is_new_failure(error.kind());
                is_new
                    .then(|| self.report(id, SessionRecoveryOutcome::Failed(error)))
                    .transpose()
            }
        }
    }

    fn conclude(
        &mut self,
        id: SessionId,
        outcome: Option<SessionRecoveryOutcome>,
    ) -> Result<Option<SessionRecoveryReport>> {
        if matches!(outcome, Some(SessionRecoveryOutcome::Healthy)) {
            let session = IscsiSession::new(&self.roots, id);
            self.sets_devices_running |= !self.set_offline_running(&session);
        }
        let reports = outcome.map(|outcome| self.report(id, outcome)).transpose();
        self.recoveries.remove(&id);
        reports
    }

    fn report(
        &self,
        id: SessionId,
        outcome: SessionRecoveryOutcome,
    ) -> Result<SessionRecoveryReport> {
        let session = IscsiSession::new(&self.roots, id);
        let (target, portal) = match session.name()? {
            Some(name) => (Some(name.target), Some(name.portal)),
            None => (None, None),
        };
        let recovery = self.recoveries.get(&id);
        let budget_left = match (
            recovery.and_then(RecoveryState::loss_reported),
            session.recovery_timeout()?,
        ) {
            (Some(lost_at), Some(budget))
                if matches!(outcome, SessionRecoveryOutcome::Failed(_)) =>
            {
                Some(budget.saturating_sub(lost_at.elapsed()))
            }
            _ => None,
        };
        tracing::info!(session = %id, ?outcome, "session recovery");
        telemetry::session_recovery(outcome.as_str());
        Ok(SessionRecoveryReport {
            session: id,
            target,
            portal,
            outcome,
            budget_left,
            tries: recovery.map_or(0, RecoveryState::tries),
        })
    }
}

/// Begins the recovery of a session, or looks at the session of a recovery again.
fn track<'a>(
    recoveries: &'a mut BTreeMap<SessionId, RecoveryState>,
    session: &IscsiSession,
    known: &Known,
) -> &'a mut RecoveryState {
    let now = Instant::now();
    match recoveries.entry(session.id()) {
        Entry::Occupied(recovery) => {
            let recovery = recovery.into_mut();
            recovery.look_again_at(now);
            recovery
        }
        Entry::Vacant(entry) => {
            let mut recovery = RecoveryState::new(session.clone(), now);
            recovery.not_before(known.recovered.map(|at| at + MIN_RELOGIN_INTERVAL));
            recovery.not_before(known.not_before);
            entry.insert(recovery)
        }
    }
}

/// A session that is gone, or belongs to another program by now, counts as ending.
fn connection_status_of(recovery: &RecoveryState) -> Result<ConnectionStatus> {
    Ok(match recovery.session().connection_status()? {
        Some(connection_status) if recovery.session().is_lunbd_owned()? => connection_status,
        _ => ConnectionStatus::Ending,
    })
}
