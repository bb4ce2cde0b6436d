//! The run of a reconciler's loop: whether one is under way, and when it must end.

use crate::engine::SessionRecoveryStop;
use crate::error::{Error, ErrorKind, Result, Stage};

/// The present run of the loop, and the number of runs so far.
#[derive(Debug, Default)]
pub(super) struct Run {
    phase: Phase,
    number: u64,
    /// Whether this run tries each step only once.
    tries_once: bool,
    /// No later run does anything either.
    is_stopped: bool,
    session_recovery: Option<SessionRecoveryStop>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Idle,
    Running,
    /// The loop has ended, and its threads must end.
    Ending,
}

impl Run {
    /// # Errors
    /// `InUse` if a run is under way.
    pub(super) fn begin(&mut self, tries_once: bool) -> Result<()> {
        if self.phase != Phase::Idle {
            let message = "it runs already";
            return Err(Error::new(ErrorKind::InUse, message).at(Stage::Converge));
        }
        (self.phase, self.tries_once) = (Phase::Running, tries_once);
        self.number += 1;
        Ok(())
    }

    /// Tells the threads of the run to end. Returns what ends the wait of the session
    /// recovery.
    pub(super) fn end_threads(&mut self) -> Option<SessionRecoveryStop> {
        self.phase = Phase::Ending;
        self.session_recovery.take()
    }

    pub(super) fn must_threads_end(&self) -> bool {
        self.phase == Phase::Ending
    }

    /// Allows another run, after all threads of this one have ended.
    pub(super) fn end(&mut self) {
        self.phase = Phase::Idle;
    }

    /// Ends this run and all later ones.
    pub(super) fn stop(&mut self) {
        self.is_stopped = true;
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    pub(super) fn stop_session_recovery_by(&mut self, stop: SessionRecoveryStop) {
        self.session_recovery = Some(stop);
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn tries_once(&self) -> bool {
        self.tries_once
    }
}
