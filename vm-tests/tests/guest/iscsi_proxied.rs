//! Sessions of lunbd whose target sends asynchronous messages, sends corrupt data or falls
//! silent, and sessions over unusual addresses.

use std::fs;
use std::time::{Duration, Instant};

use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Attachment, Engine, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, session_of, soon};
use vm_tests::guest::iscsi_proxy::{IscsiProxy, Part};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, sessions};
use vm_tests::guest::keeping::Keeping;
use vm_tests::guest::lio::Store;
use vm_tests::guest::served::Served;
use vm_tests::guest::tgt::Tgt;
use vm_tests::guest::writer::{Writer, first_block};

const IQN: &str = "iqn.2026-01.example:proxied";
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// The proxy's address, for the target at the first of [`PORTALS`].
const PROXY: &str = "127.0.0.9:3260";

/// The source of LUN 1 over a proxy or a portal.
fn source(portal: &str) -> Source {
    format!("iscsi://{portal}/{IQN}/1").parse().unwrap()
}

fn options() -> SessionOptions {
    SessionOptions::new(INITIATOR.parse().unwrap())
}

fn attach(engine: &Engine, portal: &str, options: SessionOptions) -> Attachment {
    let request = AttachRequest::new(source(portal)).log_in(options);
    engine.attach(&request, soon()).unwrap()
}

fn detach(engine: &Engine, portal: &str, session: u32) {
    let detachment = engine.detach(source(portal), soon()).unwrap();
    let ended: Vec<u32> = detachment.logged_out.iter().map(|id| id.0).collect();
    assert_eq!(ended, [session], "{detachment:?}");
}

#[test]
fn a_login_uses_a_link_local_portal_and_a_later_attach_finds_its_session_by_interface() {
    iscsi_tcp::prepare();
    let engine = engine();
    let _target = IscsiTarget::serve(IQN, &[1], 16 * MIB);
    guest::run(&["ip", "address", "add", "fe80::9/64", "dev", "lo", "nodad"]);
    // The loopback interface has index 1 on each machine.
    let proxy = IscsiProxy::start("[fe80::9%1]:3260", PORTALS[0]);
    let portal = "[fe80::9%lo]";
    let attachment = attach(&engine, portal, options());
    let session = session_of(&attachment);
    assert_eq!(attribute(session, "persistent_address"), "fe80::9%lo");
    first_block(&attachment.node).unwrap();
    let again = attach(&engine, portal, options());
    assert_eq!((session_of(&again), again.changed), (session, false));
    detach(&engine, portal, session);
    drop(proxy);
    // Without the address, a connection that is still being closed would not end.
    nothing_is_left();
    guest::run(&["ip", "address", "delete", "fe80::9/64", "dev", "lo"]);
}

#[test]
fn a_requested_logout_is_followed_by_a_re_login_and_a_dropped_session_waits_the_targets_time() {
    speaks_by_itself::<IscsiTarget>();
}

#[test]
fn tgts_requested_logout_is_followed_by_a_re_login_and_a_dropped_session_waits_its_time() {
    speaks_by_itself::<Tgt>();
}

fn speaks_by_itself<T: Served>() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = T::serve(IQN, &[1], 16 * MIB);
    let proxy = IscsiProxy::start(PROXY, PORTALS[0]);
    let attachment = attach(&engine, PROXY, options());
    let session = session_of(&attachment);
    let keeping = Keeping::start(&engine);
    let writer = Writer::start(&attachment.node);
    // The target requests a logout within 5 s, and new parameters within 5 s.
    for event in [1, 4] {
        writer.goes_on();
        let (before, logouts) = (keeping.recovered(), proxy.logouts());
        proxy.says_by_itself(event, [0, 0, 5]);
        keeping.wait_until_recovered(before + 1);
        assert_eq!(proxy.logouts(), logouts + 1, "event {event}");
        writer.goes_on();
    }
    // The target announces that it drops the connection, or all of them, and that nobody may
    // dial it for 3 s.
    for event in [2, 3] {
        let (before, logouts) = (keeping.recovered(), proxy.logouts());
        let start = Instant::now();
        proxy.says_by_itself(event, [0, 3, 0]);
        proxy.cut();
        keeping.wait_until_recovered(before + 1);
        let took = start.elapsed();
        assert!(took >= Duration::from_secs(3), "event {event}: {took:?}");
        assert_eq!(proxy.logouts(), logouts, "event {event}");
        writer.goes_on();
    }
    writer.end();
    keeping.end();
    detach(&engine, PROXY, session);
    drop(proxy);
    drop(target);
    nothing_is_left();
}

#[test]
fn a_digest_error_in_a_header_or_data_ends_the_connection_and_no_reader_gets_the_data() {
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = IscsiTarget::new(IQN);
    let store = Store::file("e8", 16 * MIB);
    fs::write(store.path().unwrap(), vec![0x5a; 16 << 20]).unwrap();
    target.map(1, &store);
    let proxy = IscsiProxy::with_digests(PROXY, PORTALS[0]);
    let attachment = attach(&engine, PROXY, options().digests(true, true));
    let session = session_of(&attachment);
    let keeping = Keeping::start(&engine);
    for (times, part) in (1..).zip([Part::Data, Part::Header, Part::Data, Part::Header]) {
        proxy.break_a_read(part);
        let block = first_block(&attachment.node).unwrap();
        assert!(!proxy.is_to_break(), "{part:?}");
        assert!(block.iter().all(|&byte| byte == 0x5a), "{:x?}", &block[..8]);
        keeping.wait_until_recovered(times);
    }
    keeping.end();
    detach(&engine, PROXY, session);
    drop(proxy);
    nothing_is_left();
}

#[test]
fn a_silent_target_is_detected_and_its_session_recovers_without_an_io_error() {
    silent::<IscsiTarget>();
}

#[test]
fn a_silent_tgt_is_detected_and_its_session_recovers_without_an_io_error() {
    silent::<Tgt>();
}

fn silent<T: Served>() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = T::serve(IQN, &[1], 16 * MIB);
    let proxy = IscsiProxy::start(PROXY, PORTALS[0]);
    let attachment = attach(&engine, PROXY, options());
    let session = session_of(&attachment);
    let keeping = Keeping::start(&engine);
    let writer = Writer::start(&attachment.node);
    writer.goes_on();
    // The proxy falls silent with I/O in flight, and then without.
    proxy.fall_silent();
    keeping.wait_until_recovered(1);
    writer.goes_on();
    writer.end();
    proxy.fall_silent();
    keeping.wait_until_recovered(2);
    first_block(&attachment.node).unwrap();
    keeping.end();
    detach(&engine, PROXY, session);
    drop(proxy);
    drop(target);
    nothing_is_left();
}

#[test]
fn a_lost_ipv6_session_recovers_and_doctor_says_what_the_recovery_waits_for() {
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = IscsiTarget::serve(IQN, &[1], 16 * MIB);
    let attachment = attach(&engine, PORTALS[2], options());
    let session = session_of(&attachment);
    let writer = Writer::start(&attachment.node);
    writer.goes_on();
    Served::portal_down(&mut target, 2);
    guest::wait_until("the loss", LIMIT, || {
        (attribute(session, "state") == "FAILED").then_some(())
    });
    let doctor = String::from_utf8(guest::lunbd(&["doctor"]).stdout).unwrap();
    let words = format!("session {session} of ours is lost and its I/O waits");
    assert!(doctor.contains(&words), "{doctor}");
    assert!(doctor.contains("lunbd heal --watch"), "{doctor}");
    let keeping = Keeping::start(&engine);
    Served::portal_up(&mut target, 2);
    keeping.wait_until_recovered(1);
    writer.goes_on();
    writer.end();
    keeping.end();
    let doctor = String::from_utf8(guest::lunbd(&["doctor"]).stdout).unwrap();
    assert!(!doctor.contains("lost"), "{doctor}");
    detach(&engine, PORTALS[2], session);
    nothing_is_left();
}

#[test]
fn a_redirected_session_recovers_through_the_redirecting_portal() {
    iscsi_tcp::prepare();
    let engine = engine();
    let sends_on = Tgt::start("0", PORTALS[0], IQN, 16 * MIB);
    let takes = Tgt::with("1", &[PORTALS[1]], IQN, &[1], 16 * MIB);
    sends_on.redirect("127.0.0.2", "3260");
    let attachment = attach(&engine, PORTALS[0], options());
    let session = session_of(&attachment);
    let keeping = Keeping::start(&engine);
    let writer = Writer::start(&attachment.node);
    for times in 1..=2 {
        writer.goes_on();
        takes.cut(1);
        keeping.wait_until_recovered(times);
        assert_eq!(attribute(session, "address"), "127.0.0.2");
        assert_eq!(attribute(session, "persistent_address"), "127.0.0.1");
    }
    writer.goes_on();
    writer.end();
    keeping.end();
    assert_eq!((sends_on.connections(), takes.connections()), (0, 1));
    detach(&engine, PORTALS[0], session);
    assert!(sessions().is_empty());
    drop((sends_on, takes));
    nothing_is_left();
}
