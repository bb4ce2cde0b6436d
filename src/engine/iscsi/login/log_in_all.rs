//! The logins of one attach, all at once.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::{AttachRequest, Multipath};
use crate::engine::iscsi::login::new_session::{NewSession, log_in};
use crate::engine::iscsi::login::sessions::Sessions;
use crate::error::{Error, Result, Stage};
use crate::id::Source;
use crate::iscsi::{SessionName, SessionOptions};
use crate::kernel::threads;
use crate::multipath::Daemon;

/// How long I/O waits for a lost session with other paths, and without:
/// `node.session.timeo.replacement_timeout` as open-iscsi's README has it for multipath,
/// and its default.
const RECOVERY_WITH_PATHS: Duration = Duration::from_secs(5);
const RECOVERY_ALONE: Duration = Duration::from_secs(120);
/// The least time that the remaining portals get once enough of them have logged in.
const REMAINING_PORTALS_LIMIT: Duration = Duration::from_secs(2);

/// The result of one login; `None` where another process has made the session meanwhile.
type LoginResult = (SessionName, Result<Option<NewSession>>);

/// Logs in through all portals at once. Waits for `enough` of them, and the same time
/// again for the others.
pub(super) fn log_in_all(
    engine: &Engine,
    names: Vec<SessionName>,
    options: &SessionOptions,
    request: &AttachRequest,
    enough: usize,
    sessions: &mut Sessions,
    deadline: Deadline,
) {
    let portals: usize = request.sources().map(portals_of).sum();
    let has_other_paths = match request.multipath {
        Multipath::Require => true,
        // Without multipathd there is no map, and I/O has no other path.
        Multipath::Prefer => portals > 1 && matches!(Daemon::find(engine.roots()), Ok(Some(_))),
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
        let started = spawn_login(engine, name.clone(), &options, limit, sender.clone());
        waited_for.insert(name, started.err());
    }
    drop(sender);
    let new_sessions = receive_sessions(&results, &mut waited_for, enough, limit);
    sessions.new.extend(new_sessions);
    for (name, error) in waited_for {
        let slow = || Error::timed_out(Stage::Login, limit, &format!("a login {name}"));
        let error = error.unwrap_or_else(slow);
        tracing::debug!(%name, %error, "the login made no session");
        sessions.failures.insert(name, error);
    }
}

/// Logs in on a detached thread, which ends a session that comes too late.
fn spawn_login(
    engine: &Engine,
    name: SessionName,
    options: &SessionOptions,
    deadline: Deadline,
    results: Sender<LoginResult>,
) -> Result<()> {
    let (roots, options) = (engine.roots().clone(), options.clone());
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

/// Waits for `enough` of the logins, and the same time again for the others. What is left in
/// `waited_for` has no session: it failed with an error, or is still under way.
fn receive_sessions(
    results: &Receiver<LoginResult>,
    waited_for: &mut BTreeMap<SessionName, Option<Error>>,
    mut enough: usize,
    limit: Deadline,
) -> Vec<NewSession> {
    let mut sessions = Vec::new();
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
            Ok((name, Ok(session))) => {
                waited_for.remove(&name);
                sessions.extend(session);
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
    sessions
}

fn portals_of(source: &Source) -> usize {
    match source {
        Source::Iscsi(uri) => uri.portals().len(),
        _ => 1,
    }
}
