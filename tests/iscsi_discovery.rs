//! Targets that follow the protocol, in all the ways that it allows.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

mod iscsi_target;

use std::io::Write as _;
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use iscsi_target::*;
use lunbd::id::Portal;
use lunbd::iscsi::{Credentials, DiscoveredTarget, DiscoveryOptions, Secret, discover};
use lunbd::{Deadline, ErrorKind};

fn options() -> DiscoveryOptions {
    DiscoveryOptions::new("iqn.2026-01.example:me".parse().unwrap())
}

fn ask(portal: &Portal) -> lunbd::Result<Vec<DiscoveredTarget>> {
    let found = discover(portal, &options(), Deadline::after(Duration::from_secs(20)))?;
    Ok(found.targets)
}

fn list_of(count: usize) -> String {
    let entry =
        |at| format!("TargetName=iqn.2026-01.example:t{at}\0TargetAddress=10.0.0.1:3260,1\0");
    (0..count).map(entry).collect()
}

#[test]
fn a_portal_is_asked_from_the_source_address_and_interface_that_were_chosen() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let portal: Portal = listener.local_addr().unwrap().to_string().parse().unwrap();
    let seen = thread::spawn(move || listener.accept().unwrap().1.ip().to_string());
    let deadline = || Deadline::after(Duration::from_secs(20));
    let bound = options().source_address("127.0.0.77".parse().unwrap());
    // The listener closes at once.
    discover(&portal, &bound, deadline()).unwrap_err();
    assert_eq!(seen.join().unwrap(), "127.0.0.77");
    let absent = options().interface("lunbd-none".parse().unwrap());
    let error = discover(&portal, &absent, deadline()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    let text = error.to_string();
    assert!(text.contains("interface lunbd-none"), "{text}");
}

#[test]
fn a_list_of_a_thousand_targets_comes_in_pdus_that_are_cut_anywhere() {
    let target = Target::one(|talk| {
        talk.until_question()?;
        let list = list_of(1000);
        let chunks: Vec<_> = list.as_bytes().chunks(7001).collect();
        let (end, parts) = chunks.split_last().unwrap();
        for (number, part) in parts.iter().enumerate() {
            let tag = u32::try_from(number).unwrap();
            let mut header = talk.answer(0x24, CONTINUE);
            header[8..16].copy_from_slice(b"the lun.");
            header[20..24].copy_from_slice(&tag.to_be_bytes());
            talk.send(header, part)?;
            talk.take(0x44)?;
            talk.must(talk.header[8..16] == *b"the lun.", "the LUN given back")?;
            talk.must(
                talk.header[20..24] == tag.to_be_bytes(),
                "the tag given back",
            )?;
            talk.must(talk.data.is_empty(), "no text")?;
        }
        talk.text(FINAL, NO_TAG, end)?;
        talk.answer_logout()
    });
    let found = ask(target.portal()).unwrap();
    assert_eq!(found.len(), 1000);
    assert_eq!(found[999].iqn.as_str(), "iqn.2026-01.example:t999");
    assert_eq!(found[999].portals[0].portal.to_string(), "10.0.0.1:3260");
    target.finish();
}

#[test]
fn a_ping_is_answered_and_additional_headers_are_skipped() {
    let target = Target::one(|talk| {
        talk.until_question()?;
        let question = talk.header;
        let mut ping = [0; 48];
        (ping[0], ping[1]) = (0x20, 0x80);
        ping[16..20].copy_from_slice(&[0xff; 4]);
        let mut unanswered = ping;
        unanswered[20..24].copy_from_slice(&[0xff; 4]);
        talk.send(unanswered, b"")?;
        ping[20..24].copy_from_slice(b"ping");
        talk.send(ping, b"data")?;
        talk.take(0x40)?;
        talk.must(talk.header[16..20] == [0xff; 4], "no task")?;
        talk.must(talk.header[20..24] == *b"ping", "the tag given back")?;
        talk.header = question;
        let mut header = talk.answer(0x24, FINAL);
        header[20..24].copy_from_slice(&[0xff; 4]);
        header[4] = 1;
        let mut answer = pdu(header, list_of(1).as_bytes());
        answer.splice(48..48, *b"AHS!");
        talk.stream.write_all(&answer)?;
        talk.answer_logout()
    });
    assert_eq!(ask(target.portal()).unwrap().len(), 1);
    target.finish();
}

#[test]
fn the_login_is_what_the_rfc_wants_and_keys_that_are_not_ours_are_answered() {
    let target = Target::one(|talk| {
        talk.take(0x43)?;
        let first =
            "InitiatorName=iqn.2026-01.example:me\0SessionType=Discovery\0AuthMethod=None\0";
        talk.must(talk.data == first.as_bytes(), "who we are")?;
        talk.must(talk.header[8] == 0x80, "a random ISID")?;
        talk.must(talk.header[14..16] == [0; 2], "a new session")?;
        // The answer comes in two PDUs, cut in the middle of a key.
        talk.login(STAY_IN_SECURITY | CONTINUE, "TargetPortalGroupTag=1\0Auth")?;
        talk.take(0x43)?;
        talk.must(
            talk.data.is_empty() && talk.header[1] == 0,
            "to be told the rest",
        )?;
        talk.login(STAY_IN_SECURITY, "Method=None\0")?;
        talk.take(0x43)?;
        talk.must(talk.data.is_empty(), "nothing new")?;
        talk.must(talk.header[1] == TO_OPERATIONAL, "the wish to go on")?;
        talk.login(TO_OPERATIONAL, "TargetAlias=an array\0")?;
        talk.take(0x43)?;
        talk.must(talk.value("MaxBurstLength").is_none(), "no such offer")?;
        talk.must(
            talk.value("HeaderDigest").as_deref() == Some("None"),
            "no digest",
        )?;
        let own =
            "X-com.example.speed=fast\0MaxBurstLength=262144\0MaxRecvDataSegmentLength=8192\0";
        talk.login(STAY_IN_OPERATIONAL, own)?;
        talk.take(0x43)?;
        let answers = "X-com.example.speed=NotUnderstood\0MaxBurstLength=Irrelevant\0";
        talk.must(talk.data == answers.as_bytes(), "answers")?;
        talk.login(TO_FULL, "")?;
        talk.take(0x44)?;
        talk.text(FINAL, NO_TAG, b"")?;
        talk.answer_logout()
    });
    assert!(ask(target.portal()).unwrap().is_empty());
    target.finish();
}

#[test]
fn credentials_are_not_sent_to_a_target_that_does_not_ask_for_them() {
    let target = Target::one(|talk| {
        talk.take(0x43)?;
        let offered = talk.value("AuthMethod");
        talk.must(offered.as_deref() == Some("CHAP,None"), "both ways")?;
        talk.login(STAY_IN_SECURITY, "AuthMethod=None\0")?;
        talk.take(0x43)?;
        talk.must(talk.data.is_empty(), "no credentials")?;
        talk.login(TO_OPERATIONAL, "")?;
        talk.take(0x43)?;
        talk.login(TO_FULL, "")?;
        talk.take(0x44)?;
        // The tag at the end of a list means nothing.
        talk.text(FINAL, 0, list_of(1).as_bytes())?;
        talk.answer_logout()
    });
    let secret = Secret::new("hush").unwrap();
    let options = options().credentials(Credentials::new("me", secret).unwrap());
    let deadline = Deadline::after(Duration::from_secs(20));
    assert_eq!(
        discover(target.portal(), &options, deadline)
            .unwrap()
            .targets
            .len(),
        1
    );
    target.finish();
}

#[test]
fn a_redirect_is_followed_and_the_portal_that_answered_is_the_targets() {
    let second = Target::one(|talk| {
        talk.until_question()?;
        talk.text(FINAL, NO_TAG, b"TargetName=iqn.2026-01.example:t\0")?;
        talk.answer_logout()
    });
    let to = second.portal().to_string();
    let first = Target::one(move |talk| {
        talk.take(0x43)?;
        talk.status(1, 1, &format!("TargetAddress={to}\0"))?;
        talk.expect_close()
    });
    let found = ask(first.portal()).unwrap();
    assert_eq!(found[0].portals[0].portal, *second.portal());
    first.finish();
    second.finish();
}

#[test]
fn a_goodbye_that_is_not_answered_does_not_cost_the_list() {
    let target = Target::one(|talk| {
        talk.until_question()?;
        talk.text(FINAL, NO_TAG, list_of(2).as_bytes())?;
        talk.take(0x46)?;
        talk.hang();
        Ok(())
    });
    let began = Instant::now();
    assert_eq!(ask(target.portal()).unwrap().len(), 2);
    assert!(began.elapsed() < Duration::from_secs(18));
    target.finish();
}
