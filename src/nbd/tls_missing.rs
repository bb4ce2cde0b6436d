//! What stands for TLS in a build without the feature `tls`.

use std::os::fd::OwnedFd;

use super::export::Export;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::NbdUri;

/// # Errors
/// `NotSupported`.
pub(crate) fn ciphers_of_kernel(_: Deadline) -> Result<Vec<&'static str>> {
    let message = "lunbd was built without TLS (its feature tls)";
    Err(Error::new(ErrorKind::NotSupported, message))
}

/// # Errors
/// `NotSupported`.
pub(super) fn negotiate(_: &OwnedFd, uri: &NbdUri, _: Deadline) -> Result<Export> {
    let message = format!("{uri}: lunbd was built without TLS (its feature tls)");
    Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Tls))
}
