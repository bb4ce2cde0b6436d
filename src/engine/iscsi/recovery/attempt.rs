//! One attempt to recover a session.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::iscsi::recovery::devices;
use crate::engine::iscsi::recovery::options::{ATTEMPT_LIMIT, CredentialsFn, DigestsFn};
use crate::engine::iscsi::recovery::spawn::spawn;
use crate::engine::iscsi::sessions::{destroy_abandoned, lock_session_shared, login_lock_name};
use crate::engine::lock::device_lock::DeviceLock;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::iscsi::{
    self, Digests, IscsiSession, Proven, SessionName, SessionOptions, SessionWaker,
};
use crate::kernel::Roots;
use crate::scsi::CallScheduler;

/// An attempt that takes longer than this is overdue: it hangs.
pub(super) const ATTEMPT_OVERDUE: Duration = Duration::from_secs(15);
/// How long an attempt waits for a process that ends the session.
const SHARE_LIMIT: Duration = Duration::from_secs(1);

pub(super) struct RecoveryAttempt {
    pub(super) roots: Roots,
    pub(super) scheduler: CallScheduler,
    pub(super) session: IscsiSession,
    pub(super) credentials: Option<Arc<CredentialsFn>>,
    /// `None` if no process of lunbd that still runs has seen them.
    pub(super) known_digests: Option<Digests>,
    pub(super) digests_if_unknown: Option<Arc<DigestsFn>>,
    /// Whether to log out of the target first.
    pub(super) logs_out_first: bool,
}

/// The result of an attempt that did not fail.
#[derive(Debug)]
pub(super) enum AttemptOutcome {
    Recovered,
    /// The session is no longer lost, or another process works on it.
    NotOurs,
}

#[derive(Debug)]
pub(super) struct AttemptDone {
    pub(super) session: SessionId,
    pub(super) outcome: Result<AttemptOutcome>,
}

impl RecoveryAttempt {
    /// Runs on a thread of its own, which sends its result and wakes the receiver.
    pub(super) fn start(self, results: Sender<AttemptDone>, waker: SessionWaker) -> Result<()> {
        spawn(move || {
            let run = AssertUnwindSafe(|| self.run(Deadline::after(ATTEMPT_LIMIT)));
            // The caller's credentials function may panic, and a session without a result
            // would never be tried again.
            let outcome = catch_unwind(run).unwrap_or_else(|_| {
                let message = "a re-login attempt panicked";
                Err(Error::new(ErrorKind::Io, message).at(Stage::Session))
            });
            let done = AttemptDone {
                session: self.session.id(),
                outcome,
            };
            // Where the receiver is gone, the attempt has still done its work.
            let _ = results.send(done);
            waker.wake();
        })
    }

    #[tracing::instrument(name = "recover_session", skip_all, fields(session = %self.session.id()))]
    pub(super) fn run(&self, deadline: Deadline) -> Result<AttemptOutcome> {
        let (roots, session) = (&self.roots, &self.session);
        let Some(name) = session.name()? else {
            return Ok(AttemptOutcome::NotOurs);
        };
        // Reading the credentials may take long, so it happens before the lock.
        let options = self.options(&name, deadline);
        // The login lock admits one process to a session, whether it logs in or recovers.
        let Some(lock) = DeviceLock::try_take(roots, &login_lock_name(&name))? else {
            return Ok(AttemptOutcome::NotOurs);
        };
        let _lock = destroy_abandoned(roots, lock, deadline)?;
        let is_lost = self.is_lost()?;
        if !is_lost && !self.logs_out_first {
            return Ok(AttemptOutcome::NotOurs);
        }
        let options = options?;
        if !is_lost {
            let Some(_shared) = self.lock_session_shared(deadline)? else {
                return Ok(AttemptOutcome::NotOurs);
            };
            iscsi::logout_for_relogin(roots, session, deadline)?;
        }
        if !self.is_lost()? {
            return Ok(AttemptOutcome::NotOurs);
        }
        // A process that ends the session does not have to wait for the target.
        let stop_connection = || {
            let _shared = self.lock_lost_session_shared(deadline)?;
            iscsi::stop_connection(roots, session, deadline)
        };
        let connection = iscsi::connect_again(&name, &options, stop_connection, deadline)?;
        {
            let _shared = self.lock_lost_session_shared(deadline)?;
            iscsi::rebind_connection(roots, session, &name, connection, deadline)?;
        }
        tracing::info!(%name, took = ?deadline.elapsed(), "logged in again");
        devices::make_devices_usable_unless_lost(roots, &self.scheduler, session, deadline);
        if self.is_lost()? {
            let message = format!(
                "session {} was logged in again and is lost again",
                session.id()
            );
            return Err(Error::new(ErrorKind::NotReady, message).at(Stage::Session));
        }
        Ok(AttemptOutcome::Recovered)
    }

    fn options(&self, name: &SessionName, deadline: Deadline) -> Result<SessionOptions> {
        let Digests { header, data } = self.digests(name)?;
        let options = SessionOptions::new(name.initiator.clone())
            .digests(header, data)
            .with_settings_of(&self.session)?;
        let credentials = match &self.credentials {
            Some(ask) => ask(name, deadline)?,
            None => None,
        };
        let options = if self.session.requires_digests()? {
            options.require_digests()
        } else {
            options
        };
        let proven = self.session.proven()?;
        if Proven::with(credentials.as_ref()) < proven {
            return Err(iscsi::unproven(&self.session, proven));
        }
        Ok(match credentials {
            Some(credentials) => options.credentials(credentials),
            None => options,
        })
    }

    /// The digests to offer. A data digest of unknown origin is offered only if each disk keeps
    /// its pages stable while they are written. `iscsi_tcp` decides that when the disk appears,
    /// from the digest that the session has then. On another disk a page may change after its
    /// digest was made, and the target would drop each new connection.
    fn digests(&self, name: &SessionName) -> Result<Digests> {
        if let Some(known) = self.known_digests {
            return Ok(known);
        }
        let wanted = self.digests_if_unknown.as_ref().map(|ask| ask(name));
        let Digests { header, data } = wanted.unwrap_or_default();
        let data = data && devices::keep_pages_stable(&self.roots, &self.session)?;
        Ok(Digests { header, data })
    }

    pub(super) fn is_lost(&self) -> Result<bool> {
        let connection_status = self.session.connection_status()?;
        Ok(connection_status.is_some_and(iscsi::ConnectionStatus::is_lost))
    }

    /// Returns `None` where another process ends the session.
    fn lock_session_shared(&self, deadline: Deadline) -> Result<Option<DeviceLock>> {
        let limit = deadline.at_most(SHARE_LIMIT);
        match lock_session_shared(&self.roots, &self.session, limit) {
            Err(error) if error.kind().is_timeout_or_cancel() => Ok(None),
            shared => shared,
        }
    }

    fn lock_lost_session_shared(&self, deadline: Deadline) -> Result<DeviceLock> {
        let shared = self.lock_session_shared(deadline)?;
        match shared {
            Some(shared) if self.is_lost()? => Ok(shared),
            _ => {
                let id = self.session.id();
                let message = format!("another process ends session {id}, or it is no longer lost");
                Err(Error::new(ErrorKind::Vanished, message).at(Stage::Session))
            }
        }
    }
}
