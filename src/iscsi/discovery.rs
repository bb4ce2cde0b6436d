//! Asks a portal which targets it knows: `SendTargets` (RFC 7143, appendix C).

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::time::Duration;

use super::chap::Credentials;
use super::login::{
    FIRST_COMMAND, LoginOptions, Outcome, Parameters, SessionKind, log_in, negotiate_session,
    target_address,
};
use super::pdu::{Isid, LogoutRequest, NO_TAG, Response, TextRequest};
use super::text::{Pair, PartialText, Text, pairs};
use super::wire::Wire;
use super::{PEER, random, violation};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage, escape_untrusted};
use crate::id::{InterfaceName, Iqn, Portal};
use crate::kernel::tcp::LocalEnd;

/// The longest data segment that we accept in one PDU, in bytes.
const IN_ONE: u32 = 32 << 10;
/// The longest list in bytes: 10,000 targets with the longest names.
const LONGEST_LIST: usize = 4 << 20;
/// The most PDUs of one list, so that a target cannot send empty PDUs for ever.
const MAX_PARTS: usize = 4096;
/// How long to wait for the answer to the logout.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(2);
const TEXT_TAG: u32 = 2;
const LOGOUT_TAG: u32 = 3;

/// The initiator and the local end of a discovery.
#[derive(Debug, Clone)]
pub struct DiscoveryOptions {
    initiator: Iqn,
    credentials: Option<Credentials>,
    local: LocalEnd,
}

impl DiscoveryOptions {
    /// A discovery as `initiator`, without credentials.
    #[must_use]
    pub fn new(initiator: Iqn) -> Self {
        Self {
            initiator,
            credentials: None,
            local: LocalEnd::default(),
        }
    }

    /// Uses CHAP: see [`LoginOptions::credentials`].
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// Asks only through this network interface (`SO_BINDTODEVICE`).
    #[must_use]
    pub fn interface(mut self, name: InterfaceName) -> Self {
        self.local.interface = Some(name);
        self
    }

    /// Asks from this address of this machine.
    #[must_use]
    pub fn source_address(mut self, address: IpAddr) -> Self {
        self.local.address = Some(address);
        self
    }
}

/// A target and its portals.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DiscoveredTarget {
    /// Its name.
    pub iqn: Iqn,
    /// Its portals, each once, in the order of the target's list.
    pub portals: Vec<TargetPortal>,
}

/// One portal of a target.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct TargetPortal {
    /// The address where it listens.
    pub portal: Portal,
    /// The tag of its portal group. `None` if the target does not give it, or names no
    /// portals: then the portal is the one that was asked.
    pub group: Option<u16>,
}

/// The list of a portal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Discovered {
    /// The targets, in the order of the list.
    pub targets: Vec<DiscoveredTarget>,
    /// The records of the list that are left out, because no login could use them.
    pub skipped: Vec<SkippedRecord>,
}

/// A record that names no target or portal that a login could use.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SkippedRecord {
    /// `TargetName` or `TargetAddress`. The addresses of a skipped name are left out too.
    pub key: String,
    /// Its value, escaped, and cut if it is long.
    pub value: String,
    /// Why it is left out.
    pub why: String,
}

/// Asks `portal` for its targets, in a session that is closed at the end, all within
/// `deadline`. It waits at most two seconds for the answer to the logout. The kernel's
/// iSCSI takes no part. A record that no login could use, such as an address with a zone of
/// the target's machine, is skipped and reported.
///
/// # Errors
/// As for [`log_in`]. At stage `discover`: `Protocol`, naming the field, also for a list of
/// more than 4 MiB; `Refused` if the target does not answer the request.
pub fn discover(
    portal: &Portal,
    options: &DiscoveryOptions,
    deadline: Deadline,
) -> Result<Discovered> {
    let connection = log_in(portal, &login(options)?, deadline)?;
    let limit = connection.session.parameters.max_recv_data_segment_length;
    let mut wire = connection.wire(deadline);
    wire.enter(Stage::Discover, limit);
    let found = ask(&mut wire, &connection.portal).map_err(|error| error.at(Stage::Discover))?;
    let logout_deadline = deadline.at_most(LOGOUT_TIMEOUT);
    let mut last = connection.wire(logout_deadline);
    last.enter(Stage::Discover, limit);
    last.exp_stat_sn = wire.exp_stat_sn;
    log_out(&mut last);
    Ok(found)
}

/// As [`discover`], over a stream that is connected to `portal`. Its reads and writes must
/// fail by themselves when `deadline` passes. It does not follow a redirect.
///
/// # Errors
/// As for [`discover`]; `NotSupported` for a redirect.
pub fn discover_over(
    stream: &mut (impl Read + Write),
    portal: &Portal,
    options: &DiscoveryOptions,
    deadline: Deadline,
) -> Result<Discovered> {
    let options = login(options)?;
    let mut wire = Wire::new(stream, FIRST_COMMAND, deadline);
    let outcome = negotiate_session(&mut wire, &options, &mut Vec::new());
    if let Outcome::Redirected(to) = outcome.map_err(|error| error.at(Stage::Login))? {
        let message = format!("{PEER} redirects the login to {to}");
        return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Login));
    }
    let found = ask(&mut wire, portal).map_err(|error| error.at(Stage::Discover))?;
    log_out(&mut wire);
    Ok(found)
}

fn login(options: &DiscoveryOptions) -> Result<LoginOptions> {
    // The first two bits are 10b and the rest is random (RFC 7143, 11.12.5).
    let mut isid = [0; 6];
    random(&mut isid[1..])?;
    isid[0] = 0x80;
    let offer = Parameters {
        max_recv_data_segment_length: IN_ONE,
        ..Parameters::offer()
    };
    let initiator = options.initiator.clone();
    let login = LoginOptions::new(initiator, SessionKind::Discovery, Isid(isid));
    let mut login = login.offer(offer).from(options.local.clone());
    login.credentials.clone_from(&options.credentials);
    Ok(login)
}

fn ask<S: Read + Write>(wire: &mut Wire<S>, portal: &Portal) -> Result<Discovered> {
    let mut question = Text::default();
    question.push("SendTargets", "All");
    let mut list = PartialText::new(LONGEST_LIST);
    let (mut transfer_tag, mut lun) = (NO_TAG, [0; 8]);
    for _ in 0..MAX_PARTS {
        let request = TextRequest {
            tag: TEXT_TAG,
            transfer_tag,
            lun,
            cmd_sn: wire.cmd_sn,
            exp_stat_sn: wire.exp_stat_sn,
            text: question.as_bytes(),
        };
        wire.send("the question for targets", &request.encode())?;
        let (response, data) = match wire.receive_answer("the list of targets")? {
            (Response::Text(response), data) => (response, data),
            (other, _) => {
                return Err(violation("opcode", other.name(), "that of a text response"));
            }
        };
        if response.tag != TEXT_TAG {
            let found = format!("{:#x}", response.tag);
            return Err(violation(
                "Initiator Task Tag",
                found,
                "that of the request, 0x2",
            ));
        }
        wire.exp_stat_sn = response.stat_sn.wrapping_add(1);
        list.add(&data)?;
        if response.is_final {
            return targets(&list.take(), portal);
        }
        // The following requests only ask for the rest of the answer.
        question = Text::default();
        (transfer_tag, lun) = (response.transfer_tag, response.lun);
    }
    Err(violation(
        "the number of text responses",
        "too large",
        "the end of the list in at most 4096",
    ))
}

/// The target to which the current records of the list belong.
#[derive(Clone, Copy)]
enum CurrentTarget {
    None,
    Listed(usize),
    Skipped,
}

/// Parses a list. A target that occurs twice gets the portals of both records.
fn targets(list: &[u8], asked: &Portal) -> Result<Discovered> {
    let mut found = Discovered::default();
    let mut places = BTreeMap::new();
    let mut current = CurrentTarget::None;
    // Sets keep this fast: a target may make the list as long as its text's limit allows.
    let mut listed = HashSet::new();
    let mut has_address = HashSet::new();
    for pair in pairs(list) {
        let pair = pair?;
        match (pair.key, current) {
            ("TargetName", _) => {
                if let Ok(iqn) = pair.value.parse::<Iqn>() {
                    let targets = &mut found.targets;
                    let place = *places.entry(iqn.clone()).or_insert(targets.len());
                    if place == targets.len() {
                        let portals = Vec::new();
                        targets.push(DiscoveredTarget { iqn, portals });
                    }
                    current = CurrentTarget::Listed(place);
                } else {
                    found.skip(&pair, &pair.violation("an iSCSI name"));
                    current = CurrentTarget::Skipped;
                }
            }
            ("TargetAddress", CurrentTarget::None) => {
                return Err(pair.violation("a TargetName before it"));
            }
            ("TargetAddress", CurrentTarget::Skipped) => {}
            ("TargetAddress", CurrentTarget::Listed(place)) => {
                has_address.insert(place);
                match target_address(&pair) {
                    Ok((portal, group)) => {
                        let portal = TargetPortal { portal, group };
                        if listed.insert((place, portal.clone()))
                            && let Some(target) = found.targets.get_mut(place)
                        {
                            target.portals.push(portal);
                        }
                    }
                    Err(error) => found.skip(&pair, &error),
                }
            }
            // The value is `Reject` or `NotUnderstood`.
            ("SendTargets", _) => {
                let value = escape_untrusted(pair.value.as_bytes());
                let message = format!("{PEER} does not list its targets: \"{value}\"");
                return Err(Error::new(ErrorKind::Refused, message));
            }
            (key, _) => tracing::debug!(key, "the list contains an unknown key"),
        }
    }
    for (place, target) in found.targets.iter_mut().enumerate() {
        if !has_address.contains(&place) {
            let (portal, group) = (asked.clone(), None);
            target.portals.push(TargetPortal { portal, group });
        }
    }
    Ok(found)
}

impl Discovered {
    fn skip(&mut self, pair: &Pair<'_>, why: &Error) {
        self.skipped.push(SkippedRecord {
            key: pair.key.to_owned(),
            value: escape_untrusted(pair.value.as_bytes()),
            why: why.to_string(),
        });
    }
}

impl fmt::Display for SkippedRecord {
    /// Prints `TargetName=VALUE: WHY`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}: {}", self.key, self.value, self.why)
    }
}

/// Closes the session. The list is already complete, so a failure is only logged; the
/// connection is closed in any case.
fn log_out<S: Read + Write>(wire: &mut Wire<S>) {
    let request = LogoutRequest {
        tag: LOGOUT_TAG,
        cmd_sn: wire.cmd_sn,
        exp_stat_sn: wire.exp_stat_sn,
    };
    let sent = wire.send("the logout", &request.encode());
    match sent.and_then(|()| wire.receive_answer("the answer to the logout")) {
        Ok((Response::Logout(response), _)) if response.response == 0 => {}
        Ok((other, _)) => tracing::debug!(?other, "not the answer to a logout"),
        Err(error) => tracing::debug!(%error, "the target did not answer the logout"),
    }
}

#[cfg(test)]
mod tests;
