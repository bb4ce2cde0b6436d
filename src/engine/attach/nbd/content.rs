//! The names of the content of an NBD volume, as its server serves it.

use crate::deadline::Deadline;
use crate::engine::nbd::same_volume::require_one_volume;
use crate::engine::{AttachRequest, NbdOptions};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{ContentName, NbdUri};
use crate::nbd::{Connection, Content, FirstBytes, content_names_differ, describe_content_names};

/// The first bytes that the server serves over its connections; `None` if it answers the read with
/// an error. The attach then continues if the caller expects no name.
///
/// # Errors
/// `IdentityMismatch` if two connections lead to different volumes.
pub(super) fn read_and_compare(
    connections: &[Connection],
    uri: &NbdUri,
    deadline: Deadline,
) -> Result<Option<FirstBytes>> {
    let Some((first, others)) = connections.split_first() else {
        return Ok(None);
    };
    let content = first.content(deadline)?;
    for other in others {
        require_one_volume(first, other, uri, deadline)?;
    }
    Ok(match content {
        Content::Read(first) => Some(first),
        Content::Unread(error) => {
            tracing::warn!(%uri, error, "the server answers a read of the first bytes with an error");
            None
        }
    })
}

/// The error for connections on which the server reports different exports.
pub(super) fn exports_differ() -> Error {
    let message = "the NBD server reported different export parameters per connection";
    Error::new(ErrorKind::Protocol, message).at(Stage::Handshake)
}

/// # Errors
/// `IdentityMismatch` if the content lacks the expected name.
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
        Some(names) => describe_content_names(names),
        None => "content that its server does not let lunbd read".to_owned(),
    };
    let message = format!("the content of {uri} has {found}, expected {expected}");
    let error = Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Identify);
    Err(error.with_found(content.unwrap_or_default()))
}

/// Requires that the volume still has a name that the journal has of it. The check is waived if the
/// caller accepts any content, or expects a name, which is newer than the journal's.
///
/// # Errors
/// `IdentityMismatch` if the volume has none of the names that the journal has of it, or is
/// another device of the same btrfs; `NotReady` if its server answers the read with an error.
pub(super) fn require_known(
    request: &AttachRequest,
    content: Option<&[ContentName]>,
    uri: &NbdUri,
) -> Result<()> {
    let known = request.known_content.as_deref().unwrap_or_default();
    let is_waived = request.nbd.accepts_content || request.nbd.expected.is_some();
    if is_waived || known.is_empty() {
        return Ok(());
    }
    let (kind, found) = match content {
        Some(names) if !content_names_differ(names, known) => return Ok(()),
        Some(names) => (ErrorKind::IdentityMismatch, describe_content_names(names)),
        None => {
            let unread = "content that its server does not let lunbd read".to_owned();
            (ErrorKind::NotReady, unread)
        }
    };
    let message = format!(
        "the content of {uri} has {found}, and the volume had {} when it was read last: `attach \
         --accept-content` accepts it, and a detach of the volume forgets the old names",
        describe_content_names(known)
    );
    let error = Error::new(kind, message).at(Stage::Identify);
    Err(error.with_found(content.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Source;

    const SOURCE: &str = "nbd://192.0.2.1/vol-7";

    fn names(kinds: &[&str]) -> Vec<ContentName> {
        let name = |kind: &&str| format!("{kind}.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9");
        kinds
            .iter()
            .map(|kind| name(kind).parse().unwrap())
            .collect()
    }

    /// The error of an attach of a volume with `content`, if the journal has `known`.
    fn refusal(
        known: Option<&[&str]>,
        content: Option<&[&str]>,
        options: NbdOptions,
    ) -> Option<Error> {
        let source: Source = SOURCE.parse().unwrap();
        let mut request = AttachRequest::new(source).nbd(options);
        request.known_content = known.map(names);
        let content = content.map(names);
        require_known(&request, content.as_deref(), &SOURCE.parse().unwrap()).err()
    }

    #[test]
    fn a_volume_that_has_none_of_the_names_that_the_journal_has_is_refused_with_both() {
        for (content, spelt) in [(&["luks"][..], "luks.0a1b"), (&[], "no name")] {
            let refusal = refusal(Some(&["fs"]), Some(content), NbdOptions::default()).unwrap();
            assert_eq!(refusal.kind(), ErrorKind::IdentityMismatch);
            let found: Vec<String> = names(content).iter().map(ToString::to_string).collect();
            assert_eq!(refusal.found(), found);
            let text = refusal.to_string();
            for word in [spelt, "had fs.0a1b", "--accept-content"] {
                assert!(text.contains(word), "{text}");
            }
        }
        let unread = refusal(Some(&["fs"]), None, NbdOptions::default()).unwrap();
        assert_eq!(unread.kind(), ErrorKind::NotReady, "{unread}");
    }

    #[test]
    fn a_volume_that_was_blank_or_not_read_or_keeps_a_name_is_no_other_one() {
        for (known, content) in [
            (None, Some(&["fs"][..])),
            (None, None),
            (Some(&[][..]), Some(&["fs"])),
            (Some(&[]), None),
            (Some(&["fs", "luks"]), Some(&["gpt", "luks"])),
            // An earlier version wrote the UUID of a btrfs alone.
            (Some(&["fs"]), Some(&["fs", "btrfs"])),
        ] {
            let refusal = refusal(known, content, NbdOptions::default());
            assert!(refusal.is_none(), "{known:?} {content:?}: {refusal:?}");
        }
    }

    #[test]
    fn another_content_is_taken_where_the_caller_accepts_it_or_names_it() {
        let named = names(&["luks"]).remove(0);
        let default = NbdOptions::default;
        for options in [default().accept_content(), default().expect(named)] {
            let refusal = refusal(Some(&["fs"]), Some(&["luks"]), options);
            assert!(refusal.is_none(), "{refusal:?}");
        }
    }
}
