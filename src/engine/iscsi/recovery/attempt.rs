//! One try to have a session back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::devices;
use super::options::{Ask, ONE_TRY};
use super::spawn::spawn;
use crate::deadline::Deadline;
use crate::engine::iscsi::sessions::{destroy_abandoned, login_lock_name, share};
use crate::engine::lock::device_lock::DeviceLock;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::iscsi::{self, IscsiSession, Proven, SessionName, SessionOptions, SessionWaker};
use crate::kernel::Roots;
use crate::scsi::CallScheduler;

/// One that has not ended then hangs.
pub(super) const LONGEST: Duration = Duration::from_secs(15);
/// Who ends the session is waited for no longer.
const TO_SHARE: Duration = Duration::from_secs(1);

pub(super) struct RecoveryAttempt {
    pub(super) roots: Roots,
    pub(super) scheduler: CallScheduler,
    pub(super) session: IscsiSession,
    pub(super) ask: Option<Arc<Ask>>,
    pub(super) digests: (bool, bool),
    /// The target is to be left first.
    pub(super) logs_out_first: bool,
}

/// How one ended.
#[derive(Debug)]
pub(super) enum AttemptOutcome {
    Recovered,
    /// It is not lost any more, or another is at work on it.
    NotOurs,
}

#[derive(Debug)]
pub(super) struct AttemptDone {
    pub(super) session: SessionId,
    pub(super) outcome: Result<AttemptOutcome>,
}

impl RecoveryAttempt {
    /// On a thread of its own, which tells how it ended and wakes who waits for it.
    pub(super) fn start(self, told: Sender<AttemptDone>, waker: SessionWaker) -> Result<()> {
        spawn(move || {
            let run = AssertUnwindSafe(|| self.run(Deadline::after(ONE_TRY)));
            // What the caller's own function for credentials does is not ours, and a
            // session of which nothing is told any more would never be tried again.
            let outcome = catch_unwind(run).unwrap_or_else(|_| {
                let message = "a re-login attempt panicked";
                Err(Error::new(ErrorKind::Io, message).at(Stage::Session))
            });
            let done = AttemptDone {
                session: self.session.id(),
                outcome,
            };
            // Where nobody listens any more, it is done all the same.
            let _ = told.send(done);
            waker.wake();
        })
    }

    #[tracing::instrument(name = "recover_session", skip_all, fields(session = %self.session.id()))]
    pub(super) fn run(&self, deadline: Deadline) -> Result<AttemptOutcome> {
        let (roots, session) = (&self.roots, &self.session);
        let Some(name) = session.name()? else {
            return Ok(AttemptOutcome::NotOurs);
        };
        // It may take its time, and holds nobody else up meanwhile.
        let options = self.options(&name);
        // As for a login: of one in the middle of it, and of two that keep sessions,
        // one is at work.
        let Some(alone) = DeviceLock::try_take(roots, &login_lock_name(&name))? else {
            return Ok(AttemptOutcome::NotOurs);
        };
        let _alone = destroy_abandoned(roots, alone, deadline)?;
        let is_lost = self.is_lost()?;
        if !is_lost && !self.logs_out_first {
            return Ok(AttemptOutcome::NotOurs);
        }
        let options = options?;
        if !is_lost {
            let Some(_right) = self.share(deadline)? else {
                return Ok(AttemptOutcome::NotOurs);
            };
            iscsi::logout_for_relogin(roots, session, deadline)?;
        }
        if !self.is_lost()? {
            return Ok(AttemptOutcome::NotOurs);
        }
        // Nobody who ends the session has to wait for the target.
        let stop_connection = || {
            let _right = self.share_of_lost(deadline)?;
            iscsi::stop_connection(roots, session, deadline)
        };
        let connection = iscsi::connect_again(&name, &options, stop_connection, deadline)?;
        {
            let _right = self.share_of_lost(deadline)?;
            iscsi::rebind_connection(roots, session, &name, connection, deadline)?;
        }
        tracing::info!(%name, took = ?deadline.elapsed(), "logged in again");
        devices::set_offline_running(roots, &self.scheduler, session, deadline);
        Ok(AttemptOutcome::Recovered)
    }

    fn options(&self, name: &SessionName) -> Result<SessionOptions> {
        let (header, data) = self.digests;
        let options = SessionOptions::new(name.initiator.clone())
            .digests(header, data)
            .kept_by(&self.session)?;
        let credentials = match &self.ask {
            Some(ask) => ask(name)?,
            None => None,
        };
        let options = if self.session.requires_digests()? {
            options.require_digests()
        } else {
            options
        };
        let had = self.session.proven()?;
        if Proven::with(credentials.as_ref()) < had {
            return Err(iscsi::unproven(&self.session, had));
        }
        Ok(match credentials {
            Some(credentials) => options.credentials(credentials),
            None => options,
        })
    }

    fn is_lost(&self) -> Result<bool> {
        let connection_status = self.session.connection_status()?;
        Ok(connection_status.is_some_and(iscsi::ConnectionStatus::is_lost))
    }

    /// `None` where it is being ended.
    fn share(&self, deadline: Deadline) -> Result<Option<DeviceLock>> {
        let patience = deadline.at_most(TO_SHARE);
        match share(&self.roots, &self.session, patience) {
            Err(error) if error.kind().is_out_of_time() => Ok(None),
            shared => shared,
        }
    }

    fn share_of_lost(&self, deadline: Deadline) -> Result<DeviceLock> {
        let right = self.share(deadline)?;
        match right {
            Some(right) if self.is_lost()? => Ok(right),
            _ => {
                let id = self.session.id();
                let message = format!("another process ends session {id}, or it is no longer lost");
                Err(Error::new(ErrorKind::Vanished, message).at(Stage::Session))
            }
        }
    }
}
