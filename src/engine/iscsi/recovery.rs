//! Recovers lunbd's iSCSI sessions after their connections were lost.

mod attempt;
mod devices;
mod once;
mod options;
mod progress;
mod report;
mod spawn;
mod state;
mod tracking;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::iscsi::recovery::attempt::AttemptDone;
use crate::engine::iscsi::recovery::state::RecoveryState;
use crate::error::Result;
use crate::id::SessionId;
use crate::iscsi::{Digests, SessionWaker, SessionWatch};
use crate::kernel::Roots;
use crate::scsi::CallScheduler;
pub use options::SessionRecoveryOptions;
pub use report::{SessionRecoveryOutcome, SessionRecoveryReport};

/// How often the sessions are looked at without a notice of the kernel, which may have had no
/// memory to send one.
const SCAN_INTERVAL: Duration = Duration::from_secs(10);
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
            makes_devices_usable: true,
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
    known: BTreeMap<SessionId, KnownSession>,
    next_scan: Instant,
    /// The next scan also sets the offline devices of logged-in sessions to running.
    makes_devices_usable: bool,
}

/// The data of one of lunbd's sessions that were read while it was logged in.
#[derive(Debug, Default)]
struct KnownSession {
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
}
