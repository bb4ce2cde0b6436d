//! Attaches that log in, and detaches that log out, with the kernel's own target.

use std::fs;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use lunbd::engine::{Multipath, Unit};
use lunbd::error::Stage;
use lunbd::iscsi::{Credentials, Secret, SessionOptions};
use lunbd::{AttachRequest, Deadline, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, session_of, soon, writes_and_reads};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, sessions};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{Multipathd, NoPath};
use vm_tests::guest::own_processes::OwnProcesses;
use vm_tests::guest::served::Served;
use vm_tests::guest::tgt::Tgt;

const IQN: &str = "iqn.2026-01.example:log-in";
const USER: (&str, &str) = ("asker", "the-askers-own-secret");
const TARGET: (&str, &str) = ("array", "what-the-array-knows");
const MIB: u64 = 1 << 20;

fn options() -> SessionOptions {
    SessionOptions::new(INITIATOR.parse().unwrap())
}

fn source(target: &impl Served, portals: &[usize], lun: u64) -> Source {
    target.uri(portals, lun).parse().unwrap()
}

fn request(target: &impl Served, portals: &[usize], lun: u64) -> AttachRequest {
    AttachRequest::new(source(target, portals, lun)).log_in(options())
}

fn one_way(secret: &str) -> Credentials {
    Credentials::new(USER.0, Secret::new(secret).unwrap()).unwrap()
}

fn mutual(secret: &str) -> Credentials {
    let secret = Secret::new(secret).unwrap();
    let target = Some(TARGET.0.to_owned());
    one_way(USER.1).mutual(target, secret).unwrap()
}

fn detach(engine: &Engine, source: Source) -> Vec<u32> {
    let detachment = engine.detach(source, soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    detachment.logged_out.iter().map(|id| id.0).collect()
}

#[test]
fn an_attach_logs_in_and_the_detach_logs_out_without_a_daemon() {
    iscsi_tcp::prepare();
    assert!(!iscsi_tcp::iscsid_runs());
    let engine = engine();
    let store = Store::file("c1", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    // The target has no LUN 0. LUN 300 appears in either addressing.
    for lun in [300, 16_684] {
        target.map(lun, &store);
        for portal in [0, 2] {
            let start = Instant::now();
            let request = request(&target, &[portal], lun);
            let attachment = engine.attach(&request, soon()).unwrap();
            let took = start.elapsed();
            assert!(attachment.changed);
            assert!(
                attachment
                    .identity()
                    .unwrap()
                    .is(&store.wwid().parse().unwrap())
            );
            writes_and_reads(&attachment);
            let session = session_of(&attachment);
            assert_eq!(attribute(session, "recovery_tmo"), "120");
            let start = Instant::now();
            let ended = detach(&engine, source(&target, &[portal], lun));
            println!(
                "LUN {lun} at {}: {took:?}, {:?}",
                PORTALS[portal],
                start.elapsed()
            );
            assert_eq!(ended, [session]);
            nothing_is_left();
        }
        target.unmap(lun);
    }
}

#[test]
fn login_attach_detach_and_logout_start_no_process() {
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &Store::ramdisk("cd", 8 * MIB));
    let multipathd = Multipathd::start(NoPath::Fail);
    let started = OwnProcesses::start();
    for portals in [&[0][..], &[0, 2]] {
        let wanted = request(&target, portals, 1).min_paths(portals.len());
        engine.attach(&wanted, soon()).unwrap();
        let ended = detach(&engine, source(&target, portals, 1));
        assert_eq!(ended.len(), portals.len());
    }
    assert_eq!(started.count(), 0);
    // A started process is counted.
    guest::run(&["true"]);
    assert_eq!(started.count(), 1);
    drop(multipathd);
    nothing_is_left();
}

#[test]
fn a_session_keeps_its_portals_host_name_and_another_name_makes_another_session() {
    const HOSTS: &str = "/etc/hosts";
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &Store::ramdisk("ce", 8 * MIB));
    let hosts = fs::read_to_string(HOSTS).unwrap();
    let ours = "127.0.0.1 array.example also.example\n";
    fs::write(HOSTS, hosts.clone() + ours).unwrap();
    let source = |host: &str| -> Source { format!("iscsi://{host}/{IQN}/1").parse().unwrap() };
    let attach = |host: &str| {
        let request = AttachRequest::new(source(host)).log_in(options());
        engine.attach(&request, soon())
    };
    let attachment = attach("array.example").unwrap();
    let session = session_of(&attachment);
    assert_eq!(attribute(session, "persistent_address"), "array.example");
    assert_eq!(attribute(session, "address"), "127.0.0.1");
    writes_and_reads(&attachment);
    // The same unit, attached as another path.
    let other = attach("also.example").unwrap();
    assert_ne!(session_of(&other), session);
    assert_ne!(other.node, attachment.node);
    // A detach by any of its sources removes all paths.
    let mut ended = detach(&engine, source("also.example"));
    ended.sort_unstable();
    assert_eq!(ended, [session, session_of(&other)]);
    nothing_is_left();
    let unknown = attach("nobody.example").unwrap_err();
    assert_eq!(unknown.stage(), Some(Stage::Resolve), "{unknown}");
    nothing_is_left();
    fs::write(HOSTS, hosts).unwrap();
}

#[test]
fn a_failed_login_and_a_failed_attach_after_a_login_leave_nothing() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("c2", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    // The LUN does not exist.
    let error = engine
        .attach(&request(&target, &[0], 9), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    nothing_is_left();
    // The unit is not the expected one.
    let expected = "naa.60014050000000000000000000000001".parse().unwrap();
    let request_other = request(&target, &[0], 1).expect(expected);
    let error = engine.attach(&request_other, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    nothing_is_left();
    // The target accepts no logins.
    target.stop();
    let error = engine
        .attach(&request(&target, &[0], 1), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    nothing_is_left();
    target.start();
    // The request does not ask for a login.
    let plain = AttachRequest::new(source(&target, &[0], 1));
    let error = engine.attach(&plain, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooFewPaths, "{error}");
    nothing_is_left();
}

#[test]
fn chap_admits_only_the_right_secret_and_mutual_chap_refuses_a_target_without_it() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("c3", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let attach = |credentials| {
        let request =
            AttachRequest::new(source(&target, &[0], 1)).log_in(options().credentials(credentials));
        engine.attach(&request, soon())
    };
    target.ask_for_chap(USER, None);
    for wrong in [one_way("another-secret-than-it"), mutual(TARGET.1)] {
        let error = attach(wrong).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
        nothing_is_left();
    }
    let each = ["MD5", "SHA1", "SHA256", "SHA3-256"].map(Some);
    for only in each.into_iter().chain([None]) {
        let credentials = match only {
            Some(algorithm) => one_way(USER.1).algorithms(algorithm.parse().unwrap()),
            None => one_way(USER.1),
        };
        writes_and_reads(&attach(credentials).unwrap());
        assert_eq!(detach(&engine, source(&target, &[0], 1)).len(), 1);
        nothing_is_left();
    }

    target.ask_for_chap(USER, Some(TARGET));
    let error = attach(mutual("not-what-the-array-knows")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
    nothing_is_left();
    let attachment = attach(mutual(TARGET.1)).unwrap();
    writes_and_reads(&attachment);
    let session = session_of(&attachment);
    for secret in ["username", "password", "password_in"] {
        assert_eq!(attribute(session, secret), "(null)");
    }
    assert_eq!(attribute(session, "username_in"), "lunbd:mutual-chap");
    assert_eq!(detach(&engine, source(&target, &[0], 1)), [session]);
    nothing_is_left();
}

#[test]
fn with_digests_data_is_written_and_read_and_both_sides_have_them() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("c4", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(0, &store);
    for (header, data) in [(true, false), (false, true)] {
        let request =
            AttachRequest::new(source(&target, &[2], 0)).log_in(options().digests(header, data));
        let attachment = engine.attach(&request, soon()).unwrap();
        let session = session_of(&attachment);
        let has = |name| attribute(session, name) == "1";
        assert_eq!((has("header_digest"), has("data_digest")), (header, data));
        writes_and_reads(&attachment);
        assert_eq!(detach(&engine, source(&target, &[2], 0)), [session]);
        nothing_is_left();
    }
}

#[test]
fn a_dead_or_silent_portal_is_a_missing_path_and_does_not_delay_the_others() {
    one_of_two_portals::<IscsiTarget>();
}

#[test]
fn a_dead_or_silent_portal_of_tgt_is_a_missing_path_and_does_not_delay_the_others() {
    one_of_two_portals::<Tgt>();
}

fn one_of_two_portals<T: Served>() {
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = T::serve(IQN, &[1], 8 * MIB);
    target.portal_down(1);
    // This portal accepts connections and sends nothing.
    let silent = TcpListener::bind("127.0.0.3:3260").unwrap();
    let uri = format!("iscsi://{},{},127.0.0.3/{IQN}/1", PORTALS[1], PORTALS[0]);
    let all: Source = uri.parse().unwrap();
    // A portal delays an attach for at most half of its time.
    let patient = Deadline::after(Duration::from_secs(120));
    let attachment = engine
        .attach(&AttachRequest::new(all.clone()).log_in(options()), patient)
        .unwrap();
    let took = patient.elapsed();
    println!("beside a dead and a silent portal: {took:?}");
    assert!(took < Duration::from_secs(60), "{took:?}");
    assert_eq!(attachment.paths().len(), 1);
    let Unit::Scsi { missing, .. } = &attachment.unit else {
        panic!("{attachment:?}");
    };
    let missing: Vec<_> = missing.iter().map(ToString::to_string).collect();
    assert_eq!(missing.len(), 2, "{missing:?}");
    assert!(
        missing[0].contains(PORTALS[1]) && missing[0].contains("refused"),
        "{missing:?}"
    );
    assert!(missing[1].contains("127.0.0.3:3260"), "{missing:?}");
    // More sessions than there can be.
    let too_many = AttachRequest::new(source(&target, &[0, 1], 1))
        .log_in(options())
        .min_paths(2);
    let error = engine.attach(&too_many, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooFewPaths, "{error}");
    assert_eq!(sessions().len(), 1, "the session that is used stands");
    drop(silent);
    assert_eq!(detach(&engine, all).len(), 1);
    nothing_is_left();
    target.portal_up(1);
}

#[test]
fn the_recovery_timeout_is_5_s_below_a_map_and_120_s_without_one() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("c9", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let wanted = request(&target, &[0, 2], 1)
        .min_paths(2)
        .multipath(Multipath::Prefer);
    let wait = |limit: &str| {
        let attachment = engine.attach(&wanted, soon()).unwrap();
        assert_eq!(attachment.paths().len(), 2);
        for session in sessions() {
            assert_eq!(attribute(session.id, "recovery_tmo"), limit);
        }
        assert_eq!(detach(&engine, source(&target, &[0, 2], 1)).len(), 2);
        nothing_is_left();
    };
    wait("120");
    // Only the engine sets the timeout here.
    let _multipathd = Multipathd::start_with(NoPath::Fail, "off");
    wait("5");
}

#[test]
fn two_portals_are_two_sessions_below_one_map_and_both_are_logged_out() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("c8", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let multipathd = Multipathd::start(NoPath::Fail);
    let wanted = request(&target, &[0, 2], 1)
        .min_paths(2)
        .multipath(Multipath::Require);
    let attachment = engine.attach(&wanted, soon()).unwrap();
    assert_eq!(attachment.paths().len(), 2);
    assert!(
        attachment.node.to_str().unwrap().contains("dm-"),
        "{attachment:?}"
    );
    let capacity = engine.capacity(&attachment.node, soon()).unwrap();
    assert_eq!((capacity.bytes, capacity.file_systems.len()), (8 * MIB, 0));
    for session in sessions() {
        assert_eq!(attribute(session.id, "recovery_tmo"), "5");
    }
    writes_and_reads(&attachment);
    assert_eq!(detach(&engine, source(&target, &[0, 2], 1)).len(), 2);
    nothing_is_left();
    drop(multipathd);
}
