//! Sessions that were created with CHAP or with required digests, and recoveries that do not
//! know of it.

use std::fs;
use std::time::Duration;

use lunbd::engine::{SessionRecoveryOptions, SessionRecoveryOutcome};
use lunbd::iscsi::{Credentials, Secret, SessionOptions};
use lunbd::{AttachRequest, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, session_of, soon};
use vm_tests::guest::iscsi_target::IscsiTarget;
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::INITIATOR;
use vm_tests::guest::keeping::Keeping;
use vm_tests::guest::served::Served;
use vm_tests::guest::writer::Writer;

const IQN: &str = "iqn.2026-01.example:proof";
const USER: (&str, &str) = ("keeper", "what-the-keeper-knows");
const LIMIT: Duration = Duration::from_secs(60);
const TARGET: (&str, &str) = ("array", "what-the-array-knows");

fn credentials() -> Credentials {
    let [own, targets] = [USER.1, TARGET.1].map(|secret| Secret::new(secret).unwrap());
    let one_way = Credentials::new(USER.0, own).unwrap();
    one_way.mutual(Some(TARGET.0.to_owned()), targets).unwrap()
}

#[test]
fn a_session_with_required_digests_is_marked_and_recovers_with_digests() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1], 16 << 20);
    let source: Source = target.uri(&[0], 1).parse().unwrap();
    let options = SessionOptions::new(INITIATOR.parse().unwrap()).require_digests();
    let request = AttachRequest::new(source.clone()).log_in(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    let session = session_of(&attachment);
    let mark = attribute(session, "username");
    assert_eq!(mark, "lunbd:digests-required");
    let writer = Writer::start(&attachment.node);
    writer.goes_on();
    // The session is lost before a recovery sees it, so only the mark shows that it requires
    // digests.
    target.cut(0);
    guest::wait_until("the loss", LIMIT, || {
        (attribute(session, "state") != "LOGGED_IN").then_some(())
    });
    let keeping = Keeping::start(&engine);
    keeping.wait_until_recovered(1);
    for digest in ["header_digest", "data_digest"] {
        assert_eq!(attribute(session, digest), "1", "{digest}");
    }
    assert_eq!(attribute(session, "username"), mark);
    writer.goes_on();
    writer.end();
    keeping.end();
    engine.detach(source, soon()).unwrap();
    nothing_is_left();
}

#[test]
fn an_attach_that_requires_digests_refuses_a_session_that_has_none_until_its_last_device_is_gone() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1, 2], 8 << 20);
    let [first, second] = [1, 2].map(|lun| target.uri(&[0], lun).parse::<Source>().unwrap());
    let options = SessionOptions::new(INITIATOR.parse().unwrap());
    let request = AttachRequest::new(first.clone()).log_in(options.clone());
    engine.attach(&request, soon()).unwrap();
    let request = AttachRequest::new(second.clone()).log_in(options.require_digests());
    let error = engine.attach(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error:#}");
    assert!(error.to_string().contains("which is required"), "{error:#}");
    engine.detach(first, soon()).unwrap();
    let attachment = engine.attach(&request, soon()).unwrap();
    assert_eq!(attachment.paths()[0].unmet_settings, []);
    engine.detach(second, soon()).unwrap();
    nothing_is_left();
}

/// The pages of its disk may change while they are written, and a digest of them would be false.
#[test]
fn a_session_without_digests_gets_none_over_data_from_a_recovery_that_offers_them() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1], 16 << 20);
    let source: Source = target.uri(&[0], 1).parse().unwrap();
    let options = SessionOptions::new(INITIATOR.parse().unwrap());
    let request = AttachRequest::new(source.clone()).log_in(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    let session = session_of(&attachment);
    let disk = attachment.node.file_name().unwrap().to_str().unwrap();
    let stable = fs::read_to_string(format!("/sys/block/{disk}/queue/stable_writes")).unwrap();
    assert_eq!(stable.trim(), "0");
    let writer = Writer::start(&attachment.node);
    writer.goes_on();
    target.cut(0);
    guest::wait_until("the loss", LIMIT, || {
        (attribute(session, "state") != "LOGGED_IN").then_some(())
    });
    let offered = SessionRecoveryOptions::new().digests(true, true);
    let keeping = Keeping::start_with(&engine, offered);
    keeping.wait_until_recovered(1);
    assert_eq!(attribute(session, "header_digest"), "1");
    assert_eq!(attribute(session, "data_digest"), "0");
    writer.goes_on();
    writer.end();
    keeping.end();
    engine.detach(source, soon()).unwrap();
    nothing_is_left();
}

#[test]
fn a_session_made_under_mutual_chap_is_not_resumed_without_proof_and_is_with_it() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1], 16 << 20);
    target.ask_for_chap(USER, Some(TARGET));
    let source: Source = target.uri(&[0], 1).parse().unwrap();
    let options = SessionOptions::new(INITIATOR.parse().unwrap()).credentials(credentials());
    let request = AttachRequest::new(source.clone()).log_in(options);
    let attachment = engine.attach(&request, soon()).unwrap();
    let session = session_of(&attachment);
    let mark = attribute(session, "username_in");
    let writer = Writer::start(&attachment.node);
    writer.goes_on();

    // An impostor asks for no proof and accepts every initiator's writes.
    target.ask_for_no_chap();
    let keeping = Keeping::start(&engine);
    target.cut(0);
    keeping.wait_until("a word of the session", |kept| match &kept.outcome {
        SessionRecoveryOutcome::Recovered => true,
        SessionRecoveryOutcome::Failed(error) => error.kind() == ErrorKind::NotPermitted,
        _ => false,
    });
    for kept in keeping.end() {
        assert!(
            !matches!(kept.outcome, SessionRecoveryOutcome::Recovered),
            "{kept}"
        );
    }
    assert_ne!(attribute(session, "state"), "LOGGED_IN");

    target.ask_for_chap(USER, Some(TARGET));
    let with_proof = SessionRecoveryOptions::new().credentials(|_| Ok(Some(credentials())));
    let keeping = Keeping::start_with(&engine, with_proof);
    keeping.wait_until_recovered(1);
    writer.goes_on();
    writer.end();
    keeping.end();
    assert_eq!(attribute(session, "username_in"), mark);
    let detachment = engine.detach(source, soon()).unwrap();
    assert_eq!(detachment.logged_out.len(), 1, "{detachment:?}");
    nothing_is_left();
}
