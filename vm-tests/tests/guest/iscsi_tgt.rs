//! Logins to tgt, a target that negotiates differently from the kernel's and redirects logins.

use std::time::Duration;

use lunbd::iscsi::{Credentials, DiscoveryOptions, Secret, SessionOptions, discover};
use lunbd::{AttachRequest, Attachment, Deadline, Engine, ErrorKind, Result, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, session_of, soon, writes_and_reads};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::INITIATOR;
use vm_tests::guest::tgt::Tgt;

const IQN: &str = "iqn.2026-01.example:process";
const BYTES: u64 = 8 << 20;
const USER: (&str, &str) = ("asker", "the-askers-own-secret");
const TARGET: (&str, &str) = ("array", "what-the-array-knows");
const LIMIT: Duration = Duration::from_secs(30);

fn options() -> SessionOptions {
    SessionOptions::new(INITIATOR.parse().unwrap())
}

fn source(portal: &str) -> Source {
    format!("iscsi://{portal}/{IQN}/1").parse().unwrap()
}

fn attach(engine: &Engine, portal: &str, options: SessionOptions) -> Result<Attachment> {
    let request = AttachRequest::new(source(portal)).log_in(options);
    engine.attach(&request, soon())
}

fn one_way(secret: &str) -> Credentials {
    Credentials::new(USER.0, Secret::new(secret).unwrap()).unwrap()
}

fn mutual(secret: &str) -> Credentials {
    let secret = Secret::new(secret).unwrap();
    let target = Some(TARGET.0.to_owned());
    one_way(USER.1).mutual(target, secret).unwrap()
}

/// Detaches, and checks that nothing stays on either side.
fn leaves_nothing(engine: &Engine, portal: &str, target: &Tgt) {
    let detachment = engine.detach(source(portal), soon()).unwrap();
    assert_eq!(detachment.logged_out.len(), 1, "{detachment:?}");
    nothing_is_left();
    guest::wait_until("the target to have no connection", LIMIT, || {
        (target.connections() == 0).then_some(())
    });
}

#[test]
fn a_unit_is_discovered_attached_written_and_detached_with_and_without_digests() {
    iscsi_tcp::prepare();
    let engine = engine();
    for portal in ["127.0.0.1:3260", "[::1]:3260"] {
        let target = Tgt::start("0", portal, IQN, BYTES);
        let ask = DiscoveryOptions::new(INITIATOR.parse().unwrap());
        let found = discover(&portal.parse().unwrap(), &ask, Deadline::after(LIMIT)).unwrap();
        let [only] = &found.targets[..] else {
            panic!("{found:?}");
        };
        assert_eq!(only.iqn.as_str(), IQN);
        assert_eq!(only.portals[0].portal.to_string(), portal);
        for (header, data) in [(false, false), (true, true)] {
            let options = options().digests(header, data);
            let attachment = attach(&engine, portal, options).unwrap();
            assert_eq!(attachment.size, BYTES);
            let session = session_of(&attachment);
            let has = |name| attribute(session, name) == "1";
            assert_eq!((has("header_digest"), has("data_digest")), (header, data));
            assert!(target.connections() > 0);
            writes_and_reads(&attachment);
            leaves_nothing(&engine, portal, &target);
        }
    }
}

#[test]
fn a_redirected_login_makes_a_session_at_the_new_portal_and_the_detach_ends_it_there() {
    iscsi_tcp::prepare();
    let engine = engine();
    let (first, second) = ("127.0.0.1:3260", "127.0.0.2:3260");
    let sends_on = Tgt::start("0", first, IQN, BYTES);
    let takes = Tgt::start("1", second, IQN, BYTES);
    sends_on.redirect("127.0.0.2", "3260");
    let attachment = attach(&engine, first, options()).unwrap();
    let session = session_of(&attachment);
    assert_eq!(attribute(session, "address"), "127.0.0.2");
    assert_eq!(attribute(session, "persistent_address"), "127.0.0.1");
    assert_eq!((sends_on.connections(), takes.connections()), (0, 1));
    writes_and_reads(&attachment);
    leaves_nothing(&engine, first, &takes);
}

#[test]
fn chap_admits_only_the_right_secret_and_mutual_chap_refuses_a_target_without_one() {
    iscsi_tcp::prepare();
    let engine = engine();
    let portal = "127.0.0.1:3260";
    let attach = |who: Credentials| attach(&engine, portal, options().credentials(who));
    let is_refused = |who: Credentials, kind| {
        let error = attach(who).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        nothing_is_left();
    };
    let comes_in = |who: Credentials, target: &Tgt| {
        writes_and_reads(&attach(who).unwrap());
        leaves_nothing(&engine, portal, target);
    };
    let only = |names: &str| one_way(USER.1).algorithms(names.parse().unwrap());

    let mut target = Tgt::start("0", portal, IQN, BYTES);
    target.ask_for_chap(USER, None);
    comes_in(one_way(USER.1), &target);
    comes_in(only("MD5"), &target);
    comes_in(only("SHA3-256,MD5,SHA256"), &target);
    is_refused(one_way("another-secret-than-it"), ErrorKind::NotPermitted);
    // The target has no secret to prove itself with.
    is_refused(mutual(TARGET.1), ErrorKind::NotPermitted);
    // tgt takes the number of the first for SHA-1, and does not know the number of the second.
    is_refused(only("SHA256,MD5"), ErrorKind::Refused);
    is_refused(only("SHA3-256"), ErrorKind::Refused);
    drop(target);

    let mut target = Tgt::start("0", portal, IQN, BYTES);
    target.ask_for_chap(USER, Some(TARGET));
    comes_in(mutual(TARGET.1), &target);
    is_refused(mutual("not-what-the-array-knows"), ErrorKind::NotPermitted);
}

/// tgt does not redirect an initiator to the initiator's own address (`target_redirected`). So
/// two targets that redirect to each other are a loop, unless one of them is at the initiator's
/// address: over the loopback interface that address is 127.0.0.1.
#[test]
fn a_redirect_loop_of_two_targets_is_refused_unless_one_target_is_at_the_initiators_address() {
    iscsi_tcp::prepare();
    let engine = engine();
    for (addresses, goes_round) in [
        (["127.0.0.2", "127.0.0.3"], true),
        (["127.0.0.1", "127.0.0.2"], false),
    ] {
        let [first, second] = addresses;
        let portals = addresses.map(|address| format!("{address}:3260"));
        let there = Tgt::start("0", &portals[0], IQN, BYTES);
        let back = Tgt::start("1", &portals[1], IQN, BYTES);
        there.redirect(second, "3260");
        back.redirect(first, "3260");
        let attached = attach(&engine, &portals[0], options());
        if goes_round {
            let error = attached.unwrap_err();
            let [there, back] = &portals;
            let way = format!("in a loop: {there} to {back} to {there}");
            assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
            assert!(error.to_string().contains(&way), "{error}");
            nothing_is_left();
        } else {
            let session = session_of(&attached.unwrap());
            assert_eq!(attribute(session, "address"), second);
            leaves_nothing(&engine, &portals[0], &back);
        }
    }
}
