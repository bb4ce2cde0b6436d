//! Discovery of the kernel's own target, without a daemon on the machine.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use lunbd::error::Stage;
use lunbd::iscsi::pdu::Isid;
use lunbd::iscsi::{
    Credentials, DiscoveredTarget, DiscoveryOptions, LoginOptions, Parameters, Secret, SessionKind,
    discover, log_in,
};
use lunbd::{Deadline, ErrorKind, Result};
use vm_tests::guest;
use vm_tests::guest::iscsi_target::{DiscoveryAuth, IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{connections, iscsid_runs};

const IQN: &str = "iqn.2026-01.example:discovered";
const INITIATOR: &str = "iqn.2026-01.example:asker";
const USER: (&str, &str) = ("asker", "the-askers-own-secret");
const TARGET: (&str, &str) = ("array", "what-the-array-knows");
const LIMIT: Duration = Duration::from_secs(60);

fn ask(portal: &str, credentials: Option<Credentials>) -> Result<Vec<DiscoveredTarget>> {
    let mut options = DiscoveryOptions::new(INITIATOR.parse().unwrap());
    if let Some(credentials) = credentials {
        options = options.credentials(credentials);
    }
    let found = discover(&portal.parse().unwrap(), &options, Deadline::after(LIMIT))?;
    Ok(found.targets)
}

fn one_way(secret: &str) -> Credentials {
    Credentials::new(USER.0, Secret::new(secret).unwrap()).unwrap()
}

fn mutual(secret: &str) -> Credentials {
    let target = Some(TARGET.0.to_owned());
    let secret = Secret::new(secret).unwrap();
    one_way(USER.1).mutual(target, secret).unwrap()
}

fn assert_is_the_target(found: &[DiscoveredTarget]) {
    let [target] = found else {
        panic!("{found:?}");
    };
    assert_eq!(target.iqn.as_str(), IQN);
    let mut portals: Vec<_> = target
        .portals
        .iter()
        .map(|at| (at.portal.to_string(), at.group))
        .collect();
    portals.sort();
    let mut expected = PORTALS.map(|portal| (portal.to_owned(), Some(1)));
    expected.sort();
    assert_eq!(portals, expected);
}

fn refused(credentials: Option<Credentials>) -> String {
    let error = ask(PORTALS[0], credentials).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
    assert_eq!(error.stage(), Some(Stage::Login), "{error}");
    error.to_string()
}

fn no_connection_is_left() {
    guest::wait_until("no connection", LIMIT, || {
        connections().is_empty().then_some(())
    });
}

#[test]
fn without_a_daemon_each_portal_names_the_target_and_all_its_portals() {
    let _target = IscsiTarget::new(IQN);
    assert!(!iscsid_runs());
    for portal in PORTALS {
        assert_is_the_target(&ask(portal, None).unwrap());
    }
    // If localhost is ::1 too, the target listens at both.
    assert_is_the_target(&ask("localhost", None).unwrap());
    assert!(guest::entries("/sys/class/iscsi_session").is_empty());
    no_connection_is_left();
}

#[test]
fn the_count_of_connections_includes_an_open_one() {
    let _target = IscsiTarget::new(IQN);
    let _open = std::net::TcpStream::connect(PORTALS[0]).unwrap();
    assert!(!connections().is_empty());
}

#[test]
fn a_list_that_takes_several_pdus_is_whole() {
    // 110 names of 310 bytes and more; one PDU holds 32 KiB.
    let name = |at: usize| format!("{IQN}-{at:03}-{}", "x".repeat(180));
    let targets: Vec<_> = (0..110).map(|at| IscsiTarget::new(&name(at))).collect();
    let mut found = ask(PORTALS[2], None).unwrap();
    found.sort_by(|a, b| a.iqn.cmp(&b.iqn));
    let names: Vec<_> = found.iter().map(|target| target.iqn.as_str()).collect();
    let expected: Vec<_> = targets.iter().map(IscsiTarget::iqn).collect();
    assert_eq!(names, expected);
    assert!(found.iter().all(|target| target.portals.len() == 3));
    no_connection_is_left();
}

#[test]
fn a_target_list_behind_chap_requires_the_right_secret() {
    let _target = IscsiTarget::new(IQN);
    let _auth = DiscoveryAuth::chap(USER.0, USER.1, None);
    assert_is_the_target(&ask(PORTALS[0], Some(one_way(USER.1))).unwrap());
    assert_is_the_target(&ask(PORTALS[2], Some(one_way(USER.1))).unwrap());
    let wrong = refused(Some(one_way("another-secret-than-it")));
    assert!(wrong.contains("authentication failed"), "{wrong}");
    // LIO closes the connection of an initiator that offers no CHAP, without an answer.
    let open = ask(PORTALS[0], None).unwrap_err();
    assert_eq!(open.kind(), ErrorKind::Unreachable, "{open}");
    let seen = open.last_seen().unwrap();
    assert!(seen.contains("AuthMethod=None"), "{open}");
    // The target proves nothing to us here, so the discovery does not ask for its targets.
    let unproven = refused(Some(mutual(TARGET.1)));
    assert!(!unproven.contains("authentication failed"), "{unproven}");
    no_connection_is_left();
}

#[test]
fn a_target_must_know_its_own_secret_where_that_is_asked_for() {
    let _target = IscsiTarget::new(IQN);
    let _auth = DiscoveryAuth::chap(USER.0, USER.1, Some(TARGET));
    assert_is_the_target(&ask(PORTALS[1], Some(mutual(TARGET.1))).unwrap());
    let wrong = refused(Some(mutual("not-what-the-array-knows")));
    assert!(wrong.contains("another secret"), "{wrong}");
    no_connection_is_left();
}

#[test]
fn a_discovery_that_requires_proof_refuses_a_target_list_without_authentication() {
    let _target = IscsiTarget::new(IQN);
    refused(Some(mutual(TARGET.1)));
    no_connection_is_left();
}

fn login(target: &str) -> LoginOptions {
    let offer = Parameters {
        header_digest: true,
        ..Parameters::offer()
    };
    let kind = SessionKind::Normal(target.parse().unwrap());
    let isid = Isid([0x80, 1, 2, 3, 0, 0]);
    LoginOptions::new(INITIATOR.parse().unwrap(), kind, isid).offer(offer)
}

#[test]
fn a_login_in_user_space_agrees_on_every_parameter_without_a_session_in_the_kernel() {
    let _target = IscsiTarget::new(IQN);
    let deadline = Deadline::after(LIMIT);
    let portal = PORTALS[2].parse().unwrap();
    let connection = log_in(&portal, &login(IQN), deadline).unwrap();
    let session = &connection.session;
    assert_ne!(session.tsih, 0);
    assert_eq!((session.group, &connection.portal), (Some(1), &portal));
    let wants = |key: &str| {
        let path = format!("/sys/kernel/config/target/iscsi/{IQN}/tpgt_1/param/{key}");
        fs::read_to_string(&path).expect(&path).trim().to_owned()
    };
    let number = |key: &str| wants(key).parse::<u32>().unwrap();
    let expected = Parameters {
        header_digest: wants("HeaderDigest").starts_with("CRC32C"),
        data_digest: false,
        max_recv_data_segment_length: Parameters::offer().max_recv_data_segment_length,
        // The limit is not the MaxRecvDataSegmentLength that LIO declares, but this value or
        // ours.
        max_xmit_data_segment_length: number("MaxXmitDataSegmentLength").min(262_144),
        initial_r2t: wants("InitialR2T") == "Yes",
        immediate_data: wants("ImmediateData") == "Yes",
        max_burst_length: number("MaxBurstLength"),
        first_burst_length: number("FirstBurstLength"),
        max_outstanding_r2t: number("MaxOutstandingR2T"),
        max_connections: 1,
        default_time2wait: number("DefaultTime2Wait"),
        default_time2retain: 0,
        data_pdu_in_order: true,
        data_sequence_in_order: true,
        error_recovery_level: 0,
    };
    assert_eq!(session.parameters, expected);
    assert!(expected.header_digest, "LIO takes digests");
    assert!(guest::entries("/sys/class/iscsi_session").is_empty());
    drop(connection);

    let absent = log_in(&portal, &login("iqn.2026-01.example:absent"), deadline);
    let absent = absent.unwrap_err();
    // LIO does not distinguish an absent target from one that is down.
    assert_eq!(absent.kind(), ErrorKind::NotReady, "{absent}");
    no_connection_is_left();
}

#[test]
fn the_command_prints_a_table_and_json_and_takes_its_secret_from_a_file() {
    let _target = IscsiTarget::new(IQN);
    let _auth = DiscoveryAuth::chap(USER.0, USER.1, None);
    let file = "/tmp/discovery-credentials";
    fs::write(file, format!("user={}\nsecret={}\n", USER.0, USER.1)).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
    let with_file = [
        "discover",
        "127.0.0.2",
        "--initiator",
        INITIATOR,
        "--chap-file",
        file,
    ];
    let table = guest::lunbd(&with_file);
    assert!(table.status.success(), "{table:?}");
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(
        table.contains(IQN) && table.contains("[::1]:3260"),
        "{table}"
    );
    let json = guest::lunbd(&[&with_file[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["targets"][0]["iqn"], IQN);
    assert_eq!(json["targets"][0]["portals"][0]["group"], 1);

    fs::write(file, format!("user={}\nsecret=wrong\n", USER.0)).unwrap();
    let wrong = guest::lunbd(&with_file);
    assert_eq!(wrong.status.code(), Some(7), "{wrong:?}");
    fs::remove_file(file).unwrap();
}
