//! Logs lost sessions in again once, for a caller that runs no recovery.

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::iscsi::recovery::attempt::{AttemptOutcome, RecoveryAttempt};
use crate::engine::iscsi::recovery::options::ATTEMPT_LIMIT;
use crate::engine::iscsi::recovery::{
    SessionRecoveryOptions, SessionRecoveryOutcome, SessionRecoveryReport, devices,
};
use crate::error::{Error, ErrorKind, Result, Retry, Stage};
use crate::id::IscsiUri;
use crate::iscsi::{ConnectionStatus, IscsiSession, SessionName};
use crate::kernel::pool;

impl Engine {
    /// Logs in again to each of lunbd's lost sessions that lead to this source, all at once,
    /// and reports on each of lunbd's sessions that leads there. It retries transient
    /// failures until the deadline. It is for a machine on which no process [recovers
    /// sessions](Engine::recover_sessions); where one does, the first of the two processes
    /// recovers the session.
    ///
    /// Needs and minimum kernel: see [`Engine::recover_sessions`]. After a timeout a session
    /// is still lost, or logged in, and a repeated call continues.
    ///
    /// # Errors
    /// `NotFound` where no session of lunbd leads there; those of reading sysfs. A session
    /// that is not recovered is an outcome and no error.
    pub fn heal_sessions(
        &self,
        source: &IscsiUri,
        options: &SessionRecoveryOptions,
        deadline: Deadline,
    ) -> Result<Vec<SessionRecoveryReport>> {
        let sessions = own_sessions_to(self, source)?;
        if sessions.is_empty() {
            let message = format!(
                "no session of lunbd leads to {source}: `attach --log-in` creates one, and \
                 iscsid recovers its own"
            );
            return Err(Error::new(ErrorKind::NotFound, message).at(Stage::Resolve));
        }
        let heal = |(session, name): &(IscsiSession, SessionName)| {
            heal_session(self, session, name, options, deadline)
        };
        let healed = pool::each(Stage::Session, &sessions, heal);
        healed.into_iter().map(|healed| healed?).collect()
    }
}

fn own_sessions_to(engine: &Engine, source: &IscsiUri) -> Result<Vec<(IscsiSession, SessionName)>> {
    let mut found = Vec::new();
    for session in IscsiSession::all(engine.roots())? {
        if let Some(name) = session.name()?
            && name.target == *source.target()
            && source.portals().contains(&name.portal)
            && session.is_lunbd_owned()?
        {
            found.push((session, name));
        }
    }
    found.sort_by_key(|(session, _)| session.id());
    Ok(found)
}

fn heal_session(
    engine: &Engine,
    session: &IscsiSession,
    name: &SessionName,
    options: &SessionRecoveryOptions,
    deadline: Deadline,
) -> Result<SessionRecoveryReport> {
    let attempt = RecoveryAttempt {
        roots: engine.roots().clone(),
        scheduler: engine.scheduler.clone(),
        session: session.clone(),
        credentials: options.credentials.clone(),
        known_digests: None,
        digests_if_unknown: options.digests.clone(),
        logs_out_first: false,
    };
    let mut tries = 0;
    let outcome = attempt.repeat(&mut tries, deadline)?;
    Ok(SessionRecoveryReport {
        session: session.id(),
        target: Some(name.target.clone()),
        portal: Some(name.portal.clone()),
        outcome,
        budget_left: None,
        tries,
    })
}

impl RecoveryAttempt {
    fn repeat(&self, tries: &mut u32, deadline: Deadline) -> Result<SessionRecoveryOutcome> {
        let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
        loop {
            match self.session.connection_status()? {
                None | Some(ConnectionStatus::Ending) => return Ok(SessionRecoveryOutcome::Gone),
                Some(ConnectionStatus::LoggedIn) => {
                    let (roots, scheduler) = (&self.roots, &self.scheduler);
                    let session = &self.session;
                    devices::make_devices_usable_unless_lost(roots, scheduler, session, deadline);
                    if !self.is_lost()? {
                        return Ok(SessionRecoveryOutcome::Healthy);
                    }
                }
                Some(ConnectionStatus::Lost | ConnectionStatus::GivenUp) => {}
            }
            *tries += 1;
            let limit = deadline.at_most(ATTEMPT_LIMIT);
            let failure = match self.run(limit) {
                Ok(AttemptOutcome::Recovered) => return Ok(SessionRecoveryOutcome::Recovered),
                Ok(AttemptOutcome::NotOurs) => {
                    let id = self.session.id();
                    let message = format!("another process logs in again for session {id}");
                    Error::new(ErrorKind::InUse, message).at(Stage::Session)
                }
                Err(error) if error.retry() != Retry::Again => {
                    return Ok(SessionRecoveryOutcome::Failed(error));
                }
                Err(error) => error,
            };
            if deadline.has_passed() {
                return Ok(SessionRecoveryOutcome::Failed(failure));
            }
            deadline.pause(pauses.pause());
        }
    }
}
