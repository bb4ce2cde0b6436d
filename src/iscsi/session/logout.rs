//! Ends a session, in an order that loses nothing in the kernel and leaves no process
//! waiting.

use std::time::Duration;

use super::IscsiSession;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::iscsi::pdu::{HEADER, LogoutRequest, Response};
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::iscsi_netlink::{Control, Listener, Notification, Stop};
use crate::kernel::{Roots, worker};

/// How long to wait for the target's answer to the logout.
pub(in crate::iscsi) const LOGOUT_TIMEOUT: Duration = Duration::from_secs(2);

/// Logs `session` out, and checks that it is gone with its SCSI host. **The session's
/// devices go with it, and nothing flushes them.** The caller must make sure that there are
/// none and that the session may end.
///
/// On a healthy path this removes the target first, then closes the connection with a
/// logout. On a path that is known to be dead it ends the connection first, because nothing
/// would answer what the kernel sends in between. If the kernel does not know yet that the
/// path is dead, this waits at most two seconds for the target's answer. If another call still
/// deletes a device, this waits at most two seconds for that, ends the connection without a
/// logout, and waits until that call has removed the target. A repeated call continues where the
/// call before it ended. A session that is gone already is no error.
///
/// After a timeout the kernel finishes the steps that it was given, and the remaining steps
/// do not happen until a repeated call.
///
/// # Errors
/// `NotPermitted`; `TimedOut` at stage `logout`.
pub fn log_out(roots: &Roots, session: &IscsiSession, deadline: Deadline) -> Result<()> {
    if !session.is_there() {
        return Ok(());
    }
    let what = format!("session {} to be logged out", session.id());
    let (roots, mine) = (roots.clone(), session.clone());
    worker::run(
        Stage::Logout,
        &what,
        deadline,
        || session.describe(),
        move || {
            let mut logout = SessionLogout {
                control: Control::open(&roots)?,
                // The listener opens before any step that it must report.
                listener: Listener::open()?,
                session: mine,
                deadline,
            };
            logout.run()
        },
    )
}

/// Asks the target to close the session. If the target does not answer by
/// `logout_deadline`, this returns anyway: closing the connection ends the session too.
pub(in crate::iscsi) fn request_logout(
    control: &mut Control,
    listener: &mut Listener,
    id: SessionId,
    logout_deadline: Deadline,
) -> Result<()> {
    // The kernel fills in its own numbers.
    let request = LogoutRequest {
        tag: 0,
        cmd_sn: 0,
        exp_stat_sn: 0,
    };
    if let Err(error) = control.send_pdu(id, &request.encode()) {
        tracing::debug!(%id, %error, "the kernel could not send the logout");
        return Ok(());
    }
    while let Some(notification) = listener.next(logout_deadline)? {
        match notification {
            Notification::Pdu { session, pdu } if session == id => {
                let header = pdu.first_chunk::<HEADER>();
                let response = header.map(Response::decode);
                tracing::debug!(%id, ?response, "the target closes the connection");
                if matches!(response, Some(Ok(Response::Logout(_)))) {
                    return Ok(());
                }
            }
            Notification::ConnectionLost { session, .. } if session == id => return Ok(()),
            _ => {}
        }
    }
    tracing::debug!(%id, "the target did not answer the logout");
    Ok(())
}

/// Whether the kernel does not know the session's number (`EINVAL`,
/// `scsi_transport_iscsi.c`, `iscsi_if_recv_msg`).
pub(super) fn is_unknown(error: &Error) -> bool {
    error.kind() == ErrorKind::Refused
}

struct SessionLogout {
    control: Control,
    listener: Listener,
    session: IscsiSession,
    deadline: Deadline,
}

impl SessionLogout {
    fn run(&mut self) -> Result<()> {
        let id = self.session.id();
        // The kernel gives the host's number to the next host at once, so the directory
        // stays open.
        let path = self.session.host_dir()?;
        let host = path.as_deref().map(DeviceDir::open).transpose()?.flatten();
        let Some(state) = self.session.state()? else {
            return self.wait_until_gone(host.as_ref());
        };
        // Another call's delete may wait for a command that the target does not answer, and the
        // end of the connection ends that command. Two removals of one target at once, or that of
        // its session meanwhile, are too much for the kernel (`scsi_remove_target`,
        // `scsi_target_reap`).
        if state == IscsiSession::LOGGED_IN && !self.session.is_losing_its_target()? {
            self.unbind()?;
            if self.has_lost_its_target_by(self.deadline.at_most(LOGOUT_TIMEOUT))? {
                self.request_logout()?;
            }
            self.stop()?;
        } else {
            self.stop()?;
            let session = self.session.clone();
            self.wait_for("the removal of its target to end", |_| {
                Ok(!session.is_losing_its_target()?)
            })?;
            self.unbind()?;
        }
        let session = self.session.clone();
        self.wait_for("its target to be gone", |_| Ok(!session.has_targets()?))?;
        self.check_deadline()?;
        if self.session.has_connection() {
            self.unless_gone(|ending| ending.control.destroy_connection(id))?;
        }
        self.unless_gone(|ending| ending.control.destroy_session(id))?;
        self.wait_until_gone(host.as_ref())
    }

    /// Removes the target. The kernel reports that only once in a session's life.
    fn unbind(&mut self) -> Result<()> {
        let id = self.session.id();
        self.check_deadline()?;
        if !self.session.is_unbound()? {
            self.unless_gone(|ending| ending.control.unbind(id))?;
        }
        let session = self.session.clone();
        // The kernel clears the target's number first and removes the devices after it
        // (`__iscsi_unbind_session`).
        self.wait_for("its target to be removed", |notification| {
            let is_reported = *notification == Some(Notification::Unbound(id));
            Ok(is_reported || session.is_unbound()? && session.devices()?.is_empty())
        })
    }

    /// Another call that deletes a device may still hold the target.
    fn has_lost_its_target_by(&self, limit: Deadline) -> Result<bool> {
        let mut pauses = Backoff::for_kernel_state();
        while self.session.has_targets()? {
            if limit.has_passed() {
                return Ok(false);
            }
            limit.pause(pauses.pause());
        }
        Ok(true)
    }

    fn request_logout(&mut self) -> Result<()> {
        self.check_deadline()?;
        let logout_deadline = self.deadline.at_most(LOGOUT_TIMEOUT);
        let id = self.session.id();
        request_logout(&mut self.control, &mut self.listener, id, logout_deadline)
    }

    fn stop(&mut self) -> Result<()> {
        let id = self.session.id();
        self.check_deadline()?;
        if self.session.has_connection() {
            self.unless_gone(|ending| ending.control.stop(id, Stop::Terminate))?;
        }
        Ok(())
    }

    /// Waits until sysfs shows neither the session nor its host. The host goes last
    /// (`iscsi_sw_tcp_session_destroy`).
    fn wait_until_gone(&mut self, host: Option<&DeviceDir<'_>>) -> Result<()> {
        let session = self.session.clone();
        self.wait_for("it to be gone", |_| {
            let host = host.map(|host| host.text("uevent")).transpose()?;
            Ok(!session.is_there() && host.flatten().is_none())
        })
    }

    /// A notification of the kernel ends each wait early; sysfs gives the state, also if a
    /// notification was lost.
    fn wait_for(
        &mut self,
        what: &str,
        is_done: impl Fn(&Option<Notification>) -> Result<bool>,
    ) -> Result<()> {
        let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));
        let mut notification = None;
        while !is_done(&notification)? {
            if self.deadline.has_passed() {
                let what = format!("session {}: {what}", self.session.id());
                let error = Error::timed_out(Stage::Logout, self.deadline, &what);
                return Err(error.with_last_seen(self.session.describe()));
            }
            notification = self.listener.next(self.deadline.at_most(pauses.pause()))?;
        }
        Ok(())
    }

    /// Runs a step that may find the session gone, because another process ends it or has
    /// died at that. The kernel then does not know its number any more, while sysfs still
    /// shows it. The last wait covers that.
    fn unless_gone(&mut self, step: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        match step(self) {
            Err(error) if is_unknown(&error) => {
                tracing::debug!(session = %self.session.id(), %error, "another process ends it");
                Ok(())
            }
            done => done,
        }
    }

    /// Fails after the deadline, so that no step begins for a caller that has gone.
    fn check_deadline(&self) -> Result<()> {
        if !self.deadline.has_passed() {
            return Ok(());
        }
        let what = format!("session {} to be logged out", self.session.id());
        let error = Error::timed_out(Stage::Logout, self.deadline, &what);
        Err(error.with_last_seen(self.session.describe()))
    }
}
