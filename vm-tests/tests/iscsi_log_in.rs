//! Attaches that log in by themselves, and detaches that log out, with the
//! kernel's own target.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test panics to fail"
)]

use std::net::TcpListener;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use lunbd::engine::{Multipath, StageObserver, Unit};
use lunbd::error::Stage;
use lunbd::iscsi::{Credentials, Secret, SessionOptions};
use lunbd::{AttachRequest, Deadline, DetachRequest, Engine, ErrorKind, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, session_of, soon, writes_and_reads};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, Iscsid, Timeouts, sessions};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{Multipathd, NoPath};

const IQN: &str = "iqn.2026-01.example:log-in";
const USER: (&str, &str) = ("asker", "the-askers-own-secret");
const TARGET: (&str, &str) = ("array", "what-the-array-knows");
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn options() -> SessionOptions {
    SessionOptions::new(INITIATOR.parse().unwrap())
}

fn source(target: &IscsiTarget, portals: &[usize], lun: u64) -> Source {
    target.uri(portals, lun).parse().unwrap()
}

fn request(target: &IscsiTarget, portals: &[usize], lun: u64) -> AttachRequest {
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
fn without_a_daemon_a_unit_is_logged_in_to_attached_used_detached_and_logged_out_of() {
    iscsi_tcp::prepare();
    assert!(!iscsi_tcp::iscsid_runs());
    let engine = engine();
    let store = Store::file("c1", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    // No LUN 0, and one above 255, in either addressing.
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
fn a_login_that_fails_leaves_nothing_and_so_does_an_attach_after_it() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("c2", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    // A LUN that is not there.
    let error = engine
        .attach(&request(&target, &[0], 9), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    nothing_is_left();
    // Another unit than the one that was expected.
    let expected = "naa.60014050000000000000000000000001".parse().unwrap();
    let request_other = request(&target, &[0], 1).expect(expected);
    let error = engine.attach(&request_other, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
    nothing_is_left();
    // A target that does not take logins.
    target.stop();
    let error = engine
        .attach(&request(&target, &[0], 1), soon())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    nothing_is_left();
    target.start();
    // Without the wish to log in.
    let plain = AttachRequest::new(source(&target, &[0], 1));
    let error = engine.attach(&plain, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooFewPaths, "{error}");
    nothing_is_left();
}

#[test]
fn with_chap_who_knows_the_secret_comes_in_and_a_target_that_does_not_is_left() {
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
    writes_and_reads(&attach(one_way(USER.1)).unwrap());
    assert_eq!(detach(&engine, source(&target, &[0], 1)).len(), 1);
    nothing_is_left();

    target.ask_for_chap(USER, Some(TARGET));
    let error = attach(mutual("not-what-the-array-knows")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
    nothing_is_left();
    let attachment = attach(mutual(TARGET.1)).unwrap();
    writes_and_reads(&attachment);
    let session = session_of(&attachment);
    for secret in ["username", "password", "username_in", "password_in"] {
        assert_eq!(attribute(session, secret), "(null)");
    }
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
fn sixty_four_luns_of_one_target_beside_each_other_are_one_login_and_one_logout() {
    // Half a minute where nothing else runs.
    guest::time_limit(Duration::from_secs(20 * 60));
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = IscsiTarget::new(IQN);
    for lun in 0..64 {
        target.map(lun, &Store::ramdisk(&format!("{lun:02x}c5"), MIB));
    }
    let start = Instant::now();
    let each = |work: &(dyn Fn(u64) + Sync)| {
        std::thread::scope(|scope| {
            for worker in 0..8 {
                // In another order than that of the numbers.
                scope.spawn(move || (0..8).for_each(|at| work((at * 8 + worker) * 37 % 64)));
            }
        });
    };
    each(&|lun| {
        engine.attach(&request(&target, &[0], lun), soon()).unwrap();
    });
    println!("64 attached in {:?}", start.elapsed());
    let [only] = &sessions()[..] else {
        panic!("{:?}", sessions());
    };
    let start = Instant::now();
    let ended = Mutex::new(Vec::new());
    each(&|lun| {
        let mine = detach(&engine, source(&target, &[0], lun));
        ended.lock().unwrap().extend(mine);
    });
    println!("64 detached in {:?}", start.elapsed());
    assert_eq!(ended.into_inner().unwrap(), [only.id]);
    nothing_is_left();
    // The kernel counts its sessions: there was no other.
    engine.attach(&request(&target, &[0], 5), soon()).unwrap();
    assert_eq!(sessions()[0].id, only.id + 1);
    detach(&engine, source(&target, &[0], 5));
}

#[test]
fn attaches_and_detaches_that_meet_never_lose_the_session_under_each_other() {
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = IscsiTarget::new(IQN);
    for lun in 0..3 {
        target.map(lun, &Store::ramdisk(&format!("{lun:02x}c6"), MIB));
    }
    std::thread::scope(|scope| {
        for lun in 0..3 {
            let (engine, target) = (&engine, &target);
            scope.spawn(move || {
                for _ in 0..2 {
                    engine.attach(&request(target, &[0], lun), soon()).unwrap();
                    detach(engine, source(target, &[0], lun));
                }
            });
        }
    });
    nothing_is_left();
}

#[test]
fn the_detach_of_the_last_unit_waits_for_an_attach_that_is_about_to_use_the_session() {
    iscsi_tcp::prepare();
    let engine = Arc::new(engine());
    let mut target = IscsiTarget::new(IQN);
    for lun in [1, 2] {
        target.map(lun, &Store::ramdisk(&format!("{lun:02x}cd"), MIB));
    }
    let first = engine.attach(&request(&target, &[0], 1), soon()).unwrap();
    let last = source(&target, &[0], 1);
    let (done, detached) = mpsc::channel();
    let beside = Mutex::new(Some((Arc::clone(&engine), done)));
    // It has found the session and has not scanned.
    let meet = StageObserver::new(move |stage| {
        let Some((engine, done)) = (stage == Stage::Scan)
            .then(|| beside.lock().unwrap().take())
            .flatten()
        else {
            return;
        };
        let (told, at_its_logout) = mpsc::channel();
        let observer = StageObserver::new(move |stage| {
            if stage == Stage::Logout {
                let _ = told.send(());
            }
        });
        let last = DetachRequest::from(last.clone()).observe(observer);
        std::thread::spawn(move || {
            let detachment = engine.detach(last, soon()).unwrap();
            let _nobody_asks = done.send(detachment);
        });
        at_its_logout.recv_timeout(LIMIT).unwrap();
        // Time for it to do what it must not.
        let _ = at_its_logout.recv_timeout(Duration::from_secs(2));
    });
    let patient = Deadline::after(3 * LIMIT);
    let second = engine
        .attach(&request(&target, &[0], 2).observe(meet), patient)
        .unwrap();
    assert_eq!(session_of(&second), session_of(&first));
    let detachment = detached.recv_timeout(LIMIT).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(detachment.logged_out, []);
    writes_and_reads(&second);
    assert_eq!(
        detach(&engine, source(&target, &[0], 2)),
        [session_of(&first)]
    );
    nothing_is_left();
}

#[test]
fn of_two_portals_a_dead_or_silent_one_is_missing_and_holds_nobody_up() {
    IscsiTarget::need_portals_that_go_down();
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("c7", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    target.portal_down(1);
    // It takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.3:3260").unwrap();
    let uri = format!("iscsi://{},{},127.0.0.3/{IQN}/1", PORTALS[1], PORTALS[0]);
    let all: Source = uri.parse().unwrap();
    // A portal that holds an attach up does so for half of its time.
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
    // More than there can be.
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
    for session in sessions() {
        assert_eq!(attribute(session.id, "recovery_tmo"), "5");
    }
    writes_and_reads(&attachment);
    assert_eq!(detach(&engine, source(&target, &[0, 2], 1)).len(), 2);
    nothing_is_left();
    drop(multipathd);
}

#[test]
fn an_iscsid_that_starts_leaves_our_session_alone_and_its_own_is_never_logged_out_here() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("c9", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    target.map(2, &Store::ramdisk("ca", 8 * MIB));
    let attachment = engine.attach(&request(&target, &[0], 1), soon()).unwrap();
    let ours = session_of(&attachment);
    let mut iscsid = Iscsid::start();
    let listed = guest::run(&["iscsiadm", "-m", "session", "-P", "3"]);
    println!("{listed}");
    assert!(listed.contains(IQN), "{listed}");
    iscsid.restart();
    writes_and_reads(&attachment);
    assert_eq!(attribute(ours, "creator"), "-1");
    assert_eq!(attribute(ours, "state"), "LOGGED_IN");

    // Its own is used, and stays.
    let theirs = iscsid.login(PORTALS[1], IQN, Timeouts::default());
    let over_theirs = engine.attach(&request(&target, &[1], 2), soon()).unwrap();
    assert_eq!(session_of(&over_theirs), theirs.id);
    assert_eq!(detach(&engine, source(&target, &[1], 2)), [] as [u32; 0]);
    assert_eq!(theirs.state(), "LOGGED_IN");
    assert_eq!(detach(&engine, source(&target, &[0], 1)), [ours]);
    assert_eq!(sessions(), std::slice::from_ref(&theirs));
    let doctor = guest::lunbd(&["doctor"]);
    let doctor = String::from_utf8(doctor.stdout).unwrap();
    assert!(
        doctor.contains("0 sessions of ours, 1 of others; iscsid runs"),
        "{doctor}"
    );
    theirs.logout();
}

#[test]
fn a_session_can_be_kept_and_the_next_attach_uses_it() {
    iscsi_tcp::prepare();
    let engine = engine();
    let store = Store::ramdisk("cb", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let first = engine.attach(&request(&target, &[0], 1), soon()).unwrap();
    let kept = DetachRequest::from(source(&target, &[0], 1)).keep_sessions();
    let kept = engine.detach(kept, soon()).unwrap();
    assert_eq!(kept.logged_out, []);
    let session = session_of(&first);
    assert_eq!(attribute(session, "state"), "LOGGED_IN");
    // No login is asked for: a session is there.
    let plain = AttachRequest::new(source(&target, &[0], 1));
    assert_eq!(session_of(&engine.attach(&plain, soon()).unwrap()), session);
    assert_eq!(detach(&engine, source(&target, &[0], 1)), [session]);
    nothing_is_left();
}

#[test]
fn two_processes_at_once_make_one_session_and_the_last_one_ends_it() {
    iscsi_tcp::prepare();
    let mut target = IscsiTarget::new(IQN);
    for lun in [1, 2] {
        target.map(lun, &Store::ramdisk(&format!("{lun:02x}cc"), MIB));
    }
    target.ask_for_chap(USER, None);
    let run = |verb: &'static str, lun: u64| {
        let uri = target.uri(&[0], lun);
        let mut command = std::process::Command::new("lunbd");
        command.arg(verb).arg(uri);
        if verb == "attach" {
            command
                .args(["--log-in", "--digests"])
                .env("LUNBD_CHAP_USER", USER.0)
                .env("LUNBD_CHAP_SECRET", USER.1);
        }
        command.output().unwrap()
    };
    for verb in ["attach", "detach"] {
        let outputs = std::thread::scope(|scope| {
            let run = &run;
            let running = [1, 2].map(|lun| scope.spawn(move || run(verb, lun)));
            running.map(|one| one.join().unwrap())
        });
        for output in outputs {
            println!("{}", String::from_utf8_lossy(&output.stdout));
            assert!(output.status.success(), "{output:?}");
        }
        let expected = usize::from(verb == "attach");
        assert_eq!(sessions().len(), expected, "{:?}", sessions());
        let json = guest::lunbd(&["sessions", "--json"]);
        let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        let listed = json["sessions"].as_array().unwrap();
        assert_eq!(listed.len(), expected, "{json}");
        for session in listed {
            assert_eq!(session["ours"], true, "{json}");
            assert_eq!(session["devices"].as_array().unwrap().len(), 2, "{json}");
            assert_eq!(session["parameters"]["data_digest"], "1", "{json}");
        }
    }
    nothing_is_left();
    guest::wait_until("the target's own end", LIMIT, || {
        (target.sessions() == 0).then_some(())
    });
}
