//! The iSCSI sessions that the engine made: their use, and their end when nothing uses
//! them.
//!
//! An attach shares a session's lock from before its scan until its devices are there; a
//! process that ends the session takes the lock exclusively and looks for devices under it.
//! So no session ends during a scan. Of two detaches, the one that deletes the last device
//! sees that no device is left.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::engine::lock::device_lock::DeviceLock;
use crate::error::{Error, Result, Stage};
use crate::id::{HostNo, Iqn, SessionId};
#[cfg(feature = "journal")]
use crate::id::{Portal, Source};
use crate::iscsi::{self, ConnectionStatus, IscsiSession, SessionName, lock_creation, log_out};
use crate::kernel::{Roots, pool};

fn lock_name(id: SessionId) -> String {
    format!("iscsi-session-{id}")
}

/// The prefix of the names of login locks.
pub(in crate::engine) const LOGIN: &str = "iscsi-login-";

/// The name of the lock to log in under this session name.
pub(super) fn login_lock_name(name: &SessionName) -> String {
    format!("{LOGIN}{:?}", name.isid())
}

/// Called with a login lock that was just taken. If its last holder died during a login,
/// that holder may have left a session without names, which no lookup finds. This call ends
/// such sessions first.
pub(super) fn destroy_abandoned(
    roots: &Roots,
    lock: DeviceLock,
    deadline: Deadline,
) -> Result<DeviceLock> {
    if lock.was_abandoned()
        && let Err(error) = iscsi::destroy_incomplete(roots, deadline)
    {
        // The next holder must see the abandoned login as well.
        lock.abandon();
        return Err(error);
    }
    Ok(lock)
}

/// Ends the unnamed sessions that logins of dead processes have left, no matter under which
/// name they logged in.
pub(in crate::engine) fn destroy_incomplete(
    roots: &Roots,
    deadline: Deadline,
) -> Result<Vec<SessionId>> {
    let abandoned = DeviceLock::take_abandoned(roots, LOGIN)?;
    if abandoned.is_empty() {
        return Ok(Vec::new());
    }
    let ended = iscsi::destroy_incomplete(roots, deadline);
    if ended.is_err() {
        abandoned.into_iter().for_each(DeviceLock::abandon);
    }
    ended
}

/// Does the same for a login under another name. Its own session does not depend on it, so only
/// the log reports a failure.
pub(super) fn destroy_incomplete_best_effort(roots: &Roots, deadline: Deadline) {
    let ended = iscsi::has_incomplete(roots).and_then(|has_some| {
        // Mostly there is none, and then no other login lock is tried.
        has_some
            .then(|| destroy_incomplete(roots, deadline))
            .transpose()
    });
    if let Err(error) = ended {
        tracing::warn!(%error, "lunbd could not end a session that a killed login left");
    }
}

/// Shares the lock to use a session of lunbd; returns `None` for a session of another
/// program, which lunbd never ends.
pub(in crate::engine) fn lock_session_shared(
    roots: &Roots,
    session: &IscsiSession,
    deadline: Deadline,
) -> Result<Option<DeviceLock>> {
    if !session.is_lunbd_owned()? {
        return Ok(None);
    }
    DeviceLock::share(roots, &lock_name(session.id()), deadline).map(Some)
}

/// Logs out a session of lunbd that has no devices and that no attach is about to use.
/// Returns whether it did.
pub(super) fn end_if_unused(
    roots: &Roots,
    session: &IscsiSession,
    deadline: Deadline,
) -> Result<bool> {
    end_unless(roots, session, deadline, deadline, || Ok(false))
}

/// Ends a session that the caller did not name. It waits for no lock of another process, and
/// only the log reports a failure.
pub(super) fn end_unused_best_effort(
    roots: &Roots,
    session: &IscsiSession,
    deadline: Deadline,
) -> bool {
    let at_once = Deadline::after(Duration::ZERO);
    let ended = end_unless(roots, session, at_once, deadline, || Ok(false));
    ended.unwrap_or_else(|error| {
        tracing::warn!(session = %session.id(), %error, "lunbd could not end a session");
        false
    })
}

/// Logs out an unused session that serves no I/O. A session that serves by now belongs to
/// the process that was logging in when the caller read it, and that process has no lock on
/// it yet.
pub(super) fn end_if_down(
    roots: &Roots,
    session: &IscsiSession,
    deadline: Deadline,
) -> Result<bool> {
    let serves = || Ok(session.connection_status()? == Some(ConnectionStatus::LoggedIn));
    end_unless(roots, session, deadline, deadline, serves)
}

fn end_unless(
    roots: &Roots,
    session: &IscsiSession,
    lock_deadline: Deadline,
    deadline: Deadline,
    stays: impl Fn() -> Result<bool>,
) -> Result<bool> {
    // Checks before taking the lock, so that no caller waits for a session that others use.
    let is_used = || Ok::<_, Error>(!session.devices()?.is_empty());
    if !session.is_there() || !session.is_lunbd_owned()? || is_used()? {
        return Ok(false);
    }
    let _exclusive_lock = match DeviceLock::take(roots, &lock_name(session.id()), lock_deadline) {
        // An attach keeps using the session.
        Err(error) if error.kind().is_timeout_or_cancel() => {
            tracing::info!(session = %session.id(), %error, "the session stays: another call uses it");
            return Ok(false);
        }
        lock => lock?,
    };
    wait_until_targets_are_gone(session, deadline)?;
    // A login may be about to start it.
    let is_free = || Ok::<_, Error>(session.state()?.as_deref() == Some(IscsiSession::FREE));
    let _create_guard = if is_free()? {
        let guard = lock_creation(roots, lock_deadline).map_err(|error| error.at(Stage::Logout))?;
        if !is_free()? {
            return Ok(false);
        }
        Some(guard)
    } else {
        None
    };
    if !session.is_there() || is_used()? || stays()? {
        return Ok(false);
    }
    log_out(roots, session, deadline)?;
    tracing::info!(session = %session.id(), "logged out");
    Ok(true)
}

/// How long the kernel may take from the end of a device to that of its target.
const TARGET_LIMIT: Duration = Duration::from_secs(2);

/// Waits while the kernel still removes the target of a device that another call deletes, which
/// comes after the device (`drivers/scsi/scsi_sysfs.c`, `__scsi_remove_device`). If the session
/// went first, the kernel would warn that the target's files are gone (`fs/sysfs/group.c`).
/// A target that stays longer is no error: its removal waits for a command, and the logout ends
/// that.
fn wait_until_targets_are_gone(session: &IscsiSession, deadline: Deadline) -> Result<()> {
    let limit = deadline.at_most(TARGET_LIMIT);
    let mut pauses = Backoff::for_kernel_state();
    while session.is_losing_its_target()? {
        if limit.has_passed() {
            tracing::debug!(session = %session.id(), "its target stays, without devices");
            break;
        }
        limit.pause(pauses.pause());
    }
    Ok(())
}

/// Whether one of lunbd's sessions is behind these SCSI hosts.
pub(in crate::engine) fn has_own_session(
    engine: &Engine,
    hosts: &BTreeSet<HostNo>,
) -> Result<bool> {
    for host in hosts {
        for session in IscsiSession::of_host(engine.roots(), *host)? {
            if session.is_lunbd_owned()? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// The hosts of lunbd's sessions with this target whose logout is unfinished, since its
/// process may have died before the last step.
pub(in crate::engine) fn hosts_of_unfinished_logouts(
    engine: &Engine,
    target: &Iqn,
) -> Result<BTreeSet<HostNo>> {
    let mut hosts = BTreeSet::new();
    for session in IscsiSession::all(engine.roots())? {
        let target_name = match session.name()? {
            Some(name) => Some(name.target),
            None => session.unbound_endpoints()?.map(|(_, target)| target),
        };
        let is_ending = session.connection_status()? == Some(ConnectionStatus::Ending);
        if is_ending && target_name.as_ref() == Some(target) && session.is_lunbd_owned()? {
            hosts.extend(session.host()?);
        }
    }
    Ok(hosts)
}

/// Logs out lunbd's sessions for these sources that have no devices: the process that
/// made one may have died before the first device appeared or after the last one went.
/// Also ends the sessions of logins that died before they set the names. Returns the
/// ended sessions.
///
/// # Errors
/// The first failure, at stage `logout`.
#[cfg(feature = "journal")]
pub(in crate::engine) fn end_sessions_of(
    engine: &Engine,
    sources: &[Source],
    initiator: &Iqn,
    deadline: Deadline,
) -> Result<Vec<SessionId>> {
    let roots = engine.roots();
    let mut ended = destroy_incomplete(roots, deadline).map_err(|error| error.at(Stage::Logout))?;
    for session in IscsiSession::all(roots)? {
        let leads_to = |target: &Iqn, portal: Option<&Portal>| {
            sources.iter().any(|source| match source {
                Source::Iscsi(uri) => {
                    *uri.target() == *target
                        && portal.is_none_or(|portal| uri.portals().contains(portal))
                }
                _ => false,
            })
        };
        let is_for_sources = match session.name()? {
            Some(name) => {
                name.initiator == *initiator && leads_to(&name.target, Some(&name.portal))
            }
            // The process of its logout may have died before the last step.
            None => session
                .unbound_endpoints()?
                .is_some_and(|(from, target)| from == *initiator && leads_to(&target, None)),
        };
        if is_for_sources
            && end_if_unused(roots, &session, deadline).map_err(|error| error.at(Stage::Logout))?
        {
            ended.push(session.id());
        }
    }
    Ok(ended)
}

/// lunbd's sessions that are not in `sessions` but have the same initiator and target as
/// one that is: other routes to the same units.
fn with_same_targets(engine: &Engine, sessions: &[IscsiSession]) -> Result<Vec<IscsiSession>> {
    let endpoints = |session: &IscsiSession| {
        let named = session.name()?.map(|name| (name.initiator, name.target));
        Ok::<_, Error>(named.or(session.unbound_endpoints()?))
    };
    let mut known = BTreeSet::new();
    for session in sessions {
        if session.is_lunbd_owned()? {
            known.extend(endpoints(session)?);
        }
    }
    let mut others = Vec::new();
    for session in IscsiSession::all(engine.roots())? {
        let leads_there = endpoints(&session)?.is_some_and(|names| known.contains(&names));
        if leads_there && !sessions.contains(&session) && session.is_lunbd_owned()? {
            others.push(session);
        }
    }
    Ok(others)
}

/// Logs out lunbd's unused sessions behind these SCSI hosts, all at once, and those
/// with the same targets, which an attach may have made without using them. Returns the
/// ended sessions.
///
/// # Errors
/// The first failure, at stage `logout`, after all logouts have ended.
pub(in crate::engine) fn end_unused_sessions(
    engine: &Engine,
    hosts: &BTreeSet<HostNo>,
    deadline: Deadline,
) -> Result<Vec<SessionId>> {
    let roots = engine.roots();
    let mut sessions = Vec::new();
    for host in hosts {
        sessions.extend(IscsiSession::of_host(roots, *host)?);
    }
    let others = with_same_targets(engine, &sessions).map_err(|error| error.at(Stage::Logout))?;
    sessions.extend(others.iter().cloned());
    let end = |session: &IscsiSession| {
        if others.contains(session) {
            return Ok(end_unused_best_effort(roots, session, deadline));
        }
        end_if_unused(roots, session, deadline)
    };
    let done: Vec<Result<bool>> = match sessions.as_slice() {
        [] => return Ok(Vec::new()),
        [one] => vec![end(one)],
        several => pool::each(Stage::Logout, several, end)
            .into_iter()
            .map(|ended| ended.and_then(|done| done))
            .collect(),
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::thread;

    use super::*;

    #[test]
    fn a_session_that_serves_by_now_is_left_to_the_login_that_made_it() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        // No kernel has counted this far.
        let id = u32::MAX.to_string();
        let host = roots.sysfs.join("devices/platform/host9/session");
        let session = host.join("iscsi_session").join(&id);
        let connection = host.join("iscsi_connection").join(&id);
        let classes = [("session", "", &session), ("connection", ":0", &connection)];
        for (kind, suffix, dir) in classes {
            fs::create_dir_all(dir).unwrap();
            let class = roots.sysfs.join(format!("class/iscsi_{kind}"));
            fs::create_dir_all(&class).unwrap();
            symlink(dir, class.join(format!("{kind}{id}{suffix}"))).unwrap();
        }
        let attributes = [
            ("state", "LOGGED_IN"),
            ("creator", "-1"),
            ("ifacename", "lunbd"),
            ("target_id", "0"),
        ];
        for (name, value) in attributes {
            fs::write(session.join(name), value).unwrap();
        }
        fs::write(connection.join("state"), "up").unwrap();
        fs::create_dir_all(&roots.run).unwrap();
        let session = IscsiSession::new(&roots, id.parse().unwrap());
        assert!(session.is_lunbd_owned().unwrap() && session.devices().unwrap().is_empty());
        let deadline = Deadline::after(Duration::from_secs(20));
        assert!(!end_if_down(&roots, &session, deadline).unwrap());
    }

    #[test]
    fn a_session_ends_after_the_target_of_its_last_device() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let device = roots.sysfs.join("devices/platform/host9/session7");
        let class = device.join("iscsi_session/session7");
        let target = device.join("target9:0:0");
        fs::create_dir_all(&class).unwrap();
        fs::create_dir_all(&target).unwrap();
        let links = roots.sysfs.join("class/iscsi_session");
        fs::create_dir_all(&links).unwrap();
        symlink(&class, links.join("session7")).unwrap();
        let session = IscsiSession::new(&roots, "7".parse().unwrap());
        let stays = Deadline::after(Duration::from_millis(1));
        wait_until_targets_are_gone(&session, stays).unwrap();
        assert!(session.has_targets().unwrap());
        let soon = Deadline::after(Duration::from_secs(20));
        thread::scope(|scope| {
            scope.spawn(|| {
                soon.pause(Duration::from_millis(100));
                fs::remove_dir(&target).unwrap();
            });
            wait_until_targets_are_gone(&session, soon).unwrap();
            assert!(!session.has_targets().unwrap());
        });
    }
}
