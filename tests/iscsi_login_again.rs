//! The re-login of a lost session: a target recognises the session by its ISID, and waiting I/O
//! continues with the next command number.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

mod iscsi_target;

use std::time::Duration;

use iscsi_target::*;
use lunbd::Deadline;
use lunbd::iscsi::{SessionName, SessionOptions, connect_again};

#[test]
fn a_login_again_says_the_sessions_isid_and_the_number_of_its_next_command() {
    const NUMBER: u32 = 0x0102_0304;
    let place = Place::new();
    let name = SessionName {
        initiator: "iqn.2026-01.example:me".parse().unwrap(),
        target: "iqn.2026-01.example:array".parse().unwrap(),
        portal: place.portal(),
    };
    let isid = name.isid();
    let look = move |talk: &Talk| {
        talk.must(talk.header[8..14] == isid.0, "the session's ISID")?;
        talk.must(talk.header[24..28] == NUMBER.to_be_bytes(), "its number")
    };
    let target = place.play(vec![Box::new(move |talk| {
        talk.take(0x43)?;
        look(talk)?;
        talk.login(TO_OPERATIONAL, "AuthMethod=None\0TargetPortalGroupTag=1\0")?;
        talk.take(0x43)?;
        look(talk)?;
        talk.login(TO_FULL, "HeaderDigest=None\0DataDigest=None\0")
    })]);
    let options = SessionOptions::new(name.initiator.clone());
    let deadline = Deadline::after(Duration::from_secs(25));
    connect_again(&name, &options, || Ok(NUMBER), deadline).unwrap();
    target.finish();
}
