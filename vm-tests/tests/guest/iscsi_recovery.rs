//! Sessions of lunbd that lose their connection, with the kernel's own target and tgt.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use lunbd::engine::{Multipath, SessionRecoveryOutcome};
use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Attachment, Deadline, Engine, Source};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ISCSI};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, session_of, soon};
use vm_tests::guest::crash::Place;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, Iscsid, Timeouts, sessions, the_only_session};
use vm_tests::guest::keeping::{HealWatch, Keeping};
use vm_tests::guest::lio::Store;
use vm_tests::guest::multipathd::{Multipathd, NoPath};
use vm_tests::guest::served::Served;
use vm_tests::guest::tgt::Tgt;
use vm_tests::guest::writer::{Writer, first_block};

const IQN: &str = "iqn.2026-01.example:recovery";
const USER: (&str, &str) = ("keeper", "what-the-keeper-knows");
const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

fn source(target: &impl Served, portal: usize, lun: u64) -> Source {
    target.uri(&[portal], lun).parse().unwrap()
}

fn options() -> SessionOptions {
    SessionOptions::new(INITIATOR.parse().unwrap())
}

fn attach(engine: &Engine, target: &impl Served, lun: u64, options: SessionOptions) -> Attachment {
    let request = AttachRequest::new(source(target, 0, lun)).log_in(options);
    engine.attach(&request, soon()).unwrap()
}

fn detach(engine: &Engine, target: &impl Served, lun: u64) -> Vec<u32> {
    let detachment = engine.detach(source(target, 0, lun), soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    detachment.logged_out.iter().map(|id| id.0).collect()
}

#[test]
fn ten_cut_connections_under_a_writer_cause_no_error_and_no_data_loss() {
    cut_ten_times::<IscsiTarget>();
}

#[test]
fn ten_cut_connections_to_tgt_under_a_writer_cause_no_error_and_no_data_loss() {
    cut_ten_times::<Tgt>();
}

fn cut_ten_times<T: Served>() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = T::serve(IQN, &[1], 16 * MIB);
    let attachment = attach(&engine, &target, 1, options());
    let session = session_of(&attachment);
    let writer = Writer::start(&attachment.node);
    let keeping = Keeping::start(&engine);
    for round in 1..=10 {
        writer.goes_on();
        let (start, before) = (Instant::now(), keeping.recovered());
        target.cut(0);
        keeping.wait_until_recovered(before + 1);
        println!("{round}: logged in again after {:?}", start.elapsed());
        assert_eq!(attribute(session, "state"), "LOGGED_IN");
    }
    writer.goes_on();
    writer.end();
    assert_eq!(attribute(session, "creator"), "-1");
    assert_eq!(attribute(session, "recovery_tmo"), "120");
    keeping.end();
    assert_eq!(detach(&engine, &target, 1), [session]);
    nothing_is_left();
}

#[test]
fn sessions_recover_with_their_agreed_parameters_after_a_target_restart() {
    restarted::<IscsiTarget>();
}

#[test]
fn sessions_recover_with_their_agreed_parameters_after_a_restart_of_tgt() {
    restarted::<Tgt>();
}

fn restarted<T: Served>() {
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = T::serve(IQN, &[1], 16 * MIB);
    let attachment = attach(&engine, &target, 1, options().digests(true, true));
    let session = the_only_session();
    // The recovery sees what the kernel forgets with the connection.
    let keeping = Keeping::start(&engine);
    let failures =
        || keeping.count(|kept| matches!(kept.outcome, SessionRecoveryOutcome::Failed(_)));
    let writer = Writer::start(&attachment.node);
    for _ in 0..2 {
        writer.goes_on();
        let (before, failed) = (keeping.recovered(), failures());
        target.stop();
        // One target accepts connections and refuses the login; the other accepts no
        // connection.
        guest::wait_until("a login that fails", LIMIT, || {
            (failures() > failed).then_some(())
        });
        target.start();
        keeping.wait_until_recovered(before + 1);
        writer.goes_on();
        for digest in ["header_digest", "data_digest"] {
            assert_eq!(attribute(session.id, digest), "1", "{digest}");
        }
    }
    writer.end();
    keeping.end();
    assert_eq!(detach(&engine, &target, 1), [session.id]);
    nothing_is_left();
}

#[test]
fn devices_run_again_when_their_target_returns_after_the_recovery_timeout() {
    gone_for_long::<IscsiTarget>();
}

#[test]
fn devices_of_tgt_run_again_when_it_returns_after_the_recovery_timeout() {
    gone_for_long::<Tgt>();
}

fn gone_for_long<T: Served>() {
    /// Time enough to see that the session is lost.
    const BUDGET: Duration = Duration::from_secs(10);
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = T::serve(IQN, &[1, 2], 8 * MIB);
    let options = options().recovery_timeout(BUDGET);
    let units = [1, 2].map(|lun| attach(&engine, &target, lun, options.clone()));
    let session = the_only_session();
    let state = |lun| session.device_dir(lun).join("state");
    let is = |lun| fs::read_to_string(state(lun)).unwrap().trim().to_owned();
    // The kernel accepts this word only with a newline, as it does `running`.
    fs::write(state(2), "offline").unwrap_err();
    fs::write(state(2), "offline\n").unwrap();
    let keeping = Keeping::start(&engine);
    target.portal_down(0);
    keeping.wait_until("a portal that is gone", |kept| {
        matches!(kept.outcome, SessionRecoveryOutcome::Failed(_))
            && kept.budget_left.is_none_or(|left| left <= BUDGET)
    });
    keeping.wait_until("the recovery timeout", |kept| {
        matches!(kept.outcome, SessionRecoveryOutcome::BudgetSpent)
    });
    assert_eq!(session.state(), "FREE");
    guest::wait_until("the device to be given up", LIMIT, || {
        (is(1) == "transport-offline").then_some(())
    });
    first_block(&units[0].node).unwrap_err();
    assert_eq!(keeping.recovered(), 0);
    target.portal_up(0);
    keeping.wait_until_recovered(1);
    assert_eq!(session.state(), "LOGGED_IN");
    // The device that was offline before runs too: the recovery sets it running when it first
    // sees its session. Otherwise the kernel would block it with the others, and forget that it
    // was offline.
    guest::wait_until("the devices to run", LIMIT, || {
        (is(1) == "running" && is(2) == "running").then_some(())
    });
    for unit in &units {
        first_block(&unit.node).unwrap();
    }
    keeping.end();
    assert_eq!(detach(&engine, &target, 1), [] as [u32; 0]);
    assert_eq!(detach(&engine, &target, 2), [session.id]);
    nothing_is_left();
}

#[test]
fn a_map_survives_the_loss_of_one_portal_and_serves_again_when_one_of_two_lost_ones_returns() {
    two_portals_below_a_map::<IscsiTarget>();
}

#[test]
fn a_map_over_tgt_survives_the_loss_of_one_portal_and_serves_when_one_of_two_returns() {
    two_portals_below_a_map::<Tgt>();
}

fn two_portals_below_a_map<T: Served>() {
    iscsi_tcp::prepare();
    guest::time_limit(Duration::from_secs(600));
    let engine = engine();
    let mut target = T::serve(IQN, &[1], 16 * MIB);
    // multipathd sets its own recovery timeout on the sessions.
    let multipathd = Multipathd::start_with(NoPath::Queue, 3);
    let uri: Source = target.uri(&[0, 1], 1).parse().unwrap();
    let request = AttachRequest::new(uri.clone())
        .log_in(options())
        .min_paths(2)
        .multipath(Multipath::Require);
    let attachment = engine.attach(&request, soon()).unwrap();
    let both = sessions();
    assert_eq!(both.len(), 2, "{both:?}");
    let keeping = Keeping::start(&engine);
    let spent =
        || keeping.count(|kept| matches!(kept.outcome, SessionRecoveryOutcome::BudgetSpent));
    let wait_until_spent = |times: usize| {
        let what = format!("{times} recovery timeouts");
        guest::wait_until(&what, LIMIT, || (spent() >= times).then_some(()));
    };
    let writer = Writer::start(&attachment.node);
    writer.goes_on();
    target.portal_down(0);
    wait_until_spent(1);
    writer.goes_on();
    target.portal_up(0);
    keeping.wait_until_recovered(1);
    // The device runs over the returned path alone.
    target.portal_down(1);
    wait_until_spent(2);
    writer.goes_on();
    target.portal_down(0);
    wait_until_spent(3);
    for session in &both {
        assert_eq!(session.state(), "FREE");
    }
    let before = keeping.recovered();
    target.portal_up(1);
    keeping.wait_until_recovered(before + 1);
    writer.goes_on();
    target.portal_up(0);
    keeping.wait_until_recovered(before + 2);
    writer.end();
    for session in &both {
        assert_eq!(session.state(), "LOGGED_IN");
        assert_eq!(attribute(session.id, "recovery_tmo"), "3");
    }
    keeping.end();
    let detachment = engine.detach(uri, soon()).unwrap();
    assert!(detachment.safe_to_unmap, "{detachment:?}");
    assert_eq!(detachment.logged_out.len(), 2, "{detachment:?}");
    nothing_is_left();
    drop(multipathd);
}

#[test]
fn the_next_process_recovers_the_sessions_of_a_killed_one_also_if_they_were_lost_meanwhile() {
    killed_and_taken_over::<IscsiTarget>();
}

#[test]
fn the_next_process_recovers_a_killed_ones_tgt_sessions_also_if_they_were_lost_meanwhile() {
    killed_and_taken_over::<Tgt>();
}

fn killed_and_taken_over<T: Served>() {
    iscsi_tcp::prepare();
    let mut target = T::serve(IQN, &[1], 16 * MIB);
    target.ask_for_chap(USER);
    let file = "/tmp/recovery-chap";
    fs::write(file, format!("user={}\nsecret={}\n", USER.0, USER.1)).unwrap();
    let uri = target.uri(&[0], 1);
    let chap = ["--chap-file", file, "--digests"];
    let attached = guest::lunbd(&[&["attach", &uri, "--log-in", "--json"], &chap[..]].concat());
    let attached: serde_json::Value = serde_json::from_slice(&attached.stdout).unwrap();
    let node = attached["node"].as_str().unwrap();
    let session = the_only_session();
    let first = HealWatch::start(&chap);
    let writer = Writer::start(Path::new(node));
    writer.goes_on();
    target.cut(0);
    first.wait_until_recovered(session.id);
    first.kill();
    // The session needs no process.
    writer.goes_on();
    let second = HealWatch::start(&chap);
    writer.goes_on();
    target.cut(0);
    second.wait_until_recovered(session.id);
    writer.goes_on();
    second.kill();
    target.cut(0);
    session.wait_for_state("FAILED", LIMIT);
    let third = HealWatch::start(&chap);
    third.wait_until_recovered(session.id);
    writer.goes_on();
    assert_eq!(attribute(session.id, "data_digest"), "1");
    writer.end();
    third.kill();
    assert_eq!(detach(&engine(), &target, 1), [session.id]);
    nothing_is_left();
    fs::remove_file(file).unwrap();
}

#[test]
fn two_recoveries_recover_a_session_once_and_leave_iscsids_sessions_to_iscsid() {
    const CUTS: usize = 3;
    iscsi_tcp::prepare();
    let engine = engine();
    let mut target = IscsiTarget::new(IQN);
    for lun in [1, 2] {
        target.map(lun, &Store::file(&format!("{lun}e5"), 16 * MIB));
    }
    let attachment = attach(&engine, &target, 1, options());
    let ours = the_only_session();
    let iscsid = Iscsid::start();
    let theirs = iscsid.login(PORTALS[1], IQN, Timeouts::default());
    theirs.scanned_disk(2);
    let both = [Keeping::start(&engine), Keeping::start(&engine)];
    let writer = Writer::start(&attachment.node);
    let recovered = || both.iter().map(Keeping::recovered).sum::<usize>();
    for _ in 0..CUTS {
        writer.goes_on();
        let before = recovered();
        target.cut(0);
        guest::wait_until("a recovery", LIMIT, || (recovered() > before).then_some(()));
    }
    target.portal_down(1);
    theirs.wait_for_state("FAILED", LIMIT);
    target.portal_up(1);
    theirs.wait_for_state("LOGGED_IN", LIMIT);
    writer.goes_on();
    writer.end();
    let reports: Vec<_> = both.into_iter().flat_map(Keeping::end).collect();
    for kept in &reports {
        assert_eq!(kept.session.0, ours.id, "{kept:?}");
    }
    // A second login of the same initiator makes the target end the first one's session, which is
    // then lost and recovered again.
    let recovered = reports
        .iter()
        .filter(|kept| matches!(kept.outcome, SessionRecoveryOutcome::Recovered));
    assert_eq!(recovered.count(), CUTS, "{reports:?}");
    assert_eq!(ours.state(), "LOGGED_IN");
    theirs.logout();
    assert_eq!(detach(&engine, &target, 1), [ours.id]);
    drop(iscsid);
    nothing_is_left();
}

const CREATE_SESSION: u16 = 11;
const STOP_CONN: u16 = 18;
const STOP_CONN_TERM: u8 = 1;

/// Sends one `iscsi_uevent`, and nothing more. The socket that does so stays open until the
/// result is dropped.
fn send_event(kind: u16, arguments: [u8; 24]) -> Socket {
    let handle = fs::read_to_string("/sys/class/iscsi_transport/tcp/handle").unwrap();
    let handle: u64 = handle.trim().parse().unwrap();
    let mut message = vec![0; 72];
    message[..4].copy_from_slice(&72_u32.to_ne_bytes());
    message[4..6].copy_from_slice(&kind.to_ne_bytes());
    message[6] = 1;
    message[16..20].copy_from_slice(&u32::from(kind).to_ne_bytes());
    message[24..32].copy_from_slice(&handle.to_ne_bytes());
    message[32..56].copy_from_slice(&arguments);
    let mut socket = Socket::new(NETLINK_ISCSI).unwrap();
    socket.bind(&SocketAddr::new(u32::MAX, 0)).unwrap();
    socket.send_to(&message, &SocketAddr::new(0, 0), 0).unwrap();
    socket
}

fn make_a_session_without_names() -> Socket {
    let mut arguments = [0; 24];
    arguments[0] = 1;
    send_event(CREATE_SESSION, arguments)
}

/// A process that logs out while another one deletes the last device ends the connection first,
/// and may be killed then.
#[test]
fn an_attach_ends_a_session_that_a_killed_logout_left_with_its_target_and_without_connection() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1, 2], MIB);
    attach(&engine, &target, 1, options());
    let left = the_only_session();
    fs::write(left.device_dir(1).join("delete"), "1").unwrap();
    let mut arguments = [0; 24];
    arguments[..4].copy_from_slice(&left.id.to_ne_bytes());
    arguments[16] = STOP_CONN_TERM;
    let _stopping = send_event(STOP_CONN, arguments);
    assert_eq!(left.state(), "LOGGED_IN");
    let attached = attach(&engine, &target, 2, options());
    let session = session_of(&attached);
    assert_ne!(session, left.id);
    assert_eq!(detach(&engine, &target, 2), [session]);
    nothing_is_left();
}

#[test]
fn a_session_without_names_is_ended_if_a_login_of_lunbd_died_and_no_login_is_running() {
    iscsi_tcp::prepare();
    let engine = engine();
    let place = Place::new();
    let journal = place.open(&engine);
    let maker = make_a_session_without_names();
    let session = the_only_session();
    let recover = |limit| {
        let recovery = engine.recover(&journal, Deadline::after(limit)).unwrap();
        assert!(recovery.is_whole(), "{recovery:?}");
        sessions().len()
    };
    // No process of ours has died: the session belongs to another program.
    let keeping = Keeping::start(&engine);
    let doctor = guest::lunbd(&["doctor"]);
    let doctor = String::from_utf8(doctor.stdout).unwrap();
    let words = format!("incomplete sessions of unknown programs: {}", session.id);
    assert!(doctor.contains(&words), "{doctor}");
    assert_eq!(recover(LIMIT), 1);
    assert!(keeping.end().is_empty());
    // A process that dies in a login leaves this, and another process logs in right now.
    let left = "/run/lunbd/iscsi-login-800000000001.lock";
    fs::create_dir_all("/run/lunbd").unwrap();
    fs::write(left, "1").unwrap();
    assert_eq!(recover(Duration::from_secs(2)), 1);
    assert_eq!(session.state(), "FREE");
    assert!(
        fs::exists(left).unwrap(),
        "the next recovery is to know of it"
    );
    drop(maker);
    assert_eq!(recover(LIMIT), 0);
    place.require_clean("ended");
    nothing_is_left();
}

#[test]
fn the_next_login_ends_a_session_without_names_of_a_killed_login_under_another_name() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1], MIB);
    drop(make_a_session_without_names());
    let left = the_only_session();
    // No login of lunbd has died: another program may be making it.
    let attached = attach(&engine, &target, 1, options());
    assert_eq!(sessions().len(), 2);
    assert_eq!(detach(&engine, &target, 1), [session_of(&attached)]);
    fs::write("/run/lunbd/iscsi-login-800000000001.lock", "1").unwrap();
    let attached = attach(&engine, &target, 1, options());
    let session = session_of(&attached);
    assert_ne!(session, left.id);
    assert_eq!(the_only_session().id, session);
    assert_eq!(detach(&engine, &target, 1), [session]);
    nothing_is_left();
}
