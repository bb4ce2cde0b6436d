//! One login at one portal: requests and responses in turn.

use std::io::{Read, Write};

use super::address::target_address;
use super::negotiation::{Negotiation, Step};
use super::options::LoginOptions;
use super::parameters::Parameters;
use super::status;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Portal;
use crate::iscsi::pdu::{Isid, LoginRequest, LoginResponse, LoginStage, Response};
use crate::iscsi::text::pairs;
use crate::iscsi::wire::{Wire, rejected};
use crate::iscsi::{PEER, Proven, violation};

/// The most exchanges between the first request and the full feature phase.
const MAX_EXCHANGES: usize = 32;

/// The result of a login.
#[derive(Debug)]
pub(in crate::iscsi) enum Outcome {
    LoggedIn(Session),
    /// The target redirects to this portal, where the login starts again.
    Redirected(Portal),
}

/// Logs in. `challenges` are the CHAP challenges that we have sent so far for the same
/// caller.
pub(in crate::iscsi) fn negotiate_session<S: Read + Write>(
    wire: &mut Wire<S>,
    options: &LoginOptions,
    challenges: &mut Vec<Vec<u8>>,
) -> Result<Outcome> {
    let mut negotiation = Negotiation::new(options, challenges);
    for _ in 0..MAX_EXCHANGES {
        let (response, data) = exchange(wire, &mut negotiation, options)?;
        match response.status_class {
            0 => wire.exp_stat_sn = response.stat_sn.wrapping_add(1),
            1 => return redirected(&data),
            class => return Err(status::failure(class, response.status_detail)),
        }
        if let Step::Done(agreed) = negotiation.take(&response, &data)? {
            agreed.parameters.check()?;
            options.check_digests(&agreed.parameters)?;
            let session = Session {
                isid: options.isid,
                tsih: response.tsih,
                cmd_sn: wire.cmd_sn,
                exp_stat_sn: wire.exp_stat_sn,
                group: agreed.group,
                alias: agreed.alias,
                proven: agreed.proven,
                requires_digests: options.requires_digests,
                parameters: agreed.parameters,
            };
            wire.enter(
                Stage::Discover,
                session.parameters.max_recv_data_segment_length,
            );
            return Ok(Outcome::LoggedIn(session));
        }
    }
    let expected = "the full feature phase after at most 32";
    Err(violation(
        "the number of login exchanges",
        "too large",
        expected,
    ))
}

/// Sends the next request and returns its response and that one's text.
fn exchange<S: Read + Write>(
    wire: &mut Wire<S>,
    negotiation: &mut Negotiation<'_>,
    options: &LoginOptions,
) -> Result<(LoginResponse, Vec<u8>)> {
    let stage = negotiation.stage();
    let (text, transit) = negotiation.request()?;
    let request = LoginRequest {
        stage,
        transit,
        isid: options.isid,
        tsih: 0,
        tag: TAG,
        cid: CID,
        cmd_sn: wire.cmd_sn,
        exp_stat_sn: wire.exp_stat_sn,
        text: text.as_bytes(),
    };
    wire.send("a login request", &request.encode())?;
    let waiting_for = format!("the answer to a login request of the stage {stage:?}");
    let received = wire.receive(&waiting_for);
    match received.map_err(|error| explain_disconnect(error, stage, options))? {
        (Response::Login(response), data) => {
            check_response(&response, options)?;
            Ok((response, data))
        }
        (Response::Reject(reject), _) => Err(rejected(reject.reason)),
        (other, _) => {
            let expected = "that of a login response";
            Err(violation("opcode", other.name(), expected))
        }
    }
}

/// Adds what was offered, because some targets close the connection without an answer if
/// they want CHAP and are offered none.
fn explain_disconnect(error: Error, stage: LoginStage, options: &LoginOptions) -> Error {
    if stage == LoginStage::Security && error.kind() == ErrorKind::Unreachable {
        let offered = format!("it was offered AuthMethod={}", options.methods());
        return error.with_last_seen(offered);
    }
    error
}

fn check_response(response: &LoginResponse, options: &LoginOptions) -> Result<()> {
    if response.tag != TAG {
        let found = format!("{:#x}", response.tag);
        return Err(violation(
            "Initiator Task Tag",
            found,
            "that of the request, 0x1",
        ));
    }
    if response.status_class != 0 {
        // A target may leave out the other fields then.
        return Ok(());
    }
    if response.isid != options.isid {
        let found = format!("{:?}", response.isid);
        return Err(violation("ISID", found, "that of the request"));
    }
    if response.version != 0 {
        return Err(violation("Version-active", response.version, "0"));
    }
    Ok(())
}

fn redirected(data: &[u8]) -> Result<Outcome> {
    for pair in pairs(data) {
        let pair = pair?;
        if pair.key == "TargetAddress" {
            return target_address(&pair).map(|(portal, _)| Outcome::Redirected(portal));
        }
    }
    let field = format!("the TargetAddress of {PEER}'s redirect");
    Err(violation(&field, "absent", "a portal"))
}

/// The session that a login has negotiated.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Session {
    /// The initiator's part of the session's name.
    pub isid: Isid,
    /// The target's part of the session's name.
    pub tsih: u16,
    /// The `CmdSN` of the session's next command.
    pub cmd_sn: u32,
    /// The `StatSN` of the target's next status.
    pub exp_stat_sn: u32,
    /// The session's portal group, if the target gives it.
    pub group: Option<u16>,
    /// The target's name for people: free text without control characters.
    pub alias: Option<String>,
    /// The sides that have proven who they are.
    pub proven: Proven,
    /// Whether a login without digests would have been refused.
    pub requires_digests: bool,
    /// All negotiated parameters.
    pub parameters: Parameters,
}

/// The tag of a login's task.
pub(in crate::iscsi) const TAG: u32 = 1;

/// The number of the connection in a session that has only one.
pub(in crate::iscsi) const CID: u16 = 0;
