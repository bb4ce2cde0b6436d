//! A server to which a device may be connected again.

use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::nbd::{Connection, Difference, KnownContent, TlsInfo};

/// How long a server may take to answer.
pub(super) const DIAL_LIMIT: Duration = Duration::from_secs(10);

/// A connection that was dialled, and not offered yet.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) stream: OwnedFd,
    pub(super) content: Option<KnownContent>,
    pub(super) tls: Option<TlsInfo>,
    /// How the server's export differs from what the kernel was told at the connect.
    pub(super) differences: Vec<Difference>,
}

impl Server {
    pub(super) fn new(
        connection: Connection,
        content: Option<KnownContent>,
        differences: Vec<Difference>,
    ) -> Self {
        Self {
            stream: connection.stream,
            content,
            tls: connection.tls,
            differences,
        }
    }

    /// Whether its differences forbid connecting the device to it.
    pub(super) fn differs(&self) -> bool {
        self.differences.iter().any(Difference::prevents_reattach)
    }
}
