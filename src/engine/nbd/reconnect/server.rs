//! A server that a device may have back.

use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::nbd::{Connection, Difference, KnownContent, TlsInfo};

/// One server's time to answer.
pub(super) const ONE_TRY: Duration = Duration::from_secs(10);

/// A connection that was dialled, and not offered yet.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) stream: OwnedFd,
    pub(super) content: Option<KnownContent>,
    pub(super) tls: Option<TlsInfo>,
    /// What the server says otherwise than the kernel was told at the connect.
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

    /// Whether it is to be kept from the device.
    pub(super) fn differs(&self) -> bool {
        self.differences.iter().any(Difference::prevents_reattach)
    }
}
