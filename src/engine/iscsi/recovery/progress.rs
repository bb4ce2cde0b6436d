//! The attempts of a recovery, from their start to their report.

use std::time::Instant;

use crate::engine::iscsi::recovery::attempt::{self, AttemptDone, RecoveryAttempt};
use crate::engine::iscsi::recovery::state::RecoveryState;
use crate::engine::iscsi::recovery::{
    SCAN_INTERVAL, SessionRecovery, SessionRecoveryOutcome, SessionRecoveryReport,
};
use crate::engine::telemetry;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::iscsi::{ConnectionStatus, IscsiSession};

impl SessionRecovery {
    /// Starts a re-login for a session that is due, where it is still lost.
    pub(super) fn start_attempt(&mut self, id: SessionId) -> Result<Option<SessionRecoveryReport>> {
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
            known_digests: known,
            digests_if_unknown: self.options.digests.clone(),
            logs_out_first: recovery.must_log_out(),
        };
        recovery.begin_attempt(Instant::now() + attempt::ATTEMPT_OVERDUE);
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
    pub(super) fn check_overdue(&mut self, id: SessionId) -> Result<Option<SessionRecoveryReport>> {
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
            _ if recovery.record_failure(ErrorKind::TimedOut) => {
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
    pub(super) fn finish_attempt(
        &mut self,
        done: AttemptDone,
    ) -> Result<Option<SessionRecoveryReport>> {
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
                if connection_status_of(recovery)?.is_lost() {
                    recovery.begin_again(Instant::now());
                    return Ok(None);
                }
                let was_noticed = recovery.was_noticed();
                let session = recovery.session().clone();
                let report = self.conclude(id, Some(SessionRecoveryOutcome::Recovered));
                if was_noticed {
                    // The notice may be of a loss after the login, which sysfs may not show yet.
                    self.track_known(&session);
                }
                report
            }
            // Another process works on it, or the session is up, or gone.
            Ok(attempt::AttemptOutcome::NotOurs) => {
                recovery.end_attempt(Instant::now());
                Ok(None)
            }
            Err(error) => {
                tracing::debug!(session = %id, %error, "the session is not recovered yet");
                if error.kind() == ErrorKind::NotPermitted {
                    recovery.note_refusal();
                }
                recovery.end_attempt(Instant::now());
                let is_new = recovery.record_failure(error.kind());
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
            self.makes_devices_usable |= !self.start_making_devices_usable(&session);
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

/// A session that is gone, or belongs to another program by now, counts as ending.
fn connection_status_of(recovery: &RecoveryState) -> Result<ConnectionStatus> {
    Ok(match recovery.session().connection_status()? {
        Some(connection_status) if recovery.session().is_lunbd_owned()? => connection_status,
        _ => ConnectionStatus::Ending,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Engine, SessionRecoveryOptions};
    use crate::iscsi::{FakeSession, SessionName};
    use crate::kernel::Roots;

    fn recovery_at(roots: &Roots) -> (SessionRecovery, FakeSession) {
        let engine = Engine::start(roots.clone()).unwrap();
        let name = SessionName {
            initiator: "iqn.2026-01.example:host".parse().unwrap(),
            target: "iqn.2026-01.example:array".parse().unwrap(),
            portal: "127.0.0.1".parse().unwrap(),
        };
        let session = FakeSession::add(roots, 3, &name);
        let options = SessionRecoveryOptions::new();
        let mut recovery = engine.recover_sessions(options).unwrap();
        let mut state = RecoveryState::new(session.session.clone(), Instant::now());
        state.set_lost();
        state.record_loss(Instant::now());
        state.begin_attempt(Instant::now());
        recovery.recoveries.insert(session.session.id(), state);
        (recovery, session)
    }

    fn recovered(session: &FakeSession) -> AttemptDone {
        AttemptDone {
            session: session.session.id(),
            outcome: Ok(attempt::AttemptOutcome::Recovered),
        }
    }

    #[test]
    fn a_session_that_is_lost_again_when_its_recovery_ends_is_recovered_further() {
        let root = tempfile::tempdir().unwrap();
        let (mut recovery, session) = recovery_at(&Roots::below(root.path()));
        session.lose();
        let report = recovery.finish_attempt(recovered(&session)).unwrap();
        assert!(report.is_none(), "{report:?}");
        let state = &recovery.recoveries[&session.session.id()];
        assert!(state.due().is_some() && state.overdue().is_none());
        assert_eq!(
            state.loss_reported(),
            None,
            "the second loss has another time"
        );
    }

    #[test]
    fn a_notice_that_comes_during_an_attempt_makes_the_session_be_looked_at_after_it() {
        for is_noticed in [true, false] {
            let root = tempfile::tempdir().unwrap();
            let (mut recovery, session) = recovery_at(&Roots::below(root.path()));
            if is_noticed {
                recovery.track_known(&session.session);
            }
            let report = recovery.finish_attempt(recovered(&session)).unwrap();
            let outcome = report.unwrap().outcome;
            assert!(matches!(outcome, SessionRecoveryOutcome::Recovered));
            let is_looked_at = recovery.recoveries.contains_key(&session.session.id());
            assert_eq!(is_looked_at, is_noticed);
        }
    }
}
