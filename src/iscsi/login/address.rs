//! Parses a portal in the form in which a target names it.

use crate::error::Result;
use crate::id::{Portal, PortalHost};
use crate::iscsi::text::Pair;

/// Parses a `TargetAddress`: a portal, and the tag of its group if it has one.
pub(in crate::iscsi) fn target_address(pair: &Pair<'_>) -> Result<(Portal, Option<u16>)> {
    let (address, tag) = match pair.value.rsplit_once(',') {
        Some((address, tag)) => (address, Some(tag)),
        None => (pair.value, None),
    };
    // A zone would be an interface of the target's machine.
    let has_no_zone = |portal: &Portal| !matches!(portal.host(), PortalHost::LinkLocal { .. });
    let portal = address.parse().ok().filter(has_no_zone);
    let group = match tag {
        Some(value) => {
            let number = Pair { value, ..*pair }.number(0..=0xffff).ok();
            number
                .and_then(|number| u16::try_from(number).ok())
                .map(Some)
        }
        None => Some(None),
    };
    portal.zip(group).ok_or_else(|| {
        pair.violation("HOST[:PORT][,TAG], an IPv6 address in brackets and without a zone")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn an_address_has_a_port_and_a_tag_or_not() {
        let read = |value| {
            let key = "TargetAddress";
            target_address(&Pair { key, value }).map(|(portal, tag)| (portal.to_string(), tag))
        };
        let all = |text: &str, tag| (text.to_owned(), tag);
        assert_eq!(read("10.0.0.1").unwrap(), all("10.0.0.1:3260", None));
        assert_eq!(
            read("10.0.0.1:9,65535").unwrap(),
            all("10.0.0.1:9", Some(65535))
        );
        assert_eq!(read("[::1]:3260,1").unwrap(), all("[::1]:3260", Some(1)));
        assert_eq!(
            read("array.example,0x2").unwrap(),
            all("array.example:3260", Some(2))
        );
        for value in [
            "",
            ",1",
            "::1,1",
            "10.0.0.1:3260,",
            "h,65536",
            "h,x",
            "h:0,1",
            "h,1,1",
            "[fe80::1%eth0]:3260,1",
        ] {
            let error = read(value).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains("TargetAddress"), "{error}");
        }
    }
}
