use std::time::Duration;

use super::*;
use crate::error::ErrorKind;
use crate::iscsi::FakeSession;
use crate::kernel::Roots;

fn candidate(source: &Source, session: Option<SessionId>) -> TargetRoute<'_> {
    let Source::Iscsi(uri) = source else {
        panic!("{source}");
    };
    let portal = uri.portals().first().unwrap().clone();
    let place = Err(RouteUnavailable {
        reason: MissingReason::NoSession,
        text: String::new(),
        hctl: None,
    });
    TargetRoute {
        target: Some(uri.target()),
        route: Route {
            via: RouteKind::Iscsi { portal, session },
            address: place,
        },
        refusal: None,
    }
}

#[test]
fn a_session_with_one_target_does_not_serve_another_target_of_its_portal() {
    let [one, other] = ["a", "b"].map(|name| {
        let uri = format!("iscsi://10.0.0.1/iqn.2003-01.org.lunbd:{name}/1");
        uri.parse::<Source>().unwrap()
    });
    let request = AttachRequest::new(one.clone()).path(other.clone());
    let options = SessionOptions::new("iqn.2026-01.example:one".parse().unwrap());
    let candidates = [candidate(&one, Some(SessionId(3))), candidate(&other, None)];
    let names = missing_sessions(&candidates, &request, &options);
    let targets: Vec<_> = names.iter().map(|name| name.target.as_str()).collect();
    assert_eq!(targets, ["iqn.2003-01.org.lunbd:b"]);

    // One session's failure is not reported for the other.
    let candidates = [candidate(&one, None), candidate(&other, None)];
    let mut sessions = Sessions::default();
    let no = Error::new(ErrorKind::Refused, "no");
    sessions.failures.extend(names.into_iter().zip([no]));
    let why = candidates.map(|candidate| {
        let name = candidate.missing_session(&options).unwrap();
        sessions.failures.remove(&name).is_some()
    });
    assert_eq!(why, [false, true]);
}

#[test]
fn a_session_that_another_process_has_ended_is_looked_for_again() {
    let root = tempfile::tempdir().unwrap();
    let engine = Engine::start(Roots::below(root.path())).unwrap();
    let source: Source = "iscsi://10.0.0.1/iqn.2003-01.org.lunbd:a/1"
        .parse()
        .unwrap();
    let initiator = "iqn.2026-01.example:one".parse().unwrap();
    let request = AttachRequest::new(source.clone()).log_in(SessionOptions::new(initiator));
    let deadline = Deadline::after(Duration::from_secs(30));
    for reason in [MissingReason::NoTarget, MissingReason::NoSession] {
        let mut gone = candidate(&source, Some(SessionId(3)));
        let text = "at its logout when it was looked at".to_owned();
        let (is_down, hctl) = (reason == MissingReason::NoTarget, None);
        gone.route.address = Err(RouteUnavailable { reason, text, hctl });
        let mut sessions = Sessions::default();
        let routes_are_current =
            lock_sessions_shared(&engine, &[gone], &request, &mut sessions, deadline);
        assert_eq!(routes_are_current.unwrap(), !is_down);
    }
}

/// Without a device it would be ended and made again; its device may be in use.
#[test]
fn an_attach_over_a_session_that_stays_down_with_devices_fails_at_once() {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots::below(root.path());
    let name = SessionName {
        initiator: "iqn.2026-01.example:one".parse().unwrap(),
        target: "iqn.2003-01.org.lunbd:a".parse().unwrap(),
        portal: "127.0.0.1:1".parse().unwrap(),
    };
    let session = FakeSession::add(&roots, 3, &name);
    session.lose();
    session.add_unit(1);
    let engine = Engine::start(roots).unwrap();
    let source: Source = "iscsi://127.0.0.1:1/iqn.2003-01.org.lunbd:a/2"
        .parse()
        .unwrap();
    let request = AttachRequest::new(source).log_in(SessionOptions::new(name.initiator));
    let deadline = Deadline::after(Duration::from_secs(60));
    let error = engine.attach(&request, deadline).unwrap_err();
    assert!(error.to_string().contains("FAILED"), "{error:#}");
    assert!(!deadline.has_passed());
}
