//! The error for a server that breaks the protocol.

use std::fmt;

use crate::error::Error;

/// The server broke the protocol in this field.
pub(in crate::nbd) fn violation(field: &str, found: impl fmt::Display, expected: &str) -> Error {
    Error::protocol_violation("the NBD server", field, found, expected)
}
