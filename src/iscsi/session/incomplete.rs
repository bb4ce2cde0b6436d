//! Sessions whose creating process was killed before it had started them.

use std::time::Duration;

use super::IscsiSession;
use super::logout::is_unknown;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result, Stage};
use crate::id::SessionId;
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::iscsi_netlink::{Control, CreateGuard, Stop};
use crate::kernel::{Roots, worker};

/// Waits until no process is between making a session and starting it, and keeps it so until
/// the guard is dropped. No process still works on a session of ours that is `FREE` then and
/// has never been started.
///
/// It needs root in the initial network namespace.
///
/// # Errors
/// `InUse` if another process made sessions all the time until `deadline`.
pub fn lock_creation(roots: &Roots, deadline: Deadline) -> Result<CreateGuard> {
    CreateGuard::wait(roots, deadline)
}

/// Destroys the sessions that lunbd made and that never got all of their names, and returns
/// them: the processes that made them were killed. Such a session carries no device, and at
/// most a connection that no process uses.
///
/// Nothing shows which process has made a session, so this is for a caller that knows that a
/// process of lunbd died in the middle of a login. It proves that no process is making the
/// session right now: a process holds the machine's one right to make sessions from before
/// the first step until after the last, and this call holds it meanwhile. It never takes a
/// session of iscsid: its creator is the daemon's process number, which is positive.
///
/// It needs Linux 5.10 with `iscsi_tcp`, and root in the initial network namespace. After a
/// timeout the kernel finishes what it has begun, and a repeated call does the rest.
///
/// # Errors
/// `InUse` if another process made sessions all the time; `NotPermitted`; `TimedOut` at
/// stage `session`.
pub fn destroy_incomplete(roots: &Roots, deadline: Deadline) -> Result<Vec<SessionId>> {
    // Mostly there is none, and then no login has to wait.
    if !has_incomplete(roots)? {
        return Ok(Vec::new());
    }
    let guard = CreateGuard::wait(roots, deadline).map_err(|error| error.at(Stage::Session))?;
    let roots = roots.clone();
    worker::run(
        Stage::Session,
        "incomplete sessions to be destroyed",
        deadline,
        || "not returned".to_owned(),
        move || {
            let mut control = Control::open(&roots)?;
            let mut ended = Vec::new();
            let sessions = incomplete_sessions(&roots)?;
            // The kernel shows a session of iscsid before it stores its creator
            // (`iscsi_if_create_session`), and until then it looks like one of ours.
            control.wait_for_earlier_requests()?;
            for session in sessions {
                if !session.is_incomplete(&roots)? {
                    continue;
                }
                let destroyed = destroy_and_wait(&mut control, &session, deadline);
                // Another process was logging it out.
                if matches!(destroyed, Ok(false)) || (destroyed.is_err() && !session.is_there()) {
                    continue;
                }
                destroyed?;
                tracing::info!(session = %session.id(), "destroyed: the process that created it was killed");
                ended.push(session.id());
            }
            drop(guard);
            Ok(ended)
        },
    )
}

/// Whether there are sessions that [`destroy_incomplete`] may destroy: a process is making them, or
/// was killed while it did.
pub(crate) fn has_incomplete(roots: &Roots) -> Result<bool> {
    Ok(!incomplete_sessions(roots)?.is_empty())
}

fn incomplete_sessions(roots: &Roots) -> Result<Vec<IscsiSession>> {
    let mut found = Vec::new();
    for session in IscsiSession::all(roots)? {
        if session.is_incomplete(roots)? {
            found.push(session);
        }
    }
    Ok(found)
}

/// Destroys what there is of a session without devices, and waits until it is gone with its
/// host, which the kernel removes by itself after its answer
/// (`ISCSI_UEVENT_DESTROY_SESSION_ASYNC`). `false` if another process had requested its
/// destruction. **Blocks.**
pub(super) fn destroy_and_wait(
    control: &mut Control,
    session: &IscsiSession,
    deadline: Deadline,
) -> Result<bool> {
    let id = session.id();
    let path = session.host_dir()?;
    let host = path.as_deref().map(DeviceDir::open).transpose()?.flatten();
    // The kernel refuses to stop a connection that was never bound, and to destroy one that
    // was never made: only the result of the last step counts.
    let stopped = control.stop(id, Stop::Terminate);
    let connection = control.destroy_connection(id);
    tracing::debug!(%id, ?stopped, ?connection, "destroys a session without devices");
    let is_ours = match control.destroy_session(id) {
        // The kernel no longer finds it by its number, but sysfs shows it until it is gone.
        Err(error) if is_unknown(&error) => false,
        done => done.map(|()| true)?,
    };
    let host_is_there = || {
        let read = host.as_ref().map(|host| host.text("uevent"));
        matches!(read, Some(Ok(Some(_))))
    };
    let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));
    while session.is_there() || host_is_there() {
        if deadline.has_passed() {
            let what = format!("session {id} to be gone");
            let error = Error::timed_out(Stage::Session, deadline, &what);
            return Err(error.with_last_seen(session.describe()));
        }
        deadline.pause(pauses.pause());
    }
    Ok(is_ours)
}
