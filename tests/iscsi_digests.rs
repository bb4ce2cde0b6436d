//! Logins that require checksums, with targets that do not accept them.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

mod iscsi_target;

use std::time::Duration;

use iscsi_target::*;
use lunbd::iscsi::{SessionName, SessionOptions, connect};
use lunbd::{Deadline, ErrorKind};

#[test]
fn a_target_that_takes_no_checksum_is_refused_where_it_is_required_and_else_not() {
    for (taken, lacking) in [
        ("HeaderDigest=CRC32C\0DataDigest=CRC32C\0", None),
        ("HeaderDigest=CRC32C\0DataDigest=None\0", Some("data")),
        ("HeaderDigest=None\0DataDigest=CRC32C\0", Some("headers")),
        // The target does not answer the offered key.
        ("", Some("headers")),
    ] {
        for is_required in [true, false] {
            let target = Target::one(move |talk| {
                talk.until_operational()?;
                let offered = talk.value("DataDigest");
                talk.must(offered.as_deref() == Some("CRC32C,None"), "an offer")?;
                talk.login(TO_FULL, taken)
            });
            let name = SessionName {
                initiator: "iqn.2026-01.example:me".parse().unwrap(),
                target: "iqn.2026-01.example:it".parse().unwrap(),
                portal: target.portal().clone(),
            };
            let options = SessionOptions::new(name.initiator.clone());
            let options = if is_required {
                options.require_digests()
            } else {
                options.digests(true, true)
            };
            let deadline = Deadline::after(Duration::from_secs(25));
            let connected = connect(&name, &options, deadline);
            target.finish();
            match lacking.filter(|_| is_required) {
                Some(over) => {
                    let error = connected.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
                    assert!(error.to_string().contains(over), "{error}");
                }
                None => assert_eq!(connected.unwrap().session.requires_digests, is_required),
            }
        }
    }
}
