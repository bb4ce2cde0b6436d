//! Dials a server: from an address to a socket that the kernel can take over.

mod unix;

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use super::export::Export;
use super::handshake::{self, DiscoveredExport, ListedExport};
use super::tls;
use super::tls_info::TlsInfo;
use crate::deadline::Deadline;
use crate::error::{ErrorKind, Result, Stage};
use crate::id::{NbdServer, NbdUri};
use crate::kernel::{stream::DeadlineStream, tcp};

/// A connection in the transmission phase. No byte of that phase has been read yet.
#[derive(Debug)]
#[non_exhaustive]
pub struct Connection {
    /// The socket: blocking, without receive or send timeout (a timeout would end an idle
    /// connection), closed on exec.
    pub stream: OwnedFd,
    /// The export that the server serves on it.
    pub export: Export,
    /// Its TLS; `None` for a connection without TLS.
    pub tls: Option<TlsInfo>,
}

/// Connects to the server of `uri` and negotiates the export, all within `deadline`. It
/// tries a host's addresses one after the other, each for an equal share of the remaining
/// time.
///
/// A TCP socket sends at once (`TCP_NODELAY`). The kernel gives the connection up, so that
/// it is known to be dead, after 30 seconds in which sent data is not acknowledged or not
/// taken (`TCP_USER_TIMEOUT`). It also gives an idle connection up after 30 seconds of
/// unanswered probes (keepalive, first sent after 10 seconds).
///
/// For `nbds://` it requests TLS, and sends no other request without TLS. The kernel takes
/// over the keys (kTLS, Linux 5.11), so the socket is used like a TCP socket.
///
/// A failure leaves no socket behind. The resolution of a host's name cannot be cancelled:
/// after a timeout its thread stays until the resolver returns.
///
/// # Errors
/// `Unreachable` if there is no server, it closes, or the connection breaks;
/// `NotPermitted` if the Unix socket may not be opened; `TimedOut` at stage `resolve`,
/// `dial`, `tls` or `handshake`; the errors of [`negotiate`](handshake::negotiate). At
/// stage `tls`: `IdentityMismatch` if the server's certificate does not prove its name,
/// `NotPermitted` if the server wants another certificate of the client, `NotSupported` if
/// both share no cipher or the kernel has no TLS, `InvalidInput` for files that hold no
/// certificates, and `Quarantined` while an earlier read of these files has not returned.
pub fn dial(uri: &NbdUri, deadline: Deadline) -> Result<Connection> {
    dial_export(uri.server(), uri.export(), deadline)
}

fn dial_export(server: &NbdServer, name: &str, deadline: Deadline) -> Result<Connection> {
    let stream = connect(server, deadline)?;
    let (export, tls) = if let NbdServer::Tls { .. } = server {
        let (export, tls) = tls::negotiate(&stream, server, name, deadline)?;
        (export, Some(tls))
    } else {
        let mut talk = DeadlineStream::new(stream.as_fd(), deadline);
        (handshake::negotiate(&mut talk, name, deadline)?, None)
    };
    tracing::debug!(%server, name, size = export.size, flags = ?export.flags, "the handshake succeeded");
    Ok(Connection {
        stream,
        export,
        tls,
    })
}

/// Like [`dial`], for a device with the request timeout `request`. The kernel gives a TCP
/// connection up after that time instead of 30 seconds, unless it is zero or unknown.
pub(crate) fn dial_for_device(
    uri: &NbdUri,
    request: Option<Duration>,
    deadline: Deadline,
) -> Result<Connection> {
    let connection = dial(uri, deadline)?;
    if let Some(request) = request.filter(|request| !request.is_zero()) {
        give_up_after(&connection.stream, request).map_err(|error| error.at(Stage::Dial))?;
    }
    Ok(connection)
}

pub(crate) use tcp::give_up_after;

/// Connects to `server` and requests its list of exports.
///
/// # Errors
/// Those of [`dial`] and [`list`](handshake::list).
pub fn list_exports(server: &NbdServer, deadline: Deadline) -> Result<Vec<ListedExport>> {
    let stream = connect(server, deadline)?;
    if let NbdServer::Tls { .. } = server {
        return tls::list(&stream, server, deadline);
    }
    handshake::list(&mut DeadlineStream::new(stream.as_fd(), deadline), deadline)
}

/// Connects to `server` and requests its exports, each with its size and flags, all within
/// `deadline`. It does not use the kernel's NBD driver, and needs no privilege.
///
/// Some servers report the size of an export only to a client that opens it: nbd-server, and
/// those that do not know `OPT_INFO`. This opens each such export over a separate connection,
/// one after the other, and reads nothing of it. Each has an equal share of the remaining time.
/// Over TLS that needs the kernel's TLS, as in [`dial`].
///
/// # Errors
/// Those of [`dial`] and [`discover`](handshake::discover). After a timeout, as after any
/// failure, no socket is left. A failure to open one export, also a timeout, is that export's
/// [`error`](DiscoveredExport::error).
pub fn discover(server: &NbdServer, deadline: Deadline) -> Result<Vec<DiscoveredExport>> {
    let stream = connect(server, deadline)?;
    let mut found = if let NbdServer::Tls { .. } = server {
        tls::discover(&stream, server, deadline)?
    } else {
        let mut talk = DeadlineStream::new(stream.as_fd(), deadline);
        handshake::discover(&mut talk, deadline)?
    };
    drop(stream);
    let mut left = found.iter().filter(|export| export.may_say_more()).count();
    for export in found.iter_mut().filter(|export| export.may_say_more()) {
        let share = deadline.remaining() / u32::try_from(left).unwrap_or(u32::MAX);
        left -= 1;
        match dial_export(server, &export.name, deadline.at_most(share)) {
            Ok(opened) => {
                export.export = Some(opened.export);
                export.error = None;
            }
            // A server that takes no second client has said why it gives no size.
            Err(error) if error.kind() == ErrorKind::Unreachable && export.error.is_some() => {}
            Err(error) => export.error = Some(error),
        }
    }
    Ok(found)
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
