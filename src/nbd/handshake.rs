//! The fixed newstyle handshake (`proto.md`, "Newstyle negotiation").
//!
//! [`negotiate`] runs the handshake up to the last byte of the server's ACK and reads
//! nothing after it: the following bytes are for the kernel. Functions without I/O
//! encode and decode the messages.
//!
//! The server is not trusted. Every length and every count has a limit, which is checked
//! before any allocation. The server's texts are shown quoted, escaped and cut.

mod discover;
mod info;
mod refusal;
mod server;
mod wire;

use std::io::{Read, Write};

#[cfg(feature = "tls")]
pub(super) use self::discover::discover_in_tls;
pub use self::discover::{DiscoveredExport, discover};
pub use self::info::ListedExport;
use self::info::{Infos, LONGEST_NAME};
use self::refusal::Refusal;
use self::server::Server;
pub(super) use self::wire::Greeting;
use self::wire::{OptionCode, ReplyHeader};
use super::export::Export;
use super::violation::violation;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};

/// More infos than a server needs for one export.
const MOST_INFOS: usize = 64;
/// The limit for all replies to LIST together: 1,000 exports with the longest names.
const LONGEST_LIST: usize = 4 << 20;
const MOST_EXPORTS: usize = 65_536;

/// Negotiates the export `name` with `OPT_GO`, or with `EXPORT_NAME` if the server
/// answers that it does not know `OPT_GO`. The stream is then in the transmission
/// phase, with only simple replies negotiated, and no byte of that phase has been
/// read.
///
/// The stream's own reads and writes must end when `deadline` passes, as those of
/// [`dial`](super::dial()) do. This function checks the deadline only between them.
///
/// # Errors
/// `Unreachable` if the server closes or the connection breaks; `Protocol`, with the
/// field, if the server breaks the protocol; `NotFound` if it has no such export;
/// `NotSupported` if it speaks an older protocol or insists on TLS; `NotPermitted`,
/// `NotReady` (it is shutting down) or `Refused` by its answer; `InvalidInput` for a
/// name over 4096 bytes; `TimedOut` at stage `handshake`. After an error the stream
/// cannot be used.
pub fn negotiate(
    stream: &mut (impl Read + Write),
    name: &str,
    deadline: Deadline,
) -> Result<Export> {
    with_handshake_stage(stream, deadline, |server| {
        require_length(name)?;
        let greeting = greet(server)?;
        negotiate_export(server, greeting, name)
    })
}

/// Greets the server and requests TLS. The next byte on the stream is the first byte
/// of TLS.
///
/// # Errors
/// Those of [`negotiate`]; `NotSupported` at stage `tls` if the server has no TLS.
#[cfg(feature = "tls")]
pub(super) fn start_tls(stream: &mut (impl Read + Write), deadline: Deadline) -> Result<Greeting> {
    const WHAT: &str = "the reply to STARTTLS";
    with_handshake_stage(stream, deadline, |server| {
        let greeting = greet(server)?;
        server.write("STARTTLS", &wire::option(OptionCode::StartTls, &[]))?;
        let reply = ReplyHeader::decode(&server.read(WHAT)?, OptionCode::StartTls)?;
        let payload = server.payload(WHAT, reply)?;
        if reply.kind == ReplyHeader::ACK {
            return wire::empty_ack(&payload).map(|()| greeting);
        }
        let refusal = Refusal::decode(reply.kind, &payload)?;
        server.abort();
        // nbdkit answers that its policy forbids TLS. Other servers do not know the
        // option.
        let refused = refusal.into_error("TLS, which it may not have");
        Err(refused.with_kind(ErrorKind::NotSupported).at(Stage::Tls))
    })
}

/// Like [`negotiate`], after [`start_tls`].
#[cfg(feature = "tls")]
pub(super) fn negotiate_in_tls(
    greeting: Greeting,
    stream: &mut (impl Read + Write),
    name: &str,
    deadline: Deadline,
) -> Result<Export> {
    with_handshake_stage(stream, deadline, |server| {
        require_length(name)?;
        negotiate_export(server, greeting, name)
    })
}

fn with_handshake_stage<S: Read + Write, T>(
    stream: &mut S,
    deadline: Deadline,
    talk: impl FnOnce(&mut Server<'_, S>) -> Result<T>,
) -> Result<T> {
    talk(&mut Server::new(stream, deadline)).map_err(|error| error.at(Stage::Handshake))
}

/// The exports that a server lists. The stream cannot be used afterwards.
///
/// # Errors
/// Those of [`negotiate`]; `NotPermitted` if the server does not list its exports.
pub fn list(stream: &mut (impl Read + Write), deadline: Deadline) -> Result<Vec<ListedExport>> {
    with_handshake_stage(stream, deadline, |server| {
        greet(server)?;
        request_list(server)
    })
}

/// Like [`list`], after [`start_tls`].
#[cfg(feature = "tls")]
pub(super) fn list_in_tls(
    stream: &mut (impl Read + Write),
    deadline: Deadline,
) -> Result<Vec<ListedExport>> {
    with_handshake_stage(stream, deadline, request_list)
}

fn request_list<S: Read + Write>(server: &mut Server<'_, S>) -> Result<Vec<ListedExport>> {
    let listed = read_list(server)?;
    server.abort();
    listed.map_err(|refusal| refusal.into_error("the list of exports"))
}

fn negotiate_export<S: Read + Write>(
    server: &mut Server<'_, S>,
    greeting: Greeting,
    name: &str,
) -> Result<Export> {
    match go(server, name)? {
        Ok(export) => Ok(export),
        Err(refusal) if refusal.is_unsupported() => export_name(server, greeting, name),
        Err(refusal) => {
            server.abort();
            Err(refusal.into_error(&format!("the export {name:?}")))
        }
    }
}

fn require_length(name: &str) -> Result<()> {
    if name.len() <= LONGEST_NAME {
        return Ok(());
    }
    let message = format!("the export's name has {} bytes: at most 4096", name.len());
    Err(Error::new(ErrorKind::InvalidInput, message))
}

fn greet<S: Read + Write>(server: &mut Server<'_, S>) -> Result<Greeting> {
    let bytes = server.read::<{ Greeting::LENGTH }>("the greeting")?;
    let greeting = Greeting::decode(&bytes)?;
    server.write("the client flags", &greeting.client_flags())?;
    Ok(greeting)
}

/// The inner error is the server's refusal.
fn go<S: Read + Write>(server: &mut Server<'_, S>, name: &str) -> Result<Result<Export, Refusal>> {
    match request_export(server, OptionCode::Go, name, &mut 0)? {
        Answer::Export(export) => export.map(Ok),
        Answer::Refused(refusal) => Ok(Err(refusal)),
    }
}

/// A server's answer about one export. The server then accepts more options.
enum Answer {
    /// The error is about values that no export can have.
    Export(Result<Export>),
    Refused(Refusal),
}

/// Requests one export with `OPT_GO` or `OPT_INFO`, and adds the bytes of the answer
/// to `length`.
fn request_export<S: Read + Write>(
    server: &mut Server<'_, S>,
    option: OptionCode,
    name: &str,
    length: &mut usize,
) -> Result<Answer> {
    const WHAT: &str = "the reply to OPT_GO or OPT_INFO";
    server.write("OPT_GO or OPT_INFO", &wire::export_request(option, name))?;
    let mut infos = Infos::default();
    for _ in 0..=MOST_INFOS {
        let reply = ReplyHeader::decode(&server.read(WHAT)?, option)?;
        let payload = server.payload(WHAT, reply)?;
        *length += payload.len();
        match reply.kind {
            ReplyHeader::ACK => return Ok(Answer::Export(infos.finish(name, &payload))),
            ReplyHeader::INFO => infos.add(&payload)?,
            kind => return Refusal::decode(kind, &payload).map(Answer::Refused),
        }
    }
    Err(violation(
        "number of replies to OPT_GO or OPT_INFO",
        "too large",
        "at most 64 before the ACK",
    ))
}

/// Negotiates with the one option that has neither a reply header nor error replies.
fn export_name<S: Read + Write>(
    server: &mut Server<'_, S>,
    greeting: Greeting,
    name: &str,
) -> Result<Export> {
    const WHAT: &str =
        "the reply to EXPORT_NAME (it closes the connection where it has no such export)";
    let option = wire::option(OptionCode::ExportName, name.as_bytes());
    server.write("EXPORT_NAME", &option)?;
    let bytes = server.read::<{ wire::EXPORT_NAME_REPLY }>(WHAT)?;
    if !greeting.no_zeroes() {
        server.read::<{ wire::ZEROES }>("the zeroes after EXPORT_NAME")?;
    }
    let (size, flags) = wire::export_name_reply(&bytes);
    Export::new(name, size, flags, None)
}

fn read_list<S: Read + Write>(
    server: &mut Server<'_, S>,
) -> Result<Result<Vec<ListedExport>, Refusal>> {
    const WHAT: &str = "the reply to OPT_LIST";
    server.write("OPT_LIST", &wire::option(OptionCode::List, &[]))?;
    let mut exports = Vec::new();
    let mut length = 0_usize;
    while exports.len() <= MOST_EXPORTS && length <= LONGEST_LIST {
        let reply = ReplyHeader::decode(&server.read(WHAT)?, OptionCode::List)?;
        let payload = server.payload(WHAT, reply)?;
        match reply.kind {
            ReplyHeader::ACK => return wire::empty_ack(&payload).map(|()| Ok(exports)),
            ReplyHeader::SERVER => exports.push(info::listed(&payload)?),
            kind => return Refusal::decode(kind, &payload).map(Err),
        }
        length += payload.len();
    }
    Err(violation(
        "list of exports",
        "too long",
        "at most 65536 exports and 4 MiB",
    ))
}

#[cfg(test)]
mod tests;
