//! The logins of an attach: where there is no session, through every portal at once.

mod log_in_all;
mod new_session;

use std::collections::{BTreeMap, BTreeSet};

use self::new_session::NewSession;
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::AttachRequest;
use crate::engine::call::CallContext;
use crate::engine::iscsi::sessions::{end_if_down, end_if_unused, end_unused_best_effort, share};
use crate::engine::lock::device_lock::DeviceLock;
use crate::error::{Error, Result, Stage};
use crate::id::{Iqn, Portal, SessionId, Source};
use crate::iscsi::{IscsiSession, SessionName, SessionOptions};
use crate::kernel::Roots;
use crate::transport::{MissingReason, Route, RouteKind, RouteUnavailable};

/// The sessions of one attach, and the locks that keep them from being ended.
#[derive(Debug, Default)]
pub(in crate::engine) struct Sessions {
    shares: Vec<DeviceLock>,
    /// lunbd's sessions that the attach shares, no matter which process made them.
    used: Vec<IscsiSession>,
    new: Vec<NewSession>,
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
        for session in self.new {
            session.keep();
        }
    }

    /// Ends the sessions of a failed attach, unless another process uses them by now, and
    /// those that another attach left to this one while it shared them: of several
    /// attaches that fail, the last one ends the session.
    pub(in crate::engine) fn rollback(self, roots: &Roots, deadline: Deadline) {
        drop(self.shares);
        let is_new = |used: &IscsiSession| self.new.iter().any(|new| new.session == *used);
        for session in self.used.iter().filter(|used| !is_new(used)) {
            end_unused_best_effort(roots, session, deadline);
        }
        if deadline.has_passed() {
            // Dropping each session ends it on a thread for which no caller waits.
            return drop(self.new);
        }
        for session in self.new {
            let session = session.keep();
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
        call: &mut CallContext,
    ) -> Result<(Vec<RouteAttempt>, Sessions)> {
        let mut sessions = Sessions::default();
        match self.routes_over(request, &mut sessions, call) {
            Ok(routes) => Ok((routes, sessions)),
            Err(error) => {
                sessions.rollback(self.roots(), call.deadline.for_rollback());
                Err(error)
            }
        }
    }

    fn routes_over(
        &self,
        request: &AttachRequest,
        sessions: &mut Sessions,
        call: &mut CallContext,
    ) -> Result<Vec<RouteAttempt>> {
        let deadline = call.deadline;
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
                    call.enter(Stage::Login);
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
                    let shared = share(roots, &session, deadline)?;
                    if shared.is_some() && request.log_in.is_some() {
                        sessions.used.push(session.clone());
                    }
                    sessions.shares.extend(shared);
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
