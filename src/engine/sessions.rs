//! The iSCSI sessions that the engine made: who uses one, and its end when nobody
//! does.
//!
//! An attach shares the right to a session of ours from before its scan until its
//! devices are there; who ends it takes that right alone, and looks for devices
//! under it. So no session goes away under a scan, and of two detaches the one
//! that deletes the last device sees that there is none.

use std::collections::BTreeSet;
use std::thread::{self, ScopedJoinHandle};

use super::Engine;
use super::lease::Lease;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{HostNo, SessionId};
#[cfg(feature = "journal")]
use crate::id::{Iqn, Source};
use crate::iscsi::{SessionName, StandingSession, log_out};
use crate::kernel::Roots;

fn lease_of(id: SessionId) -> String {
    format!("iscsi-session-{id}")
}

/// Of the right to log in under this name, alone.
pub(super) fn login_lease_of(name: &SessionName) -> String {
    format!("iscsi-login-{:?}", name.isid())
}

/// The right to use a session of ours, with others; `None` where it is not ours,
/// and so is ended by nobody here.
pub(super) fn share(
    roots: &Roots,
    session: &StandingSession,
    deadline: Deadline,
) -> Result<Option<Lease>> {
    if !session.is_ours()? {
        return Ok(None);
    }
    Lease::share(roots, &lease_of(session.id()), deadline).map(Some)
}

/// Logs out a session of ours that has no devices and that nobody is about to
/// use. Says whether it did.
pub(super) fn end_if_unused(
    roots: &Roots,
    session: &StandingSession,
    deadline: Deadline,
) -> Result<bool> {
    // Looked at first without the right to it: on a session that others use
    // nobody waits for them.
    let is_used = || Ok::<_, Error>(!session.devices()?.is_empty());
    if !session.is_there() || !session.is_ours()? || is_used()? {
        return Ok(false);
    }
    let _alone = match Lease::take(roots, &lease_of(session.id()), deadline) {
        // An attach is at work on it all the time.
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            tracing::info!(session = %session.id(), %error, "it stays");
            return Ok(false);
        }
        lease => lease?,
    };
    if !session.is_there() || is_used()? {
        return Ok(false);
    }
    log_out(roots, session, deadline)?;
    tracing::info!(session = %session.id(), "logged out");
    Ok(true)
}

impl Engine {
    /// Whether one of our sessions is behind these SCSI hosts.
    pub(super) fn has_own_session(&self, hosts: &BTreeSet<HostNo>) -> Result<bool> {
        for host in hosts {
            for session in StandingSession::of_host(self.roots(), *host)? {
                if session.is_ours()? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Logs out those of our sessions through which these sources were to be
    /// reached, where nothing is on them: who made one may have died before there
    /// was a device, or after the last one went. Says which.
    ///
    /// # Errors
    /// The first failure, at stage `logout`.
    #[cfg(feature = "journal")]
    pub(super) fn end_sessions_of(
        &self,
        sources: &[Source],
        initiator: &Iqn,
        deadline: Deadline,
    ) -> Result<Vec<SessionId>> {
        let mut ended = Vec::new();
        for session in StandingSession::all(self.roots())? {
            let Some(name) = session.name()? else {
                continue;
            };
            let leads_to = |source: &Source| match source {
                Source::Iscsi(uri) => {
                    *uri.target() == name.target && uri.portals().contains(&name.portal)
                }
                _ => false,
            };
            let was_for_it = name.initiator == *initiator && sources.iter().any(leads_to);
            if was_for_it
                && end_if_unused(self.roots(), &session, deadline)
                    .map_err(|error| error.at(Stage::Logout))?
            {
                ended.push(session.id());
            }
        }
        Ok(ended)
    }

    /// Logs out those of our sessions behind these SCSI hosts that are not used
    /// any more, all at once. Says which.
    ///
    /// # Errors
    /// The first failure, at stage `logout`, when all are done.
    pub(super) fn end_unused_sessions(
        &self,
        hosts: &BTreeSet<HostNo>,
        deadline: Deadline,
    ) -> Result<Vec<SessionId>> {
        let roots = self.roots();
        let mut sessions = Vec::new();
        for host in hosts {
            sessions.extend(StandingSession::of_host(roots, *host)?);
        }
        let end = |session: &StandingSession| end_if_unused(roots, session, deadline);
        let done: Vec<Result<bool>> = match sessions.as_slice() {
            [] => return Ok(Vec::new()),
            [one] => vec![end(one)],
            several => thread::scope(|scope| {
                let span = tracing::Span::current();
                let threads: Vec<_> = several
                    .iter()
                    .map(|session| {
                        let span = span.clone();
                        scope.spawn(move || {
                            let _entered = span.entered();
                            end(session)
                        })
                    })
                    .collect();
                let died = || Error::new(ErrorKind::Io, "the thread of a logout died");
                let joined = threads.into_iter().map(ScopedJoinHandle::join);
                joined
                    .map(|done| done.unwrap_or_else(|_| Err(died())))
                    .collect()
            }),
        };
        let mut ended = Vec::new();
        for (session, done) in sessions.iter().zip(done) {
            match done {
                Ok(true) => ended.push(session.id()),
                Ok(false) => {}
                Err(error) => return Err(error.at(Stage::Logout)),
            }
        }
        Ok(ended)
    }
}
