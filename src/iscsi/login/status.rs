//! The status of a login as an error (RFC 7143, 11.13.5).

use crate::error::{Error, ErrorKind};
use crate::iscsi::{PEER, violation};

/// The error for a status class and detail that are neither success nor a redirect.
pub(super) fn failure(class: u8, detail: u8) -> Error {
    let (kind, why) = match (class, detail) {
        (2, 1) => (ErrorKind::NotPermitted, "authentication failed"),
        (2, 2) => (
            ErrorKind::NotPermitted,
            "the initiator is not allowed there",
        ),
        (2, 3) => (ErrorKind::NotFound, "there is no such target"),
        (2, 4) => (ErrorKind::NotFound, "the target was removed"),
        (2, 5) => (ErrorKind::NotSupported, "it does not speak this version"),
        (2, 6) => (ErrorKind::NotReady, "the session has too many connections"),
        (2, 7) => (ErrorKind::Refused, "it misses a parameter"),
        (2, 8) => (ErrorKind::Refused, "it cannot include the connection"),
        (2, 9) => (ErrorKind::NotSupported, "it has no sessions of this kind"),
        (2, 10) => (ErrorKind::Refused, "it knows no such session"),
        (2, 11) => (ErrorKind::Refused, "it takes the request for invalid"),
        (2, _) => (ErrorKind::Refused, "for a fault of ours"),
        (3, 1) => (ErrorKind::NotReady, "the target is not available now"),
        (3, 2) => (ErrorKind::NotReady, "it is out of resources"),
        (3, _) => (ErrorKind::NotReady, "for a fault of its own"),
        _ => return violation("Status-Class", class, "0 to 3"),
    };
    let message = format!("{PEER} refused the login: {why} (status {class:02x}{detail:02x})");
    Error::new(kind, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Retry;

    #[test]
    fn the_status_decides_the_kind_and_is_shown() {
        for (class, detail, kind) in [
            (2, 0, ErrorKind::Refused),
            (2, 1, ErrorKind::NotPermitted),
            (2, 2, ErrorKind::NotPermitted),
            (2, 3, ErrorKind::NotFound),
            (2, 255, ErrorKind::Refused),
            (3, 0, ErrorKind::NotReady),
            (3, 255, ErrorKind::NotReady),
            (4, 0, ErrorKind::Protocol),
        ] {
            assert_eq!(failure(class, detail).kind(), kind, "{class} {detail}");
        }
        assert!(failure(2, 11).to_string().contains("(status 020b)"));
        assert_eq!(failure(3, 1).retry(), Retry::Again);
    }
}
