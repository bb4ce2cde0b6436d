//! Sessions of our own in the kernel, with the kernel's own target and without a daemon on the
//! machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use lunbd::error::Stage;
use lunbd::id::SessionId;
use lunbd::iscsi::{
    IscsiSession, KernelSession, SessionName, SessionOptions, connect, hand_over, log_out,
};
use lunbd::{Deadline, ErrorKind, Result, Roots};
use vm_tests::guest;
use vm_tests::guest::agent::soon;
use vm_tests::guest::iscsi_proxy::{IscsiProxy, Wish};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, Iscsid, Session, Timeouts};
use vm_tests::guest::lio::Store;
use vm_tests::guest::served::Served;
use vm_tests::guest::tgt::Tgt;

const IQN: &str = "iqn.2026-01.example:sessions";
const MIB: u64 = 1 << 20;

fn options() -> SessionOptions {
    SessionOptions::new(INITIATOR.parse().unwrap())
}

fn name(portal: usize) -> SessionName {
    SessionName {
        initiator: INITIATOR.parse().unwrap(),
        target: IQN.parse().unwrap(),
        portal: PORTALS[portal].parse().unwrap(),
    }
}

fn log_in(name: &SessionName, options: &SessionOptions) -> Result<KernelSession> {
    let connection = connect(name, options, soon())?;
    hand_over(&Roots::default(), name, connection, options, soon())
}

fn standing(session: KernelSession) -> IscsiSession {
    IscsiSession::new(&Roots::default(), session.id)
}

#[test]
fn a_session_is_made_and_ended_without_a_daemon_and_nothing_of_it_is_left() {
    iscsi_tcp::prepare();
    assert!(!iscsi_tcp::iscsid_runs());
    let store = Store::ramdisk("e1", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(300, &store);
    for (at, portal) in PORTALS.iter().enumerate() {
        let name = name(at);
        let start = Instant::now();
        let session = log_in(&name, &options()).unwrap();
        let took = start.elapsed();
        let standing = standing(session);
        assert_eq!(standing.state().unwrap().as_deref(), Some("LOGGED_IN"));
        assert_eq!(standing.name().unwrap(), Some(name));
        assert!(standing.is_lunbd_owned().unwrap());
        let (id, host) = (session.id.0, session.host.0);
        assert_eq!(attribute(id, "creator"), "-1");
        assert_eq!(attribute(id, "recovery_tmo"), "120");
        assert_eq!(attribute(id, "tpgt"), "1");
        // Only requested units are scanned.
        assert_eq!(standing.devices().unwrap(), []);
        let seen = Session { id, host };
        let disk = seen.scanned_disk(300);
        let devices = standing.devices().unwrap();
        assert_eq!(devices.len(), 1, "{devices:?}");
        let start = Instant::now();
        log_out(&Roots::default(), &standing, soon()).unwrap();
        println!(
            "{}: login {took:?}, {disk}, logout {:?}",
            portal,
            start.elapsed()
        );
        assert!(!standing.is_there());
        assert!(!seen.device_dir(300).exists());
        nothing_is_left();
        // A second logout is no error.
        log_out(&Roots::default(), &standing, soon()).unwrap();
    }
    assert_eq!(guest::entries("/sys/class/iscsi_session"), [] as [&str; 0]);
}

#[test]
fn every_parameter_that_was_agreed_on_is_what_the_kernel_has() {
    what_was_agreed_on_is_there::<IscsiTarget>();
}

#[test]
fn of_tgt_every_parameter_that_was_agreed_on_is_what_the_kernel_has() {
    what_was_agreed_on_is_there::<Tgt>();
}

fn what_was_agreed_on_is_there<T: Served>() {
    iscsi_tcp::prepare();
    let target = T::serve(IQN, &[1], 1 << 20);
    let name = name(1);
    let options = options()
        .digests(true, true)
        .recovery_timeout(Duration::from_secs(7));
    let connection = connect(&name, &options, soon()).unwrap();
    let agreed = connection.session.parameters.clone();
    assert!(agreed.header_digest && agreed.data_digest, "both take them");
    let session = hand_over(&Roots::default(), &name, connection, &options, soon()).unwrap();
    let flag = |yes: bool| u8::from(yes).to_string();
    for (attribute_name, expected) in [
        ("state", "LOGGED_IN".to_owned()),
        ("creator", "-1".to_owned()),
        ("ifacename", "lunbd".to_owned()),
        ("targetname", IQN.to_owned()),
        ("initiatorname", INITIATOR.to_owned()),
        ("persistent_address", "127.0.0.2".to_owned()),
        ("persistent_port", "3260".to_owned()),
        ("address", "127.0.0.2".to_owned()),
        ("port", "3260".to_owned()),
        ("tpgt", "1".to_owned()),
        ("recovery_tmo", "7".to_owned()),
        ("header_digest", flag(agreed.header_digest)),
        ("data_digest", flag(agreed.data_digest)),
        (
            "max_recv_dlength",
            agreed.max_recv_data_segment_length.to_string(),
        ),
        (
            "max_xmit_dlength",
            agreed.max_xmit_data_segment_length.to_string(),
        ),
        ("initial_r2t", flag(agreed.initial_r2t)),
        ("immediate_data", flag(agreed.immediate_data)),
        ("first_burst_len", agreed.first_burst_length.to_string()),
        ("max_burst_len", agreed.max_burst_length.to_string()),
        (
            "max_outstanding_r2t",
            agreed.max_outstanding_r2t.to_string(),
        ),
        ("data_pdu_in_order", flag(agreed.data_pdu_in_order)),
        ("data_seq_in_order", flag(agreed.data_sequence_in_order)),
        ("erl", agreed.error_recovery_level.to_string()),
        ("fast_abort", "1".to_owned()),
        ("abort_tmo", "15".to_owned()),
        ("lu_reset_tmo", "30".to_owned()),
        ("tgt_reset_tmo", "30".to_owned()),
        ("ping_tmo", "5".to_owned()),
        ("recv_tmo", "5".to_owned()),
        // Nothing that would name a user or a secret is there.
        ("username", "(null)".to_owned()),
        ("password", "(null)".to_owned()),
    ] {
        let found = attribute(session.id.0, attribute_name);
        assert_eq!(found, expected, "{attribute_name}");
    }
    log_out(&Roots::default(), &standing(session), soon()).unwrap();
    drop(target);
    nothing_is_left();
}

/// `iscsiadm -P 3`'s description of a session, by its own labels.
fn shown_by_iscsiadm(session: u32) -> BTreeMap<String, String> {
    let id = session.to_string();
    let shown = guest::run(&["iscsiadm", "-m", "session", "-r", &id, "-P", "3"]);
    println!("{shown}");
    let lines = shown
        .lines()
        .filter_map(|line| line.trim().split_once(": "));
    lines
        .map(|(word, value)| (word.to_owned(), value.trim().to_owned()))
        .collect()
}

#[test]
fn every_session_value_that_iscsiadm_shows_is_read_back_for_sessions_of_both_creators() {
    const SAME: [(&str, &str); 15] = [
        ("Iface Name", "ifacename"),
        ("Iface IPaddress", "ipaddress"),
        ("Recovery Timeout", "recovery_tmo"),
        ("Target Reset Timeout", "tgt_reset_tmo"),
        ("LUN Reset Timeout", "lu_reset_tmo"),
        ("Abort Timeout", "abort_tmo"),
        ("HeaderDigest", "header_digest"),
        ("DataDigest", "data_digest"),
        ("MaxRecvDataSegmentLength", "max_recv_dlength"),
        ("MaxXmitDataSegmentLength", "max_xmit_dlength"),
        ("FirstBurstLength", "first_burst_len"),
        ("MaxBurstLength", "max_burst_len"),
        ("ImmediateData", "immediate_data"),
        ("InitialR2T", "initial_r2t"),
        ("MaxOutstandingR2T", "max_outstanding_r2t"),
    ];
    iscsi_tcp::prepare();
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &Store::ramdisk("e9", 8 * MIB));
    let ours = log_in(&name(0), &options().digests(true, false)).unwrap();
    let iscsid = Iscsid::start();
    let theirs = iscsid.login(PORTALS[1], IQN, Timeouts::default());
    let theirs = IscsiSession::new(&Roots::default(), SessionId(theirs.id));
    for session in [standing(ours), theirs] {
        let shown = shown_by_iscsiadm(session.id().0);
        let facts = session.facts().unwrap().unwrap();
        for (word, name) in SAME {
            let said = match (&*shown[word], &*facts.parameters[name]) {
                ("Yes" | "CRC32C", "1") | ("No" | "None", "0") => continue,
                said => said,
            };
            assert_eq!(said.0, said.1, "{word}");
        }
        let parameter = |name| &facts.parameters[name];
        let portal = format!("{}:{}", parameter("address"), parameter("port"));
        assert_eq!(
            shown["Current Portal"],
            format!("{portal},{}", parameter("tpgt"))
        );
        let asked = facts.portal.as_ref().unwrap().to_string();
        assert_eq!(
            shown["Persistent Portal"],
            format!("{asked},{}", parameter("tpgt"))
        );
        assert_eq!(
            shown["Iface Initiatorname"],
            facts.initiator.unwrap().as_str()
        );
        assert_eq!(shown["iSCSI Session State"], facts.state);
        assert_eq!(facts.connection_state.as_deref(), Some("up"));
        let host = shown["Host Number"].split_whitespace().next().unwrap();
        assert_eq!(host, facts.host.unwrap().to_string());
    }
    log_out(&Roots::default(), &standing(ours), soon()).unwrap();
    drop(iscsid);
    nothing_is_left();
}

#[test]
fn a_login_without_a_hand_over_leaves_nothing_and_an_unfinished_hand_over_is_rolled_back() {
    iscsi_tcp::prepare();
    let target = IscsiTarget::new(IQN);
    let name = name(0);
    let before = guest::descriptors_and_threads();
    drop(connect(&name, &options(), soon()).unwrap());
    nothing_is_left();

    // The target closes between the login and the hand-over to the kernel.
    let connection = connect(&name, &options(), soon()).unwrap();
    target.stop();
    let handed_over = hand_over(&Roots::default(), &name, connection, &options(), soon());
    println!("{handed_over:?}");
    if let Ok(session) = handed_over {
        // The kernel has not noticed the close yet, which is no error.
        log_out(&Roots::default(), &standing(session), soon()).unwrap();
    }
    nothing_is_left();
    target.start();

    // The deadline has passed.
    let connection = connect(&name, &options(), soon()).unwrap();
    let late = Deadline::after(Duration::ZERO);
    let error = hand_over(&Roots::default(), &name, connection, &options(), late).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Session), "{error}");
    nothing_is_left();

    // The deadline passes as soon as the hand-over has begun.
    let (wanted, mut limit) = (options(), Duration::from_micros(50));
    guest::wait_until("a hand-over that begins", Duration::from_secs(60), || {
        let connection = connect(&name, &wanted, soon()).unwrap();
        let late = Deadline::after(limit);
        limit *= 2;
        let handed_over = hand_over(&Roots::default(), &name, connection, &wanted, late);
        let error = match handed_over {
            Err(error) => error,
            Ok(session) => {
                // The limit grew while the thread did not run.
                log_out(&Roots::default(), &standing(session), soon()).unwrap();
                limit = Duration::from_micros(50);
                return None;
            }
        };
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        let seen = error.last_seen().unwrap_or_default();
        (!seen.starts_with("not begun")).then_some(())
    });
    // Its thread rolls it back after the call.
    guest::wait_for_no_more_than(&before);
    nothing_is_left();
}

#[test]
fn a_logout_ends_a_session_whose_target_is_gone() {
    iscsi_tcp::prepare();
    // The kernel writes a cache back when it removes the disk, and waits for the session for
    // that.
    let store = Store::file("e2", 8 * MIB);
    store.set_write_cache(true);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let session = log_in(&name(0), &options()).unwrap();
    let (id, host) = (session.id.0, session.host.0);
    let seen = Session { id, host };
    seen.scanned_disk(1);
    target.portal_down(0);
    seen.wait_for_state("FAILED", Duration::from_secs(60));
    let start = Instant::now();
    log_out(&Roots::default(), &standing(session), soon()).unwrap();
    println!("a dead one: logout {:?}", start.elapsed());
    nothing_is_left();
    target.portal_up(0);
}

/// Waits until the kernel has read the partition table of a new disk: it sends the disk's event
/// afterwards (`block/genhd.c`, `device_add_disk`). A disk that is removed before
/// may get no flush.
fn has_been_probed(disk: &str) {
    let number = fs::read_to_string(format!("/sys/block/{disk}/dev")).unwrap();
    let record = format!("/run/udev/data/b{}", number.trim());
    guest::wait_until("udev's record of the disk", Duration::from_secs(60), || {
        Path::new(&record).exists().then_some(())
    });
}

#[test]
fn a_live_target_receives_the_last_flush_then_the_logout_and_a_dead_one_causes_no_wait() {
    iscsi_tcp::prepare();
    // With a write cache the kernel flushes a disk that it removes.
    let store = Store::file("e3", 8 * MIB);
    store.set_write_cache(true);
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &store);
    let proxy = IscsiProxy::start("127.0.0.9:3260", PORTALS[0]);
    let name = SessionName {
        portal: "127.0.0.9:3260".parse().unwrap(),
        ..name(0)
    };
    for lives in [true, false] {
        let session = log_in(&name, &options()).unwrap();
        let (id, host) = (session.id.0, session.host.0);
        let seen = Session { id, host };
        let disk = seen.scanned_disk(1);
        has_been_probed(&disk);
        let before = proxy.wishes().len();
        if !lives {
            proxy.cut();
            seen.wait_for_state("FAILED", Duration::from_secs(60));
        }
        // A flush on a dead path waits for the recovery timeout, which is longer.
        log_out(&Roots::default(), &standing(session), soon()).unwrap();
        let expected: &[Wish] = if lives {
            &[Wish::Flush, Wish::Logout]
        } else {
            &[]
        };
        nothing_is_left();
        // When the connections have ended, the proxy has read everything that was sent on them.
        assert_eq!(&proxy.wishes()[before..], expected, "alive: {lives}");
    }
}
