//! The end of a session, in the order in which the kernel loses nothing and
//! nobody waits.

use std::time::Duration;

use super::IscsiSession;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::iscsi::pdu::{HEADER, LogoutRequest, Response};
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::iscsi_netlink::{Control, Listener, Notification, Stop};
use crate::kernel::{Roots, worker};

/// How long a target may take to say goodbye.
pub(in crate::iscsi) const TO_LEAVE: Duration = Duration::from_secs(2);

/// Logs `session` out, and reads back that it is gone, its SCSI host included.
/// **Devices on it go with it, flushed by nobody**: that there are none, and that
/// the session may be ended, is for the caller to see to.
///
/// On a healthy path the target goes first, then its connection is closed with a
/// logout; on one that is known to be dead the connection is ended first, since
/// nobody would answer what is sent in between. Where the kernel does not know it
/// yet, the target's answer is waited for two seconds at most. A repeated call goes
/// on where one before it ended. One that is gone is no error.
///
/// After a timeout the kernel goes on with what it was told, and the rest is not
/// done: a repeated call does it.
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
            let mut ending = Ending {
                control: Control::open(&roots)?,
                // Before anything that it is to hear of.
                listener: Listener::open()?,
                session: mine,
                deadline,
            };
            ending.run()
        },
    )
}

/// Asks the target to close the session. One that does not answer by `patience` is
/// left all the same: to close the connection ends the session too.
pub(in crate::iscsi) fn say_goodbye(
    control: &mut Control,
    listener: &mut Listener,
    id: SessionId,
    patience: Deadline,
) -> Result<()> {
    // The kernel puts in its own numbers.
    let request = LogoutRequest {
        tag: 0,
        cmd_sn: 0,
        exp_stat_sn: 0,
    };
    if let Err(error) = control.send_pdu(id, &request.encode()) {
        tracing::debug!(%id, %error, "no logout could be sent");
        return Ok(());
    }
    while let Some(heard) = listener.next(patience)? {
        match heard {
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
    tracing::debug!(%id, "a logout without an answer");
    Ok(())
}

/// How the kernel names a number that it does not know (`EINVAL`,
/// `scsi_transport_iscsi.c`, `iscsi_if_recv_msg`).
pub(super) fn is_unknown(error: &Error) -> bool {
    error.kind() == ErrorKind::Refused
}

struct Ending {
    control: Control,
    listener: Listener,
    session: IscsiSession,
    deadline: Deadline,
}

impl Ending {
    fn run(&mut self) -> Result<()> {
        let id = self.session.id();
        // Its number is given to the next host at once, so it is held fast.
        let path = self.session.host_dir()?;
        let host = path.as_deref().map(DeviceDir::open).transpose()?.flatten();
        let Some(state) = self.session.state()? else {
            return self.wait_until_gone(host.as_ref());
        };
        if state == IscsiSession::LOGGED_IN {
            self.unbind()?;
            self.say_goodbye()?;
            self.stop()?;
        } else {
            self.stop()?;
            self.unbind()?;
        }
        self.in_time()?;
        if self.session.has_connection() {
            self.unless_gone(|ending| ending.control.destroy_connection(id))?;
        }
        self.unless_gone(|ending| ending.control.destroy_session(id))?;
        self.wait_until_gone(host.as_ref())
    }

    /// Takes the target away: the kernel says so once in a session's life.
    fn unbind(&mut self) -> Result<()> {
        let id = self.session.id();
        self.in_time()?;
        if !self.session.is_unbound()? {
            self.unless_gone(|ending| ending.control.unbind(id))?;
        }
        let session = self.session.clone();
        // The kernel takes the target's number first, then the devices
        // (`__iscsi_unbind_session`).
        self.wait_for("its target to be taken away", |heard| {
            let is_said = *heard == Some(Notification::Unbound(id));
            Ok(is_said || session.is_unbound()? && session.devices()?.is_empty())
        })
    }

    fn say_goodbye(&mut self) -> Result<()> {
        self.in_time()?;
        let patience = self.deadline.at_most(TO_LEAVE);
        let id = self.session.id();
        say_goodbye(&mut self.control, &mut self.listener, id, patience)
    }

    fn stop(&mut self) -> Result<()> {
        let id = self.session.id();
        self.in_time()?;
        if self.session.has_connection() {
            self.unless_gone(|ending| ending.control.stop(id, Stop::Terminate))?;
        }
        Ok(())
    }

    /// Until sysfs shows neither it nor its host any more: the host goes last
    /// (`iscsi_sw_tcp_session_destroy`).
    fn wait_until_gone(&mut self, host: Option<&DeviceDir<'_>>) -> Result<()> {
        let session = self.session.clone();
        self.wait_for("it to be gone", |_| {
            let host = host.map(|host| host.text("uevent")).transpose()?;
            Ok(!session.is_there() && host.flatten().is_none())
        })
    }

    /// The kernel's word wakes us; sysfs says how it is, also where a word was
    /// lost.
    fn wait_for(
        &mut self,
        what: &str,
        is_done: impl Fn(&Option<Notification>) -> Result<bool>,
    ) -> Result<()> {
        let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));
        let mut heard = None;
        while !is_done(&heard)? {
            if self.deadline.has_passed() {
                let what = format!("session {}: {what}", self.session.id());
                let error = Error::timed_out(Stage::Logout, self.deadline, &what);
                return Err(error.with_last_seen(self.session.describe()));
            }
            heard = self.listener.next(self.deadline.at_most(pauses.pause()))?;
        }
        Ok(())
    }

    /// Another may be ending it too, or have begun to and died. The kernel does not
    /// know its number any more then, while sysfs shows it until it is gone: that
    /// is waited for in the end.
    fn unless_gone(&mut self, step: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        match step(self) {
            Err(error) if is_unknown(&error) => {
                tracing::debug!(session = %self.session.id(), %error, "another process ends it");
                Ok(())
            }
            done => done,
        }
    }

    /// Nothing more is begun for a caller that has gone.
    fn in_time(&self) -> Result<()> {
        if !self.deadline.has_passed() {
            return Ok(());
        }
        let what = format!("session {} to be logged out", self.session.id());
        let error = Error::timed_out(Stage::Logout, self.deadline, &what);
        Err(error.with_last_seen(self.session.describe()))
    }
}
