//! A session's settings that a vendor prescribes, and the local end of its connection.

use std::fs;
use std::process::Output;
use std::time::Duration;

use lunbd::engine::{SessionRecoveryOptions, SessionRecoveryOutcome};
use lunbd::iscsi::{IscsiSession, SessionOptions, Tunable, Tunables};
use lunbd::{AttachRequest, Roots, Source};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::directory::Directory;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, Session, the_only_session};
use vm_tests::guest::served::Served;
use vm_tests::guest::writer::first_block;

const IQN: &str = "iqn.2026-01.example:tuned";
const FROM: &str = "127.0.0.77";

/// Each value differs from its default, and LIO accepts it.
const TUNED: [(Tunable, u32, &str); 11] = [
    (Tunable::NopInterval, 7, "recv_tmo"),
    (Tunable::NopTimeout, 9, "ping_tmo"),
    (Tunable::QueueDepth, 48, "queue_depth"),
    (Tunable::CommandsMax, 256, "can_queue"),
    (Tunable::AbortTimeout, 11, "abort_tmo"),
    (Tunable::LuResetTimeout, 21, "lu_reset_tmo"),
    (Tunable::TargetResetTimeout, 22, "tgt_reset_tmo"),
    (Tunable::FirstBurst, 32_768, "first_burst_len"),
    (Tunable::MaxBurst, 131_072, "max_burst_len"),
    (Tunable::ReceiveSegment, 65_536, "max_recv_dlength"),
    (Tunable::SendSegment, 4096, "max_xmit_dlength"),
];

fn said(output: &Output) -> String {
    let both = [&*output.stdout, &*output.stderr].concat();
    String::from_utf8(both).unwrap()
}

fn done(arguments: &[&str]) -> String {
    let output = guest::lunbd(arguments);
    let text = said(&output);
    assert!(output.status.success(), "{arguments:?}: {text}");
    text
}

/// The kernel's value, read without the engine.
fn shown(session: &Session, setting: Tunable, name: &str) -> u32 {
    let host = session.host;
    let read = |path: String| fs::read_to_string(&path).expect(&path);
    let text = match setting {
        Tunable::QueueDepth => read(format!("/sys/bus/scsi/devices/{host}:0:0:1/queue_depth")),
        Tunable::CommandsMax => read(format!("/sys/class/scsi_host/host{host}/can_queue")),
        _ => attribute(session.id, name),
    };
    let value: u32 = text.trim().parse().unwrap();
    // The kernel reserves 15 of all commands for itself.
    value
        + if setting == Tunable::CommandsMax {
            15
        } else {
            0
        }
}

fn of_host(session: &Session, name: &str) -> String {
    let host = session.host;
    let path = format!("/sys/class/iscsi_host/host{host}/{name}");
    fs::read_to_string(path).unwrap().trim().to_owned()
}

fn assert_is_as_tuned(session: &Session) {
    for (setting, value, name) in TUNED {
        assert_eq!(shown(session, setting, name), value, "{setting}");
    }
    assert_eq!(of_host(session, "ipaddress"), FROM);
    assert_eq!(of_host(session, "netdev"), "lo");
}

#[test]
fn the_kernel_has_each_setting_and_keeps_it_over_a_recovery() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1], 8 << 20);
    let mut tunables = Tunables::default();
    for (setting, value, _) in TUNED {
        tunables.set(setting, value).unwrap();
    }
    let options = SessionOptions::new(INITIATOR.parse().unwrap())
        .tunables(tunables)
        .interface("lo".parse().unwrap())
        .source_address(FROM.parse().unwrap());
    let source: Source = target.uri(&[0], 1).parse().unwrap();
    let request = AttachRequest::new(source.clone()).log_in(options.clone());
    let attachment = engine.attach(&request, soon()).unwrap();
    assert_eq!(attachment.paths()[0].unmet_settings, []);
    let session = the_only_session();
    assert_is_as_tuned(&session);

    target.portal_down(0);
    guest::wait_until("the session to be lost", Duration::from_secs(60), || {
        (session.state() != "LOGGED_IN").then_some(())
    });
    target.portal_up(0);
    let Source::Iscsi(uri) = &source else {
        unreachable!("it is an iSCSI source");
    };
    // The settings come from the session alone, as for another process.
    let healed = engine
        .heal_sessions(uri, &SessionRecoveryOptions::new(), soon())
        .unwrap();
    assert!(
        matches!(healed[0].outcome, SessionRecoveryOutcome::Recovered),
        "{healed:?}"
    );
    first_block(&attachment.node).unwrap();
    assert_is_as_tuned(&session);
    let hctl = attachment.hctl().unwrap();
    let roots = Roots::default();
    let standing = IscsiSession::new(&roots, lunbd::id::SessionId(session.id));
    assert_eq!(standing.unmet(&roots, &options, hctl), []);
    engine.detach(source, soon()).unwrap();
    nothing_is_left();
}

#[test]
fn an_attach_over_an_existing_session_names_the_settings_that_differ() {
    iscsi_tcp::prepare();
    let target = IscsiTarget::serve(IQN, &[1], 8 << 20);
    let uri = target.uri(&[0], 1);
    let plain = done(&["attach", &uri, "--log-in"]);
    assert!(!plain.contains("setting "), "{plain}");
    let tuned = [
        "attach",
        &uri,
        "--log-in",
        "--tune=queue_depth=48",
        "--tune=abort_timeout=15",
        "--tune=nop_timeout=9",
        "--interface=lo",
        "--source-address",
        FROM,
    ];
    let again = done(&tuned);
    let portal = PORTALS[0];
    for expected in [
        "queue_depth is 32, not 48".to_owned(),
        "nop_timeout is 5, not 9".to_owned(),
        "interface is not known, and not lo for certain".to_owned(),
        format!("source_address is 127.0.0.1, not {FROM}"),
        portal.to_owned(),
    ] {
        assert!(again.contains(&expected), "{expected}: {again}");
    }
    assert!(!again.contains("abort_timeout"), "{again}");
    done(&["detach", &uri]);
    nothing_is_left();

    let fresh = done(&tuned);
    assert!(!fresh.contains("setting "), "{fresh}");
    let session = the_only_session();
    assert_eq!(shown(&session, Tunable::QueueDepth, ""), 48);
    assert_eq!(of_host(&session, "ipaddress"), FROM);
    let bound = done(&[
        "discover",
        portal,
        "--source-address",
        FROM,
        "--interface=lo",
    ]);
    assert!(bound.contains(IQN), "{bound}");
    done(&["detach", &uri]);
    nothing_is_left();
}

#[test]
fn settings_of_a_file_are_in_the_journal_and_wrong_ones_are_refused_by_their_limits() {
    iscsi_tcp::prepare();
    let target = IscsiTarget::serve(IQN, &[1], 8 << 20);
    let uri = target.uri(&[0], 1);
    let directory = Directory::new("tuned");
    let (file, journal) = (directory.join("v.toml"), directory.join("journal"));
    let [path, journal] = [&*file, &*journal].map(|path| path.to_str().unwrap());
    let apply = |settings: &str| {
        let text =
            format!("[[volume]]\nid = \"v\"\nsource = \"{uri}\"\nlog_in = {{ {settings} }}\n");
        fs::write(&file, text).unwrap();
        guest::lunbd(&["apply", path, "--journal", journal])
    };
    for (settings, names) in [
        ("tune = { queue_depth = 1025 }", "1 to 1024"),
        ("tune = { queue_depth = 114 }", "commands_max, 128"),
        ("tune = { commands_max = 100 }", "a power of 2"),
        ("tune = { depth = 1 }", "queue_depth"),
        ("interface = \"eth0/1\"", "the name of a network interface"),
    ] {
        let refused = apply(settings);
        let text = said(&refused);
        assert!(!refused.status.success() && text.contains(names), "{text}");
    }
    let absent = apply("interface = \"eth77\"");
    let text = said(&absent);
    assert!(
        !absent.status.success() && text.contains("eth77: there is no such interface"),
        "{text}"
    );
    nothing_is_left();
    let settings =
        format!("tune = {{ queue_depth = 48, first_burst = 32768 }}, source_address = \"{FROM}\"");
    let applied = apply(&settings);
    assert!(applied.status.success(), "{}", said(&applied));
    let session = the_only_session();
    assert_eq!(shown(&session, Tunable::QueueDepth, ""), 48);
    assert_eq!(
        shown(&session, Tunable::FirstBurst, "first_burst_len"),
        32_768
    );
    assert_eq!(of_host(&session, "ipaddress"), FROM);
    let written = done(&["journal", "show", "--journal", journal, "--json"]);
    let written: serde_json::Value = serde_json::from_str(&written).unwrap();
    let log_in = &written["records"][0]["spec"]["log_in"];
    let tune = serde_json::json!({"queue_depth": 48, "first_burst": 32_768});
    assert_eq!(log_in["tune"], tune);
    assert_eq!(log_in["source_address"], FROM);
    done(&["detach", "--volume", "v", "--journal", journal]);
    nothing_is_left();
}
