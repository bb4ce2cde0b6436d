//! The logins of an attach: where there is no session, through every portal at once.

mod new_session;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use self::new_session::{NewSession, log_in};
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::{AttachRequest, Multipath};
use crate::engine::iscsi::sessions::{end_if_down, end_if_unused, end_unused_best_effort, share};
use crate::engine::lock::device_lock::DeviceLock;
use crate::engine::timing::StageTimer;
use crate::error::{Error, Result, Stage};
use crate::id::{Iqn, Portal, SessionId, Source};
use crate::iscsi::{IscsiSession, SessionName, SessionOptions};
use crate::kernel::Roots;
use crate::kernel::threads;
use crate::multipath::Daemon;
use crate::transport::{MissingReason, Route, RouteKind, RouteUnavailable};

/// How long I/O waits for a lost session with other paths, and without:
/// `node.session.timeo.replacement_timeout` as open-iscsi's README has it for multipath,
/// and its default.
const RECOVERY_WITH_PATHS: Duration = Duration::from_secs(5);
const RECOVERY_ALONE: Duration = Duration::from_secs(120);
/// The least time that the remaining portals get once enough of them have logged in.
const REMAINING_PORTALS_LIMIT: Duration = Duration::from_secs(2);

/// The sessions of one attach, and the locks that keep them from being ended.
#[derive(Debug, Default)]
pub(in crate::engine) struct Sessions {
    shares: Vec<DeviceLock>,
    /// lunbd's sessions that the attach shares, no matter which process made them.
    used: Vec<IscsiSession>,
    fresh: Vec<NewSession>,
    /// Why there is no session of this name.
    failures: BTreeMap<SessionName, Error>,
}

/// A route, and the error of its login where one was tried.
pub(in crate::engine) type RouteAttempt = (Route, Option<Error>);

/// A route of a source, and its target where it has a name: several targets may be behind
/// one portal.
#[derive(Debug)]
struct TargetRoute<'a> {
    target: Option<&'a Iqn>,
    route: Route,
}

impl Sessions {
    /// The error of the login for this route, where one was tried.
    fn login_error(
        &mut self,
        candidate: &TargetRoute<'_>,
        options: &SessionOptions,
    ) -> Option<Error> {
        match (&candidate.route.via, candidate.target) {
            (
                RouteKind::Iscsi {
                    portal,
                    session: None,
                },
                Some(target),
            ) => self.failures.remove(&name_of(options, target, portal)),
            _ => None,
        }
    }

    pub(in crate::engine) fn commit(self) {
        for fresh in self.fresh {
            fresh.keep();
        }
    }

    /// Ends the sessions of a failed attach, unless another process uses them by now, and
    /// those that another attach left to this one while it shared them: of several
    /// attaches that fail, the last one ends the session.
    pub(in crate::engine) fn rollback(self, roots: &Roots, deadline: Deadline) {
        drop(self.shares);
        let is_fresh = |used: &IscsiSession| self.fresh.iter().any(|fresh| fresh.session == *used);
        for session in self.used.iter().filter(|used| !is_fresh(used)) {
            end_unused_best_effort(roots, session, deadline);
        }
        if deadline.has_passed() {
            // Dropping each session ends it on a thread for which no caller waits.
            return drop(self.fresh);
        }
        for fresh in self.fresh {
            let session = fresh.keep();
            if let Err(error) = end_if_unused(roots, &session, deadline) {
                tracing::warn!(session = %session.id(), %error, "a session is left");
            }
        }
    }
}

impl Engine {
    /// The routes of the sources after the requested logins. lunbd's sessions among them
    /// do not end before the returned `Sessions` are dropped.
    pub(in crate::engine) fn routes_with_sessions(
        &self,
        request: &AttachRequest,
        timer: &mut StageTimer,
        deadline: Deadline,
    ) -> Result<(Vec<RouteAttempt>, Sessions)> {
        let mut sessions = Sessions::default();
        match self.routes_over(request, timer, &mut sessions, deadline) {
            Ok(routes) => Ok((routes, sessions)),
            Err(error) => {
                sessions.rollback(self.roots(), deadline.for_rollback());
                Err(error)
            }
        }
    }

    fn routes_over(
        &self,
        request: &AttachRequest,
        timer: &mut StageTimer,
        sessions: &mut Sessions,
        deadline: Deadline,
    ) -> Result<Vec<RouteAttempt>> {
        loop {
            let candidates = self.candidates(request)?;
            // Another process may have ended a session.
            let all_logged_in = self.share_all(&candidates, request, sessions, deadline)?;
            let mut missing = match &request.log_in {
                Some(options) if all_logged_in => missing_sessions(&candidates, request, options),
                _ => Vec::new(),
            };
            missing.retain(|name| !sessions.failures.contains_key(name));
            match &request.log_in {
                Some(options) if !missing.is_empty() => {
                    timer.enter(Stage::Login);
                    let there = candidates
                        .iter()
                        .filter(|candidate| candidate.route.address.is_ok())
                        .count();
                    let enough = request.min_paths.max(1).saturating_sub(there);
                    self.log_in_all(missing, options, request, enough, sessions, deadline);
                }
                options if all_logged_in => {
                    let explain = |candidate: TargetRoute<'_>| {
                        let options = options.as_ref();
                        let why =
                            options.and_then(|options| sessions.login_error(&candidate, options));
                        (candidate.route, why)
                    };
                    return Ok(candidates.into_iter().map(explain).collect());
                }
                _ => {}
            }
            if deadline.has_passed() {
                let what = "the sessions to reach LOGGED_IN";
                return Err(Error::timed_out(Stage::Login, deadline, what));
            }
        }
    }

    fn candidates<'a>(&self, request: &'a AttachRequest) -> Result<Vec<TargetRoute<'a>>> {
        let initiator = request.log_in.as_ref().map(SessionOptions::initiator);
        let mut candidates = Vec::new();
        for source in request.sources() {
            let target = match source {
                Source::Iscsi(uri) => Some(uri.target()),
                _ => None,
            };
            let routes = self.routes_as(source, initiator)?.into_iter();
            candidates.extend(routes.map(|route| TargetRoute { target, route }));
        }
        Ok(candidates)
    }

    /// The routes of the source; with `initiator`, only over that initiator's sessions,
    /// since an array may show its units to one initiator and not to another.
    pub(in crate::engine) fn routes_as(
        &self,
        source: &Source,
        initiator: Option<&Iqn>,
    ) -> Result<Vec<Route>> {
        let mut routes = self.routes(std::iter::once(source))?;
        let Some(initiator) = initiator else {
            return Ok(routes);
        };
        for route in &mut routes {
            let Some((id, session)) = self.session_of(route) else {
                continue;
            };
            let name = session.name()?;
            if let Some(other) = name.filter(|name| name.initiator != *initiator) {
                if let RouteKind::Iscsi { session, .. } = &mut route.via {
                    *session = None;
                }
                route.address = Err(RouteUnavailable {
                    reason: MissingReason::NoSession,
                    text: format!("session {id} is that of {}", other.initiator),
                    hctl: None,
                });
            }
        }
        Ok(routes)
    }

    fn session_of(&self, route: &Route) -> Option<(SessionId, IscsiSession)> {
        match route.via {
            RouteKind::Iscsi {
                session: Some(id), ..
            } => Some((id, IscsiSession::new(self.roots(), id))),
            _ => None,
        }
    }

    /// Shares the lock of each session of lunbd. Returns `false` where the routes must be
    /// read again: a session was ended before the lock was taken, was just started, or
    /// was in the way and ended by this call (an unfinished logout or, before a login, a
    /// lost session without devices).
    fn share_all(
        &self,
        candidates: &[TargetRoute<'_>],
        request: &AttachRequest,
        sessions: &mut Sessions,
        deadline: Deadline,
    ) -> Result<bool> {
        let roots = self.roots();
        sessions.shares.clear();
        sessions.used.clear();
        let mut all_logged_in = true;
        for TargetRoute { route, .. } in candidates {
            let Some((_, session)) = self.session_of(route) else {
                continue;
            };
            match &route.address {
                Ok(_) => {
                    let right = share(roots, &session, deadline)?;
                    if right.is_some() && request.log_in.is_some() {
                        sessions.used.push(session.clone());
                    }
                    sessions.shares.extend(right);
                    let state = session.state()?;
                    all_logged_in &= state.as_deref() == Some(IscsiSession::LOGGED_IN);
                }
                Err(missing) => {
                    let is_down = match missing.reason {
                        MissingReason::NoTarget => true,
                        MissingReason::SessionDown { .. } => request.log_in.is_some(),
                        _ => false,
                    };
                    let is_logged_in = || {
                        let state = session.state()?;
                        Ok::<_, Error>(state.as_deref() == Some(IscsiSession::LOGGED_IN))
                    };
                    // Another process may have been logging in when the session was read.
                    let was_down = matches!(missing.reason, MissingReason::SessionDown { .. });
                    all_logged_in &= !(is_down
                        && (end_if_down(roots, &session, deadline)?
                            || !session.is_there()
                            || was_down && is_logged_in()?));
                }
            }
        }
        Ok(all_logged_in)
    }

    /// Logs in through all portals at once. Waits for `enough` of them, and the same time
    /// again for the others.
    fn log_in_all(
        &self,
        names: Vec<SessionName>,
        options: &SessionOptions,
        request: &AttachRequest,
        mut enough: usize,
        sessions: &mut Sessions,
        deadline: Deadline,
    ) {
        let portals: usize = request.sources().map(portals_of).sum();
        let has_other_paths = match request.multipath {
            Multipath::Require => true,
            // Without multipathd there is no map, and I/O has no other path.
            Multipath::Prefer => portals > 1 && matches!(Daemon::find(self.roots()), Ok(Some(_))),
            Multipath::Off => false,
        };
        let options = options.clone().recovery_timeout_or(if has_other_paths {
            RECOVERY_WITH_PATHS
        } else {
            RECOVERY_ALONE
        });
        // A portal that does not succeed in half of the time leaves the rest to the
        // others.
        let limit = if portals > 1 {
            deadline.half()
        } else {
            deadline
        };
        let (sender, results) = mpsc::channel();
        let mut waited_for: BTreeMap<SessionName, Option<Error>> = BTreeMap::new();
        for name in names {
            let started = self.spawn_login(name.clone(), &options, limit, sender.clone());
            waited_for.insert(name, started.err());
        }
        drop(sender);
        let mut wait_limit = limit;
        loop {
            if enough == 0 {
                // The other portals get as much time as the first ones needed.
                let as_long_again = limit
                    .elapsed()
                    .max(REMAINING_PORTALS_LIMIT)
                    .min(limit.remaining());
                wait_limit = limit.at_most(as_long_again);
                enough = usize::MAX;
            }
            match results.recv_timeout(wait_limit.max_sleep()) {
                Ok((name, Ok(fresh))) => {
                    waited_for.remove(&name);
                    sessions.fresh.extend(fresh);
                    enough = enough.saturating_sub(1);
                }
                Ok((name, Err(error))) => {
                    waited_for.insert(name, Some(error));
                }
                Err(RecvTimeoutError::Timeout) if !wait_limit.has_passed() => {}
                // Each login ends by itself now, and its session must be collected and
                // given up.
                Err(RecvTimeoutError::Timeout) if wait_limit.is_cancelled() => {
                    wait_limit = limit.for_rollback();
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        for (name, error) in waited_for {
            let slow = || Error::timed_out(Stage::Login, limit, &format!("a login {name}"));
            let error = error.unwrap_or_else(slow);
            tracing::debug!(%name, %error, "no session");
            sessions.failures.insert(name, error);
        }
    }

    /// Logs in on a detached thread, which ends a session that comes too late.
    fn spawn_login(
        &self,
        name: SessionName,
        options: &SessionOptions,
        deadline: Deadline,
        results: mpsc::Sender<(SessionName, Result<Option<NewSession>>)>,
    ) -> Result<()> {
        let (roots, options) = (self.roots().clone(), options.clone());
        let span = tracing::Span::current();
        let run = move || {
            let _entered = span.entered();
            let made = log_in(&roots, &name, &options, deadline);
            // Without a receiver the new session is dropped and so ended.
            let _ = results.send((name, made));
        };
        let started = threads::start("lunbd-login", run);
        started.map(drop).map_err(|error| error.at(Stage::Login))
    }
}

/// The names of the sessions that are missing.
fn missing_sessions(
    candidates: &[TargetRoute<'_>],
    request: &AttachRequest,
    options: &SessionOptions,
) -> Vec<SessionName> {
    let has_session = |target: &Iqn, portal: &Portal| {
        let mut routes = candidates
            .iter()
            .filter(|candidate| candidate.target == Some(target))
            .map(|candidate| &candidate.route.via);
        routes.any(
            |via| matches!(via, RouteKind::Iscsi { portal: at, session: Some(_) } if at == portal),
        )
    };
    let mut names = BTreeSet::new();
    for source in request.sources() {
        if let Source::Iscsi(uri) = source {
            let target = uri.target();
            let missing = uri.portals().iter();
            let missing = missing.filter(|portal| !has_session(target, portal));
            names.extend(missing.map(|portal| name_of(options, target, portal)));
        }
    }
    names.into_iter().collect()
}

fn name_of(options: &SessionOptions, target: &Iqn, portal: &Portal) -> SessionName {
    SessionName {
        initiator: options.initiator().clone(),
        target: target.clone(),
        portal: portal.clone(),
    }
}

fn portals_of(source: &Source) -> usize {
    match source {
        Source::Iscsi(uri) => uri.portals().len(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests;
