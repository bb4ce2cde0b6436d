//! A connection to a server, to which a device may be connected again.

use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::nbd::{Connection, Difference, KnownContent, TlsInfo};

/// How long a server may take to answer.
pub(in crate::engine::nbd) const DIAL_LIMIT: Duration = Duration::from_secs(10);

/// A connection that was dialled, and not offered yet.
#[derive(Debug)]
pub(in crate::engine::nbd) struct DialledConnection {
    pub(in crate::engine::nbd) stream: OwnedFd,
    pub(in crate::engine::nbd) content: Option<KnownContent>,
    pub(in crate::engine::nbd) tls: Option<TlsInfo>,
    /// How the server's export differs from what the kernel was told at the connect.
    pub(in crate::engine::nbd) differences: Vec<Difference>,
}

impl DialledConnection {
    pub(in crate::engine::nbd) fn new(
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
    pub(in crate::engine::nbd) fn prevents_reattach(&self) -> bool {
        self.differences.iter().any(Difference::prevents_reattach)
    }
}
