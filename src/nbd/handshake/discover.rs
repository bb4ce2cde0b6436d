//! Discovers the exports of a server: its list, then each export of the list.

use std::io::{Read, Write};

use super::server::Server;
use super::wire::OptionCode;
use super::{Answer, greet, read_list, request_export, with_handshake_stage};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::nbd::export::Export;
use crate::nbd::violation::violation;

/// The limit for all answers about exports together, in bytes. Each of 65,536 exports needs 26
/// bytes for its size, flags and block sizes.
const LONGEST_ANSWERS: usize = 8 << 20;

/// One export that a server lists, and what the server reports of it.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DiscoveredExport {
    /// Its name: free text, which may hold control characters, so show it with
    /// `{:?}`.
    pub name: String,
    /// The server's description, escaped and cut for display; `None` if it sent none.
    pub description: Option<String>,
    /// Its size, flags and block sizes; `None` if the server does not report them.
    pub export: Option<Export>,
    /// Why the server does not report them.
    pub error: Option<Error>,
}

impl DiscoveredExport {
    /// Whether the server has not refused the export: it may report more to a client that
    /// opens it.
    pub(in crate::nbd) fn may_say_more(&self) -> bool {
        let error = self.error.as_ref().map(Error::kind);
        matches!(error, Some(ErrorKind::Protocol | ErrorKind::NotSupported))
    }
}

/// The exports that a server lists (`OPT_LIST`), each with its size, flags and block sizes
/// (`OPT_INFO`), in the order of the list. None is opened for I/O. The stream cannot be used
/// afterwards. Its reads and writes must end by themselves when `deadline` passes, as those of
/// [`nbd::discover`](crate::nbd::discover) do.
///
/// If the server refuses to report an export, or reports values that no export can have, the
/// export has the reason as its error. If the server does not know `OPT_INFO`, it is not asked
/// about the other exports.
///
/// # Errors
/// Those of [`list`](super::list); `Protocol` also if the answers about the exports hold more
/// than 8 MiB together.
pub fn discover(
    stream: &mut (impl Read + Write),
    deadline: Deadline,
) -> Result<Vec<DiscoveredExport>> {
    with_handshake_stage(stream, deadline, |server| {
        greet(server)?;
        discover_exports(server)
    })
}

/// As [`discover`], after [`start_tls`](super::start_tls).
#[cfg(feature = "tls")]
pub(in crate::nbd) fn discover_in_tls(
    stream: &mut (impl Read + Write),
    deadline: Deadline,
) -> Result<Vec<DiscoveredExport>> {
    with_handshake_stage(stream, deadline, discover_exports)
}

fn discover_exports<S: Read + Write>(server: &mut Server<'_, S>) -> Result<Vec<DiscoveredExport>> {
    let listed = match read_list(server)? {
        Ok(listed) => listed,
        Err(refusal) => {
            server.abort();
            return Err(refusal.into_error("the list of exports"));
        }
    };
    let mut found = Vec::with_capacity(listed.len());
    let mut knows_info = true;
    let mut length = 0;
    for listed in listed {
        let described = if knows_info {
            match request_export(server, OptionCode::Info, &listed.name, &mut length)? {
                Answer::Export(export) => export,
                Answer::Refused(refusal) => {
                    knows_info = !refusal.is_unsupported();
                    Err(refusal.into_error(&format!("to describe the export {:?}", listed.name)))
                }
            }
        } else {
            let message = "the NBD server says no more of its exports than their names";
            Err(Error::new(ErrorKind::NotSupported, message))
        };
        if length > LONGEST_ANSWERS {
            let expected = "at most 8 MiB for all exports together";
            return Err(violation(
                "description of the exports",
                "too long",
                expected,
            ));
        }
        let (export, error) = match described {
            Ok(export) => (Some(export), None),
            Err(error) => (None, Some(error)),
        };
        found.push(DiscoveredExport {
            name: listed.name,
            description: listed.description,
            export,
            error,
        });
    }
    server.abort();
    Ok(found)
}
