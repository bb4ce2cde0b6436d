//! iSCSI sessions of our own: the login phase on our own TCP socket, the session that the
//! kernel makes of it, and the discovery of targets. They need no daemon and no node
//! database.
//!
//! The protocol is RFC 7143. Nothing that a target sends is trusted: each length, count and
//! exchange has a limit, no wait for an answer exceeds the deadline, and an error of kind
//! [`Protocol`](crate::ErrorKind::Protocol) names a wrong field.

pub mod chap;
mod discovery;
mod login;
mod name;
pub mod pdu;
mod proven;
mod recovery;
mod session;
pub mod text;
mod tunables;
mod wire;

use std::fmt;

pub(crate) use crate::kernel::iscsi_netlink::holder_of_port;
pub use chap::{Algorithm, Algorithms, Credentials, CredentialsFile, CredentialsSource, Secret};
pub use discovery::{
    Discovered, DiscoveredTarget, DiscoveryOptions, SkippedRecord, TargetPortal, discover,
    discover_over,
};
pub use login::{Connection, LoginOptions, Parameters, Session, SessionKind, log_in};
pub use name::{INITIATOR_NAME_FILE, create_initiator_name, initiator_name};
pub use proven::Proven;
pub(crate) use recovery::unproven;
pub use recovery::{
    SessionNotice, SessionWaker, SessionWatch, connect_again, logout_for_relogin,
    rebind_connection, stop_connection,
};
#[cfg(test)]
pub(crate) use session::fake::FakeSession;
pub use session::{
    ConnectionStatus, CreateGuard, Digests, IscsiSession, KernelSession, SessionFacts, SessionName,
    SessionOptions, UnmetSetting, connect, destroy_incomplete, hand_over, has_driver,
    lock_creation, log_out,
};
pub(crate) use session::{Proof, has_incomplete};
pub use tunables::{Tunable, Tunables};

use crate::error::{Error, ErrorKind, Result};

/// The peer's name in errors.
const PEER: &str = "the iSCSI target";

fn violation(field: &str, found: impl fmt::Display, expected: &str) -> Error {
    Error::protocol_violation(PEER, field, found, expected)
}

fn random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|error| {
        let message = format!("the kernel gives no random bytes: {error}");
        Error::new(ErrorKind::Io, message)
    })
}
