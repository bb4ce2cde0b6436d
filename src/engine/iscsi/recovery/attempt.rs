//! One try to have a session back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::devices;
use super::options::{Ask, ONE_TRY};
use super::spawn::beside;
use crate::deadline::Deadline;
use crate::engine::iscsi::sessions::{after_the_dead, login_lease_of, share};
use crate::engine::lock::device_lock::Lease;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::iscsi::{self, Proven, SessionName, SessionOptions, SessionWaker, StandingSession};
use crate::kernel::Roots;
use crate::scsi::Lanes;

/// One that has not ended then hangs.
pub(super) const LONGEST: Duration = Duration::from_secs(15);
/// Who ends the session is waited for no longer.
const TO_SHARE: Duration = Duration::from_secs(1);

pub(super) struct Attempt {
    pub(super) roots: Roots,
    pub(super) lanes: Lanes,
    pub(super) session: StandingSession,
    pub(super) ask: Option<Arc<Ask>>,
    pub(super) digests: (bool, bool),
    /// The target is to be left first.
    pub(super) leaves: bool,
}

/// How one ended.
#[derive(Debug)]
pub(super) enum Ended {
    Recovered,
    /// It is not lost any more, or another is at work on it.
    NotOurs,
}

#[derive(Debug)]
pub(super) struct Came {
    pub(super) session: SessionId,
    pub(super) ended: Result<Ended>,
}

impl Attempt {
    /// On a thread of its own, which tells how it ended and wakes who waits for it.
    pub(super) fn start(self, told: Sender<Came>, waker: SessionWaker) -> Result<()> {
        beside(move || {
            let run = AssertUnwindSafe(|| self.run(Deadline::after(ONE_TRY)));
            // What the caller's own function for credentials does is not ours, and a
            // session of which nothing is told any more would never be tried again.
            let ended = catch_unwind(run).unwrap_or_else(|_| {
                let message = "a login again panicked";
                Err(Error::new(ErrorKind::Io, message).at(Stage::Session))
            });
            let came = Came {
                session: self.session.id(),
                ended,
            };
            // Where nobody listens any more, it is done all the same.
            let _ = told.send(came);
            waker.wake();
        })
    }

    #[tracing::instrument(name = "recover_session", skip_all, fields(session = %self.session.id()))]
    pub(super) fn run(&self, deadline: Deadline) -> Result<Ended> {
        let (roots, session) = (&self.roots, &self.session);
        let Some(name) = session.name()? else {
            return Ok(Ended::NotOurs);
        };
        // It may take its time, and holds nobody else up meanwhile.
        let options = self.options(&name);
        // As for a login: of one in the middle of it, and of two that keep sessions,
        // one is at work.
        let Some(alone) = Lease::try_take(roots, &login_lease_of(&name))? else {
            return Ok(Ended::NotOurs);
        };
        let _alone = after_the_dead(roots, alone, deadline)?;
        let is_lost = self.is_lost()?;
        if !is_lost && !self.leaves {
            return Ok(Ended::NotOurs);
        }
        let options = options?;
        if !is_lost {
            let Some(_right) = self.share(deadline)? else {
                return Ok(Ended::NotOurs);
            };
            iscsi::leave(roots, session, deadline)?;
        }
        if !self.is_lost()? {
            return Ok(Ended::NotOurs);
        }
        // Nobody who ends the session has to wait for the target.
        let halt = || {
            let _right = self.share_of_lost(deadline)?;
            iscsi::halt(roots, session, deadline)
        };
        let connection = iscsi::connect_again(&name, &options, halt, deadline)?;
        {
            let _right = self.share_of_lost(deadline)?;
            iscsi::resume(roots, session, &name, connection, deadline)?;
        }
        tracing::info!(%name, took = ?deadline.elapsed(), "logged in again");
        devices::bring_back(roots, &self.lanes, session, deadline);
        Ok(Ended::Recovered)
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
        let plight = self.session.plight()?;
        Ok(plight.is_some_and(iscsi::Plight::is_lost))
    }

    /// `None` where it is being ended.
    fn share(&self, deadline: Deadline) -> Result<Option<Lease>> {
        let patience = deadline.at_most(TO_SHARE);
        match share(&self.roots, &self.session, patience) {
            Err(error) if error.kind().is_out_of_time() => Ok(None),
            shared => shared,
        }
    }

    fn share_of_lost(&self, deadline: Deadline) -> Result<Lease> {
        let right = self.share(deadline)?;
        match right {
            Some(right) if self.is_lost()? => Ok(right),
            _ => {
                let id = self.session.id();
                let message = format!("session {id} is ended by another, or is not lost any more");
                Err(Error::new(ErrorKind::Vanished, message).at(Stage::Session))
            }
        }
    }
}
