//! CHAP, one-way and mutual (RFC 7143, 12.1.3; RFC 1994).
//!
//! In mutual CHAP the protocol has the initiator prove itself first. What is
//! left to hold is held: nothing is sent to a target that then proves itself
//! wrongly or not at all, one that goes without CHAP is refused, the two secrets
//! must differ, and a challenge of ours that comes back as a target's is not
//! answered.

mod algorithm;
mod binary;
mod conversation;
mod credentials;
mod file;
mod secret;
mod source;

use crate::error::{Error, ErrorKind};
pub use algorithm::{Algorithm, Algorithms};
pub use binary::{decode_binary, encode_binary};
pub(super) use conversation::Conversation;
pub use credentials::Credentials;
pub use file::CredentialsFile;
pub use secret::Secret;
pub use source::CredentialsSource;

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}
