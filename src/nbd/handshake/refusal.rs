//! A server's error replies.

use crate::error::{Error, ErrorKind, Result, escape_untrusted};
use crate::nbd::violation::violation;

/// An error reply: its code, and the server's text.
#[derive(Debug)]
pub(super) struct Refusal {
    code: u32,
    text: String,
}

/// This bit is set in every error reply's type.
const ERROR: u32 = 1 << 31;
const UNSUPPORTED: u32 = 1;

impl Refusal {
    /// Decodes a reply that is neither the answer nor its end.
    pub(super) fn decode(kind: u32, payload: &[u8]) -> Result<Self> {
        if kind & ERROR == 0 {
            return Err(violation(
                "type of a reply",
                kind,
                "one that answers the option",
            ));
        }
        Ok(Self {
            code: kind & !ERROR,
            text: escape_untrusted(payload),
        })
    }

    /// Whether the server does not know the option. Only then may the client
    /// try an older option.
    pub(super) fn is_unsupported(&self) -> bool {
        self.code == UNSUPPORTED
    }

    /// `asked` names the request in the error.
    pub(super) fn into_error(self, asked: &str) -> Error {
        let (kind, why) = match self.code {
            UNSUPPORTED => (ErrorKind::NotSupported, "it does not know the option"),
            2 => (ErrorKind::NotPermitted, "its policy forbids it"),
            3 => (ErrorKind::Refused, "it takes the request for invalid"),
            4 => (ErrorKind::NotSupported, "its platform does not support it"),
            5 => (
                ErrorKind::NotSupported,
                "it insists on TLS: name it with nbds://",
            ),
            6 => (ErrorKind::NotFound, "it has no such export"),
            7 => (ErrorKind::NotReady, "it is shutting down"),
            8 => (ErrorKind::Refused, "it insists on its block sizes"),
            9 => (ErrorKind::Refused, "the request is too long for it"),
            10 => (ErrorKind::NotSupported, "it insists on extended headers"),
            _ => (ErrorKind::Refused, "with an error that is not known"),
        };
        let Self { code, text } = self;
        let words = match text.as_str() {
            "" => String::new(),
            text => format!(", in its words \"{text}\""),
        };
        let message = format!("the NBD server refused {asked}: {why} (error {code}){words}");
        Error::new(kind, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Retry;

    fn error(code: u32, text: &[u8]) -> Error {
        let refusal = Refusal::decode(ERROR | code, text).unwrap();
        refusal.into_error("the export \"a\"")
    }

    #[test]
    fn the_code_decides_the_kind_and_the_servers_words_are_shown() {
        let unknown = error(6, b"export 'a' not present");
        assert_eq!(unknown.kind(), ErrorKind::NotFound);
        assert_eq!(
            unknown.to_string(),
            r#"the NBD server refused the export "a": it has no such export (error 6), in its words "export 'a' not present""#
        );
        assert_eq!(error(2, b"").kind(), ErrorKind::NotPermitted);
        assert_eq!(error(5, b"").kind(), ErrorKind::NotSupported);
        assert_eq!(error(7, b"").retry(), Retry::Again);
        assert_eq!(error(12345, b"").kind(), ErrorKind::Refused);
    }

    #[test]
    fn a_reply_that_answers_nothing_is_no_refusal() {
        let error = Refusal::decode(2, b"").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
    }
}
