//! CHAP, one-way and mutual (RFC 7143, 12.1.3; RFC 1994).
//!
//! In mutual CHAP the protocol makes the initiator prove itself first. Beyond that this
//! module is strict. It sends nothing to a target whose proof is wrong or missing, refuses
//! a target that skips CHAP, requires two different secrets, and never answers one of its
//! own challenges.

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
