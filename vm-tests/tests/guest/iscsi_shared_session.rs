//! One session with many users: threads, processes, and a daemon.

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use lunbd::engine::StageObserver;
use lunbd::error::Stage;
use lunbd::iscsi::{SessionName, SessionOptions, connect, hand_over};
use lunbd::{
    AttachRequest, Deadline, DetachRequest, DetachTarget, Engine, ErrorKind, Roots, Source,
};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, session_of, soon, writes_and_reads};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, Iscsid, Timeouts, sessions, the_only_session};
use vm_tests::guest::lio::Store;
use vm_tests::guest::served::Served;
use vm_tests::guest::tgt::Tgt;

const IQN: &str = "iqn.2026-01.example:log-in";
const USER: (&str, &str) = ("asker", "the-askers-own-secret");
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn options() -> SessionOptions {
    SessionOptions::new(INITIATOR.parse().unwrap())
}

fn source(target: &impl Served, portals: &[usize], lun: u64) -> Source {
    target.uri(portals, lun).parse().unwrap()
}

fn request(target: &impl Served, portals: &[usize], lun: u64) -> AttachRequest {
    AttachRequest::new(source(target, portals, lun)).log_in(options())
}

fn detach(engine: &Engine, source: Source) -> Vec<u32> {
    let detachment = engine.detach(source, soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    detachment.logged_out.iter().map(|id| id.0).collect()
}

#[test]
fn many_concurrent_luns_of_one_target_share_one_login_and_one_logout() {
    many_luns::<IscsiTarget>();
}

/// LUN 0 of tgt is not a disk.
#[test]
fn many_concurrent_luns_of_tgt_share_one_login_and_one_logout() {
    many_luns::<Tgt>();
}

fn many_luns<T: Served>() {
    const WORKERS: u64 = 8;
    guest::time_limit(Duration::from_secs(20 * 60));
    iscsi_tcp::prepare();
    let engine = engine();
    let each_has = if guest::sweeps_are_whole() { 8 } else { 2 };
    let count = WORKERS * each_has;
    // LUNs over 255 are addressed in another way than those below.
    let luns: Vec<u64> = (0..count).map(|at| 1 + at * 960 / count).collect();
    let target = T::serve(IQN, &luns, MIB);
    let attach = |lun| {
        let request = request(&target, &[0], lun);
        engine.attach(&request, soon()).unwrap()
    };
    let detach = |lun| detach(&engine, source(&target, &[0], lun));
    let start = Instant::now();
    let each = |work: &(dyn Fn(u64) + Sync)| {
        let luns = &luns;
        std::thread::scope(|scope| {
            for worker in 0..WORKERS {
                // Each worker takes its LUNs in an order other than by number.
                let place = move |at| (at * WORKERS + worker) * 37 % count;
                let mine = (0..each_has).map(move |at| luns[usize::try_from(place(at)).unwrap()]);
                scope.spawn(move || mine.for_each(work));
            }
        });
    };
    each(&|lun| assert_eq!(attach(lun).size, MIB));
    println!("{count} attached in {:?}", start.elapsed());
    let only = the_only_session();
    assert_eq!(target.sessions(), 1);
    let start = Instant::now();
    let ended = Mutex::new(Vec::new());
    each(&|lun| {
        let mine = detach(lun);
        ended.lock().unwrap().extend(mine);
    });
    println!("{count} detached in {:?}", start.elapsed());
    assert_eq!(ended.into_inner().unwrap(), [only.id]);
    nothing_is_left();
    // The kernel numbers its sessions: there was no other session.
    attach(luns[5]);
    assert_eq!(sessions()[0].id, only.id + 1);
    detach(luns[5]);
}

#[test]
fn concurrent_attaches_and_detaches_never_end_a_session_that_another_uses() {
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
    // The attach has found the session and has not scanned.
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
        // This is time for the detach to do what it must not do.
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
fn a_starting_iscsid_leaves_lunbds_session_alone_and_lunbd_never_ends_iscsids_session() {
    beside_an_iscsid::<IscsiTarget>();
}

#[test]
fn a_starting_iscsid_leaves_lunbds_tgt_session_alone_and_lunbd_never_ends_iscsids() {
    beside_an_iscsid::<Tgt>();
}

fn beside_an_iscsid<T: Served>() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = T::serve(IQN, &[1, 2], 8 * MIB);
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

    // The attach uses the daemon's session, which stays.
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
        doctor.contains("0 sessions of lunbd, 1 of other programs; iscsid runs"),
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
    // The request does not ask for a login, because a session exists.
    let plain = AttachRequest::new(source(&target, &[0], 1));
    assert_eq!(session_of(&engine.attach(&plain, soon()).unwrap()), session);
    assert_eq!(detach(&engine, source(&target, &[0], 1)), [session]);
    nothing_is_left();
}

/// Creates a session as a process leaves it that is killed before it scans.
fn a_session_without_devices(portal: usize) -> u32 {
    let name = SessionName {
        initiator: INITIATOR.parse().unwrap(),
        target: IQN.parse().unwrap(),
        portal: PORTALS[portal].parse().unwrap(),
    };
    let connection = connect(&name, &options(), soon()).unwrap();
    let roots = Roots::default();
    let session = hand_over(&roots, &name, connection, &options(), soon()).unwrap();
    session.id.0
}

#[test]
fn an_attach_that_fails_ends_the_session_without_devices_that_it_shared() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1], MIB);
    a_session_without_devices(0);
    let no_such_unit = request(&target, &[0], 9);
    let error = engine.attach(&no_such_unit, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    nothing_is_left();
}

#[test]
fn a_detach_by_node_ends_the_session_of_the_same_target_that_has_no_devices() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1], MIB);
    let attachment = engine.attach(&request(&target, &[0], 1), soon()).unwrap();
    let idle = a_session_without_devices(1);
    let node = DetachTarget::Device(attachment.node.clone());
    let detachment = engine.detach(node, soon()).unwrap();
    let mut ended: Vec<u32> = detachment.logged_out.iter().map(|id| id.0).collect();
    ended.sort_unstable();
    assert_eq!(ended, [session_of(&attachment), idle]);
    nothing_is_left();
}

#[test]
fn two_processes_at_once_make_one_session_and_the_last_one_ends_it() {
    two_processes::<IscsiTarget>();
}

#[test]
fn two_concurrent_processes_make_one_session_with_tgt_and_the_last_one_ends_it() {
    two_processes::<Tgt>();
}

fn two_processes<T: Served>() {
    iscsi_tcp::prepare();
    let mut target = T::serve(IQN, &[1, 2], MIB);
    target.ask_for_chap(USER);
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
