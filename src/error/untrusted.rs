//! Errors that quote what a peer sent.

use std::fmt;

use super::{Error, ErrorKind};

impl Error {
    /// The error for a field that `peer` ("the NBD server") sent and its protocol does not
    /// allow.
    pub(crate) fn protocol_violation(
        peer: &str,
        field: &str,
        found: impl fmt::Display,
        expected: &str,
    ) -> Self {
        let message = format!("{peer} broke the protocol: {field} is {found}, expected {expected}");
        Self::new(ErrorKind::Protocol, message)
    }
}

/// A peer's text, safe to print: one escaped line of at most 200 characters.
pub(crate) fn escape_untrusted(text: &[u8]) -> String {
    const LONGEST: usize = 200;
    let text = String::from_utf8_lossy(text);
    let mut characters = text.trim().chars();
    let mut shown = String::new();
    for character in characters.by_ref().take(LONGEST) {
        match character {
            '\'' => shown.push('\''),
            other => shown.extend(other.escape_debug()),
        }
    }
    if characters.next().is_some() {
        shown.push_str("...");
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_words_cannot_forge_a_line_or_fill_a_log() {
        assert_eq!(
            escape_untrusted(b" a\nb\x1b[31m\0\xff "),
            "a\\nb\\u{1b}[31m\\0\u{fffd}"
        );
        assert_eq!(escape_untrusted("\u{202e}x".as_bytes()), "\\u{202e}x");
        let long = escape_untrusted(&vec![b'x'; 65_536]);
        assert_eq!(long.len(), 203);
        assert!(long.ends_with("..."));
    }
}
