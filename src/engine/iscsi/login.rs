//! The logins of an attach: where there is no session, through every portal at once.

mod log_in_all;
mod new_session;
mod requirements;
mod sessions;

use std::collections::BTreeSet;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::AttachRequest;
use crate::engine::attach::addresses::routes_to;
use crate::engine::call::CallContext;
use crate::engine::iscsi::login::log_in_all::log_in_all;
use crate::engine::iscsi::login::requirements::{SECRETS_LIMIT, refusal};
use crate::engine::iscsi::login::sessions::Sessions;
use crate::engine::iscsi::sessions::{end_if_down, lock_session_shared};
use crate::error::{Error, Result, Stage};
use crate::id::{Iqn, Portal, SessionId, Source};
use crate::iscsi::{ConnectionStatus, IscsiSession, SessionName, SessionOptions};
use crate::transport::{MissingReason, Route, RouteKind, RouteUnavailable};

/// A route, and the error of its login where one was tried.
pub(in crate::engine) type RouteAttempt = (Route, Option<Error>);

/// A route of a source, and its target where it has a name: several targets may be behind
/// one portal.
#[derive(Debug)]
struct TargetRoute<'a> {
    target: Option<&'a Iqn>,
    route: Route,
    /// Why its session does not do for the request.
    refusal: Option<Error>,
}

impl TargetRoute<'_> {
    /// The name of the session that this route lacks.
    fn missing_session(&self, options: &SessionOptions) -> Option<SessionName> {
        match (&self.route.via, self.target) {
            (
                RouteKind::Iscsi {
                    portal,
                    session: None,
                },
                Some(target),
            ) => Some(name_of(options, target, portal)),
            _ => None,
        }
    }
}

/// The routes of the sources after the requested logins. lunbd's sessions among them
/// do not end before the returned `Sessions` are dropped.
pub(in crate::engine) fn routes_with_sessions(
    engine: &Engine,
    request: &AttachRequest,
    call: &mut CallContext,
) -> Result<(Vec<RouteAttempt>, Sessions)> {
    let mut sessions = Sessions::default();
    match routes_after_login(engine, request, &mut sessions, call) {
        Ok(routes) => Ok((routes, sessions)),
        Err(error) => {
            sessions.rollback(engine.roots(), call.deadline.for_rollback());
            Err(error)
        }
    }
}

fn routes_after_login(
    engine: &Engine,
    request: &AttachRequest,
    sessions: &mut Sessions,
    call: &mut CallContext,
) -> Result<Vec<RouteAttempt>> {
    let deadline = call.deadline;
    loop {
        let candidates = candidates(engine, request, deadline)?;
        // Another process may have ended a session.
        let routes_are_current =
            lock_sessions_shared(engine, &candidates, request, sessions, deadline)?;
        let mut missing = match &request.log_in {
            Some(options) if routes_are_current => missing_sessions(&candidates, request, options),
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
                log_in_all(
                    engine, missing, options, request, enough, sessions, deadline,
                );
            }
            options if routes_are_current => {
                let explain = |candidate: TargetRoute<'_>| {
                    let options = options.as_ref();
                    let name = options.and_then(|options| candidate.missing_session(options));
                    let failure = name.and_then(|name| sessions.failures.remove(&name));
                    (candidate.route, candidate.refusal.or(failure))
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

fn candidates<'a>(
    engine: &Engine,
    request: &'a AttachRequest,
    deadline: Deadline,
) -> Result<Vec<TargetRoute<'a>>> {
    let initiator = request.log_in.as_ref().map(SessionOptions::initiator);
    let mut candidates = Vec::new();
    for source in request.sources() {
        let target = match source {
            Source::Iscsi(uri) => Some(uri.target()),
            _ => None,
        };
        let routes = routes_of_initiator(engine, source, initiator)?.into_iter();
        candidates.extend(routes.map(|route| TargetRoute {
            target,
            route,
            refusal: None,
        }));
    }
    if let Some(options) = &request.log_in {
        refuse_unfit_sessions(engine, &mut candidates, options, deadline)?;
    }
    Ok(candidates)
}

/// Refuses each session that does not have the digests or the proof which a login with these
/// options requires of the target.
fn refuse_unfit_sessions(
    engine: &Engine,
    candidates: &mut [TargetRoute<'_>],
    options: &SessionOptions,
    deadline: Deadline,
) -> Result<()> {
    let secrets_deadline = deadline.at_most(SECRETS_LIMIT);
    for candidate in candidates {
        let Some((_, session)) = session_of(engine, &candidate.route) else {
            continue;
        };
        let (RouteKind::Iscsi { portal, .. }, Some(target), Ok(hctl)) = (
            &candidate.route.via,
            candidate.target,
            &candidate.route.address,
        ) else {
            continue;
        };
        let name = name_of(options, target, portal);
        if let Some(refusal) = refusal(&session, options, &name, secrets_deadline)? {
            candidate.route.address = Err(RouteUnavailable {
                reason: MissingReason::NoSession,
                text: refusal.to_string(),
                hctl: Some(*hctl),
            });
            candidate.refusal = Some(refusal);
        }
    }
    Ok(())
}

/// The routes of the source; with `initiator`, only over that initiator's sessions,
/// since an array may show its units to one initiator and not to another.
pub(in crate::engine) fn routes_of_initiator(
    engine: &Engine,
    source: &Source,
    initiator: Option<&Iqn>,
) -> Result<Vec<Route>> {
    let mut routes = routes_to(engine, std::iter::once(source))?;
    let Some(initiator) = initiator else {
        return Ok(routes);
    };
    for route in &mut routes {
        let Some((id, session)) = session_of(engine, route) else {
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

fn session_of(engine: &Engine, route: &Route) -> Option<(SessionId, IscsiSession)> {
    match route.via {
        RouteKind::Iscsi {
            session: Some(id), ..
        } => Some((id, IscsiSession::new(engine.roots(), id))),
        _ => None,
    }
}

/// Shares the lock of each session of lunbd. Returns whether the routes are still current. They
/// must be read again if a session was ended before the lock was taken, was just started, or
/// was in the way and ended by this call (an unfinished logout or, before a login, a
/// lost session without devices).
fn lock_sessions_shared(
    engine: &Engine,
    candidates: &[TargetRoute<'_>],
    request: &AttachRequest,
    sessions: &mut Sessions,
    deadline: Deadline,
) -> Result<bool> {
    let roots = engine.roots();
    sessions.shared_locks.clear();
    sessions.used.clear();
    let mut routes_are_current = true;
    for TargetRoute { route, .. } in candidates {
        let Some((_, session)) = session_of(engine, route) else {
            continue;
        };
        match &route.address {
            // A logout that ended before it removed the target.
            Ok(_) if session.connection_status()? == Some(ConnectionStatus::Ending) => {
                routes_are_current &= !end_if_down(roots, &session, deadline)?;
            }
            Ok(_) => {
                let shared = lock_session_shared(roots, &session, deadline)?;
                if shared.is_some() && request.log_in.is_some() {
                    sessions.used.push(session.clone());
                }
                sessions.shared_locks.extend(shared);
                let state = session.state()?;
                routes_are_current &= state.as_deref() == Some(IscsiSession::LOGGED_IN);
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
                routes_are_current &= !(is_down
                    && (end_if_down(roots, &session, deadline)?
                        || !session.is_there()
                        || was_down && is_logged_in()?));
            }
        }
    }
    Ok(routes_are_current)
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

#[cfg(test)]
mod tests;
