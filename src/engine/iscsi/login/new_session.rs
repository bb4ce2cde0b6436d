//! One login, whose session ends with its attach unless the attach keeps it.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use crate::deadline::Deadline;
use crate::engine::iscsi::sessions::{
    destroy_abandoned, destroy_incomplete_best_effort, end_if_unused, login_lock_name,
};
use crate::engine::lock::device_lock::DeviceLock;
use crate::error::Result;
use crate::iscsi::{self, ConnectionStatus, IscsiSession, SessionName, SessionOptions};
use crate::kernel::Roots;

/// A session that was just made; its attach may have ended by now.
#[derive(Debug)]
pub(super) struct NewSession {
    roots: Roots,
    pub(super) session: IscsiSession,
    is_kept: bool,
}

impl NewSession {
    pub(super) fn keep(mut self) -> IscsiSession {
        self.is_kept = true;
        self.session.clone()
    }
}

impl Drop for NewSession {
    /// Ends the session: no attach waits for it any more.
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let (roots, session) = (self.roots.clone(), self.session.clone());
        let end = move |limit| {
            if let Err(error) = end_if_unused(&roots, &session, Deadline::after(limit)) {
                tracing::warn!(session = %session.id(), %error, "lunbd could not end a session");
            }
        };
        spawn_or_run(thread::Builder::new().name("lunbd-logout".to_owned()), end);
    }
}

/// Runs `end` on a detached thread and passes it its time limit; on the calling thread,
/// with a short limit, where no thread can be started.
fn spawn_or_run(thread: thread::Builder, end: impl FnOnce(Duration) + Send + 'static) {
    const SPAWNED_LIMIT: Duration = Duration::from_secs(30);
    const CALLERS_LIMIT: Duration = Duration::from_secs(3);
    let end = Arc::new(Mutex::new(Some(end)));
    let take = |end: &Mutex<Option<_>>| end.lock().take();
    let theirs = Arc::clone(&end);
    let run = move || {
        if let Some(end) = take(&theirs) {
            end(SPAWNED_LIMIT);
        }
    };
    if let Err(error) = thread.spawn(run) {
        tracing::warn!(%error, "a thread cannot be started: the caller waits");
        if let Some(end) = take(&end) {
            end(CALLERS_LIMIT);
        }
    }
}

/// Makes one session; returns `None` where another process has made it meanwhile, also if it
/// has lost its connection since.
pub(super) fn log_in(
    roots: &Roots,
    name: &SessionName,
    options: &SessionOptions,
    deadline: Deadline,
) -> Result<Option<NewSession>> {
    let lock = DeviceLock::take(roots, &login_lock_name(name), deadline)?;
    let lock = destroy_abandoned(roots, lock, deadline)?;
    destroy_incomplete_best_effort(roots, deadline.half());
    if exists(roots, name)? {
        return Ok(None);
    }
    let connection = iscsi::connect(name, options, deadline)?;
    let created = match iscsi::hand_over(roots, name, connection, options, deadline) {
        // The kernel still works on it, maybe with no process left to see it end.
        Err(error) if error.kind().is_timeout_or_cancel() => {
            lock.abandon();
            return Err(error);
        }
        created => created?,
    };
    Ok(Some(NewSession {
        roots: roots.clone(),
        session: IscsiSession::new(roots, created.id),
        is_kept: false,
    }))
}

/// Whether there is a session of this name, no matter which program made it. A lost one counts
/// too: a second session of lunbd would have the same ISID, and at each login of one of them the
/// target would end the other (RFC 7143, 6.3.5). One that is being ended does not count.
fn exists(roots: &Roots, name: &SessionName) -> Result<bool> {
    for session in IscsiSession::all(roots)? {
        if session.name()?.as_ref() == Some(name) {
            let status = session.connection_status()?;
            if status.is_some_and(|status| status != ConnectionStatus::Ending) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::error::ErrorKind;
    use crate::iscsi::FakeSession;

    #[test]
    fn a_lost_session_is_not_made_a_second_time_and_one_that_is_being_ended_is() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let name = SessionName {
            initiator: "iqn.2026-01.example:host".parse().unwrap(),
            target: "iqn.2026-01.example:array".parse().unwrap(),
            // No server listens there.
            portal: "127.0.0.1:1".parse().unwrap(),
        };
        let options = SessionOptions::new(name.initiator.clone());
        let deadline = Deadline::after(Duration::from_secs(60));
        let log_in = || log_in(&roots, &name, &options, deadline);
        let session = FakeSession::add(&roots, 3, &name);
        assert!(log_in().unwrap().is_none());
        session.lose();
        assert!(log_in().unwrap().is_none());
        session.set("state", IscsiSession::FREE);
        assert!(log_in().unwrap().is_none());
        session.set_connection("state", "down");
        assert_eq!(log_in().unwrap_err().kind(), ErrorKind::Unreachable);
    }

    #[test]
    fn a_session_made_for_nothing_is_ended_also_where_no_thread_can_be_started() {
        // No machine can map a stack of this size.
        let too_large = thread::Builder::new().stack_size(1 << 60);
        for thread in [thread::Builder::new(), too_large] {
            let (ended, end) = mpsc::channel();
            spawn_or_run(thread, move |limit| ended.send(limit).unwrap());
            assert!(end.recv_timeout(Duration::from_secs(60)).unwrap() > Duration::ZERO);
        }
    }
}
