//! Replaces TLS in a build without the feature `tls`: each call fails.

use std::os::fd::OwnedFd;

use super::export::Export;
use super::handshake::{DiscoveredExport, ListedExport};
use super::tls_info::TlsInfo;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::NbdServer;

/// # Errors
/// `NotSupported`.
pub(crate) fn ciphers_of_kernel(_: Deadline) -> Result<Vec<&'static str>> {
    Err(missing())
}

/// # Errors
/// `NotSupported`.
pub(super) fn discover(_: &OwnedFd, _: &NbdServer, _: Deadline) -> Result<Vec<DiscoveredExport>> {
    Err(missing())
}

/// # Errors
/// `NotSupported`.
pub(super) fn list(_: &OwnedFd, _: &NbdServer, _: Deadline) -> Result<Vec<ListedExport>> {
    Err(missing())
}

/// # Errors
/// `NotSupported`.
pub(super) fn negotiate(
    _: &OwnedFd,
    _: &NbdServer,
    _: &str,
    _: Deadline,
) -> Result<(Export, TlsInfo)> {
    Err(missing())
}

fn missing() -> Error {
    let message = "lunbd was built without TLS (its feature tls)";
    Error::new(ErrorKind::NotSupported, message).at(Stage::Tls)
}
