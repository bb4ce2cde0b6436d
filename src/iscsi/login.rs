//! The login phase, on our own TCP connection.

mod address;
mod exchange;
mod negotiation;
mod options;
mod parameters;
mod status;

use std::os::fd::{AsFd as _, OwnedFd};

use super::PEER;
use super::wire::Wire;
use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Portal;
use crate::kernel::stream::DeadlineStream;
use crate::kernel::tcp::{self, LocalEnd};
pub(super) use address::target_address;
pub use exchange::Session;
pub(super) use exchange::{CID, Outcome, TAG, negotiate_session};
pub use options::LoginOptions;
pub use parameters::{Parameters, SessionKind};

/// How many redirects one login follows.
const MAX_REDIRECTS: usize = 5;

/// A session in its full feature phase, with one connection.
#[derive(Debug)]
#[non_exhaustive]
pub struct Connection {
    /// The socket: blocking, without receive and send timeouts, closed on exec. Nothing
    /// that follows the login has been read from it.
    pub stream: OwnedFd,
    /// The portal that the socket leads to: after a redirect another than the one asked.
    pub portal: Portal,
    /// The result of the negotiation.
    pub session: Session,
}

/// Logs in at `portal` within `deadline` and follows up to five redirects. A failure leaves
/// no connection behind, and the kernel's iSCSI does not know of it.
///
/// # Errors
/// `Unreachable` if nothing listens, or the target closes the connection; `NotPermitted` if
/// either side's authentication fails; `NotFound` if there is no such target; `NotReady` if
/// the target cannot serve now; `Protocol`, naming the field, if it breaks the protocol or
/// redirects in a loop; `Refused` or `NotSupported` as the target says; `TimedOut` at stage
/// `resolve`, `dial` or `login`.
pub fn log_in(portal: &Portal, options: &LoginOptions, deadline: Deadline) -> Result<Connection> {
    log_in_from(portal, options, || Ok(FIRST_COMMAND), deadline)
}

/// As [`log_in`], for a session whose next `CmdSN` the kernel knows. `number` is called once,
/// after the target has accepted a connection.
///
/// # Errors
/// As for [`log_in`], and those of `number`.
pub(super) fn log_in_from(
    portal: &Portal,
    options: &LoginOptions,
    number: impl FnOnce() -> Result<u32>,
    deadline: Deadline,
) -> Result<Connection> {
    let mut visited: Vec<Portal> = Vec::new();
    let mut challenges = Vec::new();
    let mut portal = portal.clone();
    let mut stream =
        dial(&portal, &options.local, deadline).map_err(|error| error.at(Stage::Dial))?;
    let cmd_sn = number()?;
    loop {
        let talk = DeadlineStream::new(stream.as_fd(), deadline);
        let mut wire = Wire::new(talk, cmd_sn, deadline);
        let outcome = negotiate_session(&mut wire, options, &mut challenges);
        match outcome.map_err(|error| error.at(Stage::Login))? {
            Outcome::LoggedIn(session) => {
                tracing::debug!(%portal, ?session, "logged in");
                crash_point!(IscsiLoggedIn);
                return Ok(Connection {
                    stream,
                    portal,
                    session,
                });
            }
            Outcome::Redirected(to) => {
                tracing::debug!(%portal, %to, "redirected");
                visited.push(std::mem::replace(&mut portal, to));
                refuse_loop(&visited, &portal).map_err(|error| error.at(Stage::Login))?;
                stream = dial(&portal, &options.local, deadline)
                    .map_err(|error| error.at(Stage::Dial))?;
            }
        }
    }
}

impl Connection {
    /// Continues on the connection, within another deadline.
    pub(super) fn wire(&self, deadline: Deadline) -> Wire<DeadlineStream<'_>> {
        let talk = DeadlineStream::new(self.stream.as_fd(), deadline);
        let mut wire = Wire::new(talk, self.session.cmd_sn, deadline);
        wire.exp_stat_sn = self.session.exp_stat_sn;
        wire
    }
}

fn dial(portal: &Portal, local: &LocalEnd, deadline: Deadline) -> Result<OwnedFd> {
    let host = portal.host().to_string();
    crash_point!(IscsiToDial);
    let stream = tcp::connect_from(local, &host, portal.port(), PEER, deadline)?;
    crash_point!(IscsiDialled);
    Ok(stream)
}

fn refuse_loop(visited: &[Portal], to: &Portal) -> Result<()> {
    let redirect_chain = || {
        let portals: Vec<_> = visited
            .iter()
            .chain([to])
            .map(ToString::to_string)
            .collect();
        portals.join(" to ")
    };
    if visited.contains(to) {
        let message = format!("{PEER} redirects the login in a loop: {}", redirect_chain());
        return Err(Error::new(ErrorKind::Protocol, message));
    }
    if visited.len() > MAX_REDIRECTS {
        let message = format!("{PEER} redirects the login too often: {}", redirect_chain());
        return Err(Error::new(ErrorKind::Protocol, message));
    }
    Ok(())
}

/// The `CmdSN` of a new session's first command.
pub(super) const FIRST_COMMAND: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_that_loop_or_do_not_end_are_refused() {
        let portal = |at: usize| -> Portal { format!("10.0.0.{at}").parse().unwrap() };
        let visited: Vec<_> = (1..=6).map(portal).collect();
        assert!(refuse_loop(&visited[..5], &portal(9)).is_ok());
        let error = |visited, to| refuse_loop(visited, &to).unwrap_err().to_string();
        assert!(error(&visited[..1], portal(1)).contains("10.0.0.1:3260 to 10.0.0.1:3260"));
        assert!(error(&visited[..3], portal(2)).contains("in a loop"));
        assert!(error(&visited[..], portal(9)).contains("too often"));
    }
}
