//! The login phase, on a TCP connection of our own.

mod agree;
mod negotiation;
mod parameters;
mod status;

use std::os::fd::{AsFd as _, OwnedFd};

pub(super) use agree::{Outcome, agree};
pub use parameters::Parameters;

use super::Proven;
use super::chap::Credentials;
use super::pdu::Isid;
use super::text::Pair;
use super::wire::Wire;
use super::{PEER, broken};
use crate::crash::point;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Iqn, Portal, PortalHost};
use crate::kernel::stream::DeadlineStream;
use crate::kernel::tcp::{self, LocalEnd};

/// How often one login may be sent to another portal.
const MOST_REDIRECTS: usize = 5;

/// What the session is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionKind {
    /// To ask which targets there are.
    Discovery,
    /// To use this target.
    Normal(Iqn),
}

/// Who logs in, for what, and what is offered.
#[derive(Debug, Clone)]
pub struct LoginOptions {
    pub(super) initiator: Iqn,
    pub(super) kind: SessionKind,
    pub(super) isid: Isid,
    pub(super) credentials: Option<Credentials>,
    pub(super) offer: Parameters,
    pub(super) requires_digests: bool,
    pub(super) local: LocalEnd,
}

impl LoginOptions {
    /// A login of `initiator`, without credentials. `isid` must be one that no
    /// other session of the initiator has with the same portal group.
    #[must_use]
    pub fn new(initiator: Iqn, kind: SessionKind, isid: Isid) -> Self {
        Self {
            initiator,
            kind,
            isid,
            credentials: None,
            offer: Parameters::offer(),
            requires_digests: false,
            local: LocalEnd::default(),
        }
    }

    /// With CHAP. One-way, a target that wants none is not refused; mutual, it
    /// is.
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// Offers these: the most that is taken of each size, and a digest wherever
    /// it is `true`, for the target to choose.
    #[must_use]
    pub fn offer(mut self, offer: Parameters) -> Self {
        self.offer = offer;
        self
    }

    /// Refuses a target that does not take each digest that is offered.
    #[must_use]
    pub fn require_digests(mut self) -> Self {
        self.requires_digests = true;
        self
    }

    /// Connects from this end alone, also where a redirect leads.
    #[must_use]
    pub(super) fn from(mut self, local: LocalEnd) -> Self {
        self.local = local;
        self
    }

    fn check_digests(&self, agreed: &Parameters) -> Result<()> {
        let digests = [
            ("headers", self.offer.header_digest, agreed.header_digest),
            ("data", self.offer.data_digest, agreed.data_digest),
        ];
        let lacks = |(_, offered, agreed): &&(&str, bool, bool)| *offered && !*agreed;
        match digests.iter().find(lacks).filter(|_| self.requires_digests) {
            Some((over, ..)) => {
                let message = format!("{PEER} takes no checksum over {over}, which is required");
                Err(Error::new(ErrorKind::NotSupported, message))
            }
            None => Ok(()),
        }
    }
}

/// A session in its full feature phase, with one connection.
#[derive(Debug)]
#[non_exhaustive]
pub struct Connection {
    /// The socket: blocking, without receive and send timeouts, closed on exec.
    /// Nothing that follows the login has been read from it.
    pub stream: OwnedFd,
    /// Where it leads: another portal than was asked where that one sent us on.
    pub portal: Portal,
    /// What was agreed.
    pub session: Session,
}

/// What a login has agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Session {
    /// The initiator's part of its name.
    pub isid: Isid,
    /// The target's part of its name.
    pub tsih: u16,
    /// The number of its next command.
    pub cmd_sn: u32,
    /// The number of the target's next status.
    pub exp_stat_sn: u32,
    /// The portal group that it is with, where the target says it.
    pub group: Option<u16>,
    /// The target's name for people, free text without control characters.
    pub alias: Option<String>,
    /// Which sides have proven who they are.
    pub proven: Proven,
    /// Whether a login without the digests would have been refused.
    pub requires_digests: bool,
    /// All that was negotiated.
    pub parameters: Parameters,
}

/// Logs in at `portal`, all within `deadline`: up to five redirects are
/// followed. A failure leaves no connection behind, and the kernel knows nothing
/// of it.
///
/// # Errors
/// `Unreachable` where nobody listens, or the target closes; `NotPermitted` where
/// either side's authentication fails; `NotFound` where there is no such target;
/// `NotReady` where the target cannot serve now; `Protocol` where it breaks the
/// protocol, naming the field, or sends us on in a loop; `Refused`,
/// `NotSupported` as it says; `TimedOut` at stage `resolve`, `dial` or `login`.
pub fn log_in(portal: &Portal, options: &LoginOptions, deadline: Deadline) -> Result<Connection> {
    log_in_from(portal, options, || Ok(FIRST_COMMAND), deadline)
}

/// As [`log_in`], for a session whose next command has a number that the kernel
/// knows: it is asked for once, when the target has taken a connection.
///
/// # Errors
/// As of [`log_in`], and those of `number`.
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
        let outcome = agree(&mut wire, options, &mut challenges);
        match outcome.map_err(|error| error.at(Stage::Login))? {
            Outcome::LoggedIn(session) => {
                tracing::debug!(%portal, ?session, "logged in");
                point!(IscsiLoggedIn);
                return Ok(Connection {
                    stream,
                    portal,
                    session,
                });
            }
            Outcome::Moved(to) => {
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
    /// Speaks on, within another deadline.
    pub(super) fn wire(&self, deadline: Deadline) -> Wire<DeadlineStream<'_>> {
        let talk = DeadlineStream::new(self.stream.as_fd(), deadline);
        let mut wire = Wire::new(talk, self.session.cmd_sn, deadline);
        wire.exp_stat_sn = self.session.exp_stat_sn;
        wire
    }
}

fn dial(portal: &Portal, local: &LocalEnd, deadline: Deadline) -> Result<OwnedFd> {
    let host = portal.host().to_string();
    point!(IscsiToDial);
    let stream = tcp::connect_from(local, &host, portal.port(), PEER, deadline)?;
    point!(IscsiDialled);
    Ok(stream)
}

fn refuse_loop(visited: &[Portal], to: &Portal) -> Result<()> {
    let way = || {
        let way: Vec<_> = visited
            .iter()
            .chain([to])
            .map(ToString::to_string)
            .collect();
        way.join(" to ")
    };
    if visited.contains(to) {
        let message = format!("{PEER} redirects the login in a loop: {}", way());
        return Err(Error::new(ErrorKind::Protocol, message));
    }
    if visited.len() > MOST_REDIRECTS {
        let message = format!("{PEER} redirects the login too often: {}", way());
        return Err(Error::new(ErrorKind::Protocol, message));
    }
    Ok(())
}

/// A `TargetAddress`: a portal, and the tag of its group where it has one.
pub(super) fn target_address(pair: &Pair<'_>) -> Result<(Portal, Option<u16>)> {
    let (address, tag) = match pair.value.rsplit_once(',') {
        Some((address, tag)) => (address, Some(tag)),
        None => (pair.value, None),
    };
    // A zone is an interface of the target's machine.
    let has_no_zone = |portal: &Portal| !matches!(portal.host(), PortalHost::LinkLocal { .. });
    let portal = address.parse().ok().filter(has_no_zone);
    let group = match tag {
        Some(value) => {
            let number = Pair { value, ..*pair }.number(0..=0xffff).ok();
            number
                .and_then(|number| u16::try_from(number).ok())
                .map(Some)
        }
        None => Some(None),
    };
    portal.zip(group).ok_or_else(|| {
        pair.broken("HOST[:PORT][,TAG], an IPv6 address in brackets and without a zone")
    })
}

/// The number of a new session's first command.
pub(super) const FIRST_COMMAND: u32 = 1;
/// The tag of a login's task.
pub(super) const TAG: u32 = 1;
/// The connection of a session that has only one.
pub(super) const CID: u16 = 0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_port_and_a_tag_or_not() {
        let read = |value| {
            let key = "TargetAddress";
            target_address(&Pair { key, value }).map(|(portal, tag)| (portal.to_string(), tag))
        };
        let all = |text: &str, tag| (text.to_owned(), tag);
        assert_eq!(read("10.0.0.1").unwrap(), all("10.0.0.1:3260", None));
        assert_eq!(
            read("10.0.0.1:9,65535").unwrap(),
            all("10.0.0.1:9", Some(65535))
        );
        assert_eq!(read("[::1]:3260,1").unwrap(), all("[::1]:3260", Some(1)));
        assert_eq!(
            read("array.example,0x2").unwrap(),
            all("array.example:3260", Some(2))
        );
        for value in [
            "",
            ",1",
            "::1,1",
            "10.0.0.1:3260,",
            "h,65536",
            "h,x",
            "h:0,1",
            "h,1,1",
            "[fe80::1%eth0]:3260,1",
        ] {
            let error = read(value).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains("TargetAddress"), "{error}");
        }
    }

    #[test]
    fn a_way_that_comes_back_or_does_not_end_is_refused() {
        let portal = |at: usize| -> Portal { format!("10.0.0.{at}").parse().unwrap() };
        let visited: Vec<_> = (1..=6).map(portal).collect();
        assert!(refuse_loop(&visited[..5], &portal(9)).is_ok());
        let error = |visited, to| refuse_loop(visited, &to).unwrap_err().to_string();
        assert!(error(&visited[..1], portal(1)).contains("10.0.0.1:3260 to 10.0.0.1:3260"));
        assert!(error(&visited[..3], portal(2)).contains("in a loop"));
        assert!(error(&visited[..], portal(9)).contains("too often"));
    }
}
