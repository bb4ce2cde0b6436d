//! From an address to a socket that the kernel can take over.

mod unix;

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use super::export::Export;
use super::handshake::{self, DiscoveredExport, ListedExport};
use super::tls;
use super::tls_info::TlsInfo;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::id::{NbdServer, NbdUri};
use crate::kernel::{stream::DeadlineStream, tcp};

/// A connection in the transmission phase, of which nothing has been read yet.
#[derive(Debug)]
#[non_exhaustive]
pub struct Connection {
    /// The socket: blocking, without receive and send timeouts (an idle link
    /// would die of one), closed on exec.
    pub stream: OwnedFd,
    /// What the server serves on it.
    pub export: Export,
    /// The TLS of it; `None` of a connection without TLS.
    pub tls: Option<TlsInfo>,
}

/// Connects to the server of `uri` and agrees with it on the export, all within
/// `deadline`: a host's addresses are tried one after the other, each for an
/// equal share of what is left.
///
/// A TCP socket sends at once (`TCP_NODELAY`). The kernel gives it up, so that
/// the link is known to be dead, after 30 seconds in which sent data is not
/// acknowledged or not taken (`TCP_USER_TIMEOUT`), and after the same of probes
/// without an answer on an idle link (keepalive, first sent after 10 seconds).
///
/// A server of `nbds://` is asked for TLS, and nothing is said to it without. The kernel
/// takes the keys over (kTLS, Linux 5.11), so that the socket is used as one of TCP.
///
/// A failure leaves no socket behind. Resolving a host's name cannot be
/// cancelled: after a timeout its thread stays until the resolver lets go.
///
/// # Errors
/// `Unreachable` where no server is there, it closes, or the connection breaks;
/// `NotPermitted` where the Unix socket may not be opened; `TimedOut` at stage
/// `resolve`, `dial`, `tls` or `handshake`; what [`negotiate`](handshake::negotiate)
/// says; and at stage `tls` `IdentityMismatch` where the server's certificate does not
/// prove its name, `NotPermitted` where the server wants another certificate of the
/// client, `NotSupported` where both have no cipher in common or the kernel has no TLS,
/// and `InvalidInput` for files that hold no certificates.
pub fn dial(uri: &NbdUri, deadline: Deadline) -> Result<Connection> {
    let stream = connect(uri.server(), deadline)?;
    let (export, tls) = if let NbdServer::Tls { .. } = uri.server() {
        let (export, tls) = tls::negotiate(&stream, uri, deadline)?;
        (export, Some(tls))
    } else {
        let mut talk = DeadlineStream::new(stream.as_fd(), deadline);
        let export = handshake::negotiate(&mut talk, uri.export(), deadline)?;
        (export, None)
    };
    tracing::debug!(%uri, size = export.size, flags = ?export.flags, "shook hands");
    Ok(Connection {
        stream,
        export,
        tls,
    })
}

/// As [`dial`], for a device whose requests may take no longer than `request`: the kernel
/// gives a TCP connection up after that time instead of 30 seconds, unless it is zero or
/// not known.
pub(crate) fn dial_for_device(
    uri: &NbdUri,
    request: Option<Duration>,
    deadline: Deadline,
) -> Result<Connection> {
    let connection = dial(uri, deadline)?;
    if let Some(request) = request.filter(|request| !request.is_zero()) {
        tcp::give_up_after(&connection.stream, request).map_err(|error| error.at(Stage::Dial))?;
    }
    Ok(connection)
}

/// Connects to `server` and asks for the exports that it shows.
///
/// # Errors
/// As of [`dial`] and [`list`](handshake::list).
pub fn list_exports(server: &NbdServer, deadline: Deadline) -> Result<Vec<ListedExport>> {
    let stream = connect(server, deadline)?;
    if let NbdServer::Tls { .. } = server {
        return tls::list(&stream, server, deadline);
    }
    handshake::list(&mut DeadlineStream::new(stream.as_fd(), deadline), deadline)
}

/// Connects to `server` and asks for its exports, each with its size and flags: all within
/// `deadline`. The kernel's NBD driver takes no part in it, and no privilege is needed.
///
/// # Errors
/// As of [`dial`] and [`discover`](handshake::discover). After a timeout, as after any
/// failure, no socket is left.
pub fn discover(server: &NbdServer, deadline: Deadline) -> Result<Vec<DiscoveredExport>> {
    let stream = connect(server, deadline)?;
    if let NbdServer::Tls { .. } = server {
        return tls::discover(&stream, server, deadline);
    }
    handshake::discover(&mut DeadlineStream::new(stream.as_fd(), deadline), deadline)
}

fn connect(server: &NbdServer, deadline: Deadline) -> Result<OwnedFd> {
    match server {
        NbdServer::Tcp { host, port } | NbdServer::Tls { host, port, .. } => {
            tcp::connect(host, *port, "the NBD server", deadline)
        }
        NbdServer::Unix { socket } => unix::connect(socket, deadline),
    }
    .map_err(|error| error.at(Stage::Dial))
}
