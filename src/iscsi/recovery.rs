//! Reconnects a session of lunbd after its connection is lost, so that waiting I/O
//! continues without an error.
//!
//! The kernel itself blocks the session's devices and keeps the outstanding commands. A
//! login with the session's own ISID makes the target end what it still has of the session
//! (RFC 7143, 6.3.5). The first command after it must have the `CmdSN` at which the kernel
//! continues, and the kernel shows that number nowhere. With another number the login
//! succeeds and I/O hangs. So the kernel first sends a login request, which it numbers,
//! over a loopback connection of this machine. Then the true login runs on our own socket:
//! [`connect_again`] and [`stop_connection`], then [`rebind_connection`].

mod watch;

use std::os::fd::AsFd as _;

pub use watch::{SessionNotice, SessionWaker, SessionWatch};

use super::Proven;
use super::login::{CID, Connection, TAG, log_in_from};
use super::pdu::{HEADER, Isid, LoginRequest, LoginStage};
use super::session::logout::{LOGOUT_TIMEOUT, request_logout};
use super::session::settings::Settings;
use super::session::{IscsiSession, SessionName, SessionOptions, login_options};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::SessionId;
use crate::kernel::iscsi_netlink::{Control, Listener, Stop};
use crate::kernel::peer::Peer;
use crate::kernel::stream::DeadlineStream;
use crate::kernel::{Roots, tcp, worker};

/// Logs in again as `name`, on our own socket. As soon as the target accepts a connection,
/// it calls `number` for the `CmdSN` of the session's next command, which [`stop_connection`]
/// returns. So nothing happens to the session while the target is unreachable.
///
/// # Errors
/// As for [`log_in`](super::log_in), and those of `number`.
pub fn connect_again(
    name: &SessionName,
    options: &SessionOptions,
    number: impl FnOnce() -> Result<u32>,
    deadline: Deadline,
) -> Result<Connection> {
    let login = login_options(name, options, deadline)?;
    let connection = log_in_from(&name.portal, &login, number, deadline)?;
    Ok(options.cap(connection))
}

/// Makes the kernel release the lost connection of `session`, which lunbd must have made,
/// and returns the `CmdSN` of its next command. The number is valid until
/// [`rebind_connection`]. Waiting I/O keeps waiting; the session's recovery timeout keeps
/// running.
///
/// It needs Linux 5.10, `iscsi_tcp`, root, the initial network namespace, and a loopback
/// interface that is up. A repeated call repeats it. After a timeout the kernel finishes
/// its current step, and the remaining steps do not happen.
///
/// # Errors
/// `Unreachable` without a loopback interface; `NotPermitted`; `Protocol`;
/// `TimedOut` at stage `session`.
pub fn stop_connection(roots: &Roots, session: &IscsiSession, deadline: Deadline) -> Result<u32> {
    let id = session.id();
    let step = Step::new(session, deadline, "stopped");
    step.run(roots, move |control, step| {
        // This stop also acknowledges a loss that the kernel has handled itself. Without it
        // the kernel refuses a bind (`ISCSI_CLS_CONN_BIT_CLEANUP`).
        control.stop(id, Stop::Recover)?;
        step.check_deadline()?;
        let (near, far) = tcp::pair(deadline)?;
        control.bind(id, near.as_fd())?;
        let talk = DeadlineStream::new(far.as_fd(), deadline);
        let number = cmd_sn_of_login(control, id, talk, deadline);
        // Both ends are still open here, so the kernel sees no further loss.
        let stopped = control.stop(id, Stop::Recover);
        let number = number?;
        stopped?;
        tracing::debug!(session = %id, number, "stopped the connection");
        Ok(number)
    })
}

fn cmd_sn_of_login(
    control: &mut Control,
    session: SessionId,
    talk: DeadlineStream<'_>,
    deadline: Deadline,
) -> Result<u32> {
    const KERNEL: &str = "the kernel's iSCSI";
    // The request is immediate, so it uses up no CmdSN.
    let request = LoginRequest {
        stage: LoginStage::Security,
        transit: None,
        isid: Isid([0; 6]),
        tsih: 0,
        tag: TAG,
        cid: CID,
        cmd_sn: 0,
        exp_stat_sn: 0,
        text: b"",
    };
    let request = request.encode();
    control.send_pdu(session, &request)?;
    let mut header = [0; HEADER];
    let mut peer = Peer::new(talk, KERNEL, Stage::Session, deadline);
    peer.fill("a login request", &mut header)?;
    cmd_sn_in(&header).ok_or_else(|| {
        let found = format!("{:#04x}", header[0]);
        Error::protocol_violation(KERNEL, "opcode", found, "that of the login request")
    })
}

/// The `CmdSN` of a login request.
fn cmd_sn_in(header: &[u8; HEADER]) -> Option<u32> {
    let is_login = header[0] & 0x3f == 0x03;
    let word = header.get(24..28)?.first_chunk().copied()?;
    is_login.then_some(u32::from_be_bytes(word))
}

/// Binds the connection that has logged in again to `session`, which is stopped, with all
/// negotiated parameters, and checks that the session is logged in. The kernel then sends
/// the waiting I/O. The session keeps its recovery timeout.
///
/// A failure in the middle leaves the connection lost, and the caller can try again. After
/// a timeout the state is as for [`stop_connection`].
///
/// Waiting I/O goes to the peer of the new connection. So a session whose target has
/// [proven](IscsiSession::proven) itself is resumed only if the target did so again.
///
/// # Errors
/// `NotPermitted` if the target did not prove itself again, or without the privilege;
/// `NotReady` if the connection was lost again meanwhile; `TimedOut` at stage `session`.
pub fn rebind_connection(
    roots: &Roots,
    session: &IscsiSession,
    name: &SessionName,
    connection: Connection,
    deadline: Deadline,
) -> Result<()> {
    let is_proven = connection.session.proven == Proven::Both;
    if session.proven()? == Proven::Both && !is_proven {
        return Err(unproven(session, Proven::Both));
    }
    let settings = Settings::of(name, &connection, None);
    let id = session.id();
    let step = Step::new(session, deadline, "started again");
    step.run(roots, move |control, step| {
        control.bind(id, connection.stream.as_fd())?;
        let started = settings
            .set(control, id)
            .and_then(|()| step.check_deadline())
            .and_then(|()| control.start(id))
            .and_then(|()| step.require_logged_in());
        if let Err(error) = started {
            let stopped = control.stop(id, Stop::Recover);
            tracing::debug!(session = %id, %error, ?stopped, "not started again");
            return Err(error);
        }
        Ok(())
    })
}

/// The error that refuses to log `session` in again with less proof than it `had`.
pub(crate) fn unproven(session: &IscsiSession, had: Proven) -> Error {
    let (id, chap) = (
        session.id(),
        if had == Proven::Both {
            "mutual CHAP"
        } else {
            "CHAP"
        },
    );
    let message = format!(
        "session {id} was created with {chap} and is left unchanged: give credentials for \
         {chap} to the process that recovers sessions"
    );
    Error::new(ErrorKind::NotPermitted, message).at(Stage::Login)
}

/// Logs out of the target of `session` at its request, for a login that follows: sends the
/// logout, and makes the kernel release the connection. The kernel then blocks the devices
/// as after a loss. If the target does not answer within two seconds, the logout goes on
/// without an answer.
///
/// # Errors
/// `NotPermitted`; `TimedOut` at stage `session`.
pub fn logout_for_relogin(roots: &Roots, session: &IscsiSession, deadline: Deadline) -> Result<()> {
    let id = session.id();
    let step = Step::new(session, deadline, "logged out for a new login");
    step.run(roots, move |control, step| {
        let mut listener = Listener::open()?;
        let logout_deadline = deadline.at_most(LOGOUT_TIMEOUT);
        request_logout(control, &mut listener, id, logout_deadline)?;
        step.check_deadline()?;
        control.stop(id, Stop::Recover)
    })
}

/// A step on a session, which runs on a worker.
struct Step {
    session: IscsiSession,
    deadline: Deadline,
    what: String,
}

impl Step {
    fn new(session: &IscsiSession, deadline: Deadline, done: &str) -> Self {
        Self {
            session: session.clone(),
            deadline,
            what: format!("session {} to be {done}", session.id()),
        }
    }

    fn run<T: Send + 'static>(
        self,
        roots: &Roots,
        work: impl FnOnce(&mut Control, &Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (roots, what, session) = (roots.clone(), self.what.clone(), self.session.clone());
        worker::run(
            Stage::Session,
            &what,
            self.deadline,
            || session.describe(),
            move || {
                let mut control = Control::open(&roots)?;
                self.check_deadline()?;
                work(&mut control, &self)
            },
        )
    }

    /// Fails after the deadline, so that no step begins for a caller that has gone.
    fn check_deadline(&self) -> Result<()> {
        if !self.deadline.has_passed() {
            return Ok(());
        }
        let error = Error::timed_out(Stage::Session, self.deadline, &self.what);
        Err(error.with_last_seen(self.session.describe()))
    }

    fn require_logged_in(&self) -> Result<()> {
        if self.session.state()?.as_deref() == Some(IscsiSession::LOGGED_IN) {
            return Ok(());
        }
        let message = format!("started again, {}", self.session.describe());
        Err(Error::new(ErrorKind::NotReady, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cmd_sn_is_read_only_from_a_login_request() {
        let mut header: [u8; HEADER] = std::array::from_fn(|at| u8::try_from(at).unwrap());
        header[0] = 0x43;
        assert_eq!(cmd_sn_in(&header), Some(0x1819_1a1b));
        header[0] = 0x40;
        assert_eq!(cmd_sn_in(&header), None);
    }
}
