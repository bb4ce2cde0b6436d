//! Sessions whose maker was killed before it had started them.

use std::time::Duration;

use super::IscsiSession;
use super::logout::is_unknown;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result, Stage};
use crate::id::SessionId;
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::iscsi_netlink::{Control, NoMaker, Stop};
use crate::kernel::{Roots, worker};

/// Nobody on this machine makes a session as long as this is there, in whatever
/// container: see [`lock_creation`].
#[derive(Debug)]
pub struct CreateGuard {
    _nobody: NoMaker,
}

/// Waits until nobody is between making a session and starting it, and keeps it so
/// until what is returned is dropped: a session of ours that is `FREE` then, and has
/// never been started, is nobody's work any more.
///
/// Root, and the initial network namespace.
///
/// # Errors
/// `InUse` where another was at it all the time, until `deadline`.
pub fn lock_creation(roots: &Roots, deadline: Deadline) -> Result<CreateGuard> {
    let nobody = NoMaker::wait(roots, deadline)?;
    Ok(CreateGuard { _nobody: nobody })
}

/// Ends the sessions that were made here and never had all of their names, and says
/// which: their makers were killed at it. Such a session carries no device, and a
/// connection at most that nobody uses.
///
/// Nothing says which process has made one, so this is for a caller that knows that
/// one of ours died in the middle of a login. That it is not one that is being made
/// right now is proven here: who makes sessions holds the machine's one right to do
/// so from before the first step until after the last, and this holds it meanwhile.
/// iscsid's are out of question: their creator is its number, which is positive.
///
/// Linux 5.10 and `iscsi_tcp`, root, the initial network namespace. After a timeout
/// the kernel finishes what it is at, and a repeated call does the rest.
///
/// # Errors
/// `InUse` where another was making sessions all the time; `NotPermitted`;
/// `TimedOut` at stage `session`.
pub fn destroy_incomplete(roots: &Roots, deadline: Deadline) -> Result<Vec<SessionId>> {
    // Mostly there is none, and nobody is held up.
    if unnamed(roots)?.is_empty() {
        return Ok(Vec::new());
    }
    let nobody = NoMaker::wait(roots, deadline).map_err(|error| error.at(Stage::Session))?;
    let roots = roots.clone();
    worker::run(
        Stage::Session,
        "incomplete sessions to be destroyed",
        deadline,
        || "not returned".to_owned(),
        move || {
            let mut control = Control::open(&roots)?;
            let mut ended = Vec::new();
            for session in unnamed(&roots)? {
                let taken = take_away(&mut control, &session, deadline);
                // Its logout was under way.
                if matches!(taken, Ok(false)) || (taken.is_err() && !session.is_there()) {
                    continue;
                }
                taken?;
                tracing::info!(session = %session.id(), "destroyed: the process that created it was killed");
                ended.push(session.id());
            }
            drop(nobody);
            Ok(ended)
        },
    )
}

fn unnamed(roots: &Roots) -> Result<Vec<IscsiSession>> {
    let mut found = Vec::new();
    for session in IscsiSession::all(roots)? {
        if session.is_unnamed(roots)? {
            found.push(session);
        }
    }
    Ok(found)
}

/// Takes away what there is of a session that has no devices, and waits until it is
/// gone with its host, which the kernel does by itself after its answer
/// (`ISCSI_UEVENT_DESTROY_SESSION_ASYNC`). `false` where somebody else had told the
/// kernel to. **Blocks.**
pub(super) fn take_away(
    control: &mut Control,
    standing: &IscsiSession,
    deadline: Deadline,
) -> Result<bool> {
    let id = standing.id();
    let path = standing.host_dir()?;
    let host = path.as_deref().map(DeviceDir::open).transpose()?.flatten();
    // A connection that was never bound is not stopped, and one that was never made
    // is not destroyed: the last step says whether all is well.
    let stopped = control.stop(id, Stop::Terminate);
    let connection = control.destroy_connection(id);
    tracing::debug!(%id, ?stopped, ?connection, "a session is taken away");
    let told = match control.destroy_session(id) {
        // The kernel does not find it by its number any more, and sysfs shows it
        // until it is gone.
        Err(error) if is_unknown(&error) => false,
        done => done.map(|()| true)?,
    };
    let host_is_there = || {
        let read = host.as_ref().map(|host| host.text("uevent"));
        matches!(read, Some(Ok(Some(_))))
    };
    let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));
    while standing.is_there() || host_is_there() {
        if deadline.has_passed() {
            let what = format!("session {id} to be gone");
            let error = Error::timed_out(Stage::Session, deadline, &what);
            return Err(error.with_last_seen(standing.describe()));
        }
        deadline.pause(pauses.pause());
    }
    Ok(told)
}
