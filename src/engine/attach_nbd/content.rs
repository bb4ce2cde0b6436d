//! What names the content of an NBD volume, as its server serves it.

use crate::deadline::Deadline;
use crate::engine::NbdOptions;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{ContentName, NbdUri};
use crate::nbd::{Connection, Content, spelt_content};

/// The names that every connection serves; `None` where the server answers the read with
/// an error, which is no reason to keep its volume from a caller that expects no name.
pub(super) fn of_all(
    connections: &[Connection],
    uri: &NbdUri,
    deadline: Deadline,
) -> Result<Option<Vec<ContentName>>> {
    let mut all: Option<Content> = None;
    for connection in connections {
        let content = connection.content(deadline)?;
        if all.as_ref().is_some_and(|others| *others != content) {
            return Err(serves_two());
        }
        all = Some(content);
    }
    Ok(match all {
        Some(Content::Named(names)) => Some(names),
        Some(Content::Unread(error)) => {
            tracing::warn!(%uri, error, "the server answers a read of the first bytes with an error");
            None
        }
        None => None,
    })
}

/// Its connections are not to one volume.
pub(super) fn serves_two() -> Error {
    let message = "the NBD server serves one export otherwise on each connection";
    Error::new(ErrorKind::Protocol, message).at(Stage::Handshake)
}

/// # Errors
/// `IdentityMismatch` where the content lacks the name that is expected.
pub(super) fn require_expected(
    options: &NbdOptions,
    content: Option<&[ContentName]>,
    uri: &NbdUri,
) -> Result<()> {
    let Some(expected) = &options.expected else {
        return Ok(());
    };
    let found = match content {
        Some(names) if names.contains(expected) => return Ok(()),
        Some(names) => spelt_content(names),
        None => "what its server does not let be read".to_owned(),
    };
    let message = format!("the content of {uri} has {found}, expected {expected}");
    Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Identify))
}
