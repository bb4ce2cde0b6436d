//! A machine without open-iscsi and without a process that recovers sessions.

use std::fs;
use std::process::Output;
use std::time::{Duration, Instant};

use lunbd::iscsi::INITIATOR_NAME_FILE;
use vm_tests::guest;
use vm_tests::guest::iscsi_target::IscsiTarget;
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::the_only_session;
use vm_tests::guest::served::Served;
use vm_tests::guest::writer::first_block;

const IQN: &str = "iqn.2026-01.example:once";

fn said(output: &Output) -> String {
    let both = [&*output.stdout, &*output.stderr].concat();
    String::from_utf8(both).unwrap()
}

#[test]
fn a_command_without_an_initiator_name_says_how_to_make_one_and_a_login_then_uses_it() {
    iscsi_tcp::prepare();
    fs::remove_file(INITIATOR_NAME_FILE).unwrap();
    let target = IscsiTarget::serve(IQN, &[1], 8 << 20);
    let uri = target.uri(&[0], 1);
    let attach = || guest::lunbd(&["attach", &uri, "--log-in"]);
    for refused in [attach(), guest::lunbd(&["doctor"])] {
        let text = said(&refused);
        assert!(text.contains("lunbd initiator-name --create"), "{text}");
    }
    let made = guest::lunbd(&["initiator-name", "--create"]);
    let name = said(&made).trim().to_owned();
    assert!(name.starts_with("iqn.2016-04.com.open-iscsi:"), "{name}");
    assert!(said(&guest::lunbd(&["doctor"])).contains(&name));
    let attached = attach();
    assert!(attached.status.success(), "{}", said(&attached));
    assert_eq!(attribute(the_only_session().id, "initiatorname"), name);
    let again = guest::lunbd(&["initiator-name", "--create"]);
    assert_eq!(said(&again).trim(), name);
    let detached = guest::lunbd(&["detach", &uri]);
    assert!(detached.status.success(), "{}", said(&detached));
    nothing_is_left();
}

#[test]
fn heal_recovers_once_a_lost_session_that_no_process_maintains() {
    iscsi_tcp::prepare();
    let target = IscsiTarget::serve(IQN, &[1], 8 << 20);
    let uri = target.uri(&[0], 1);
    let attached = guest::lunbd(&["attach", &uri, "--log-in", "--json"]);
    let attached: serde_json::Value = serde_json::from_slice(&attached.stdout).unwrap();
    let node = attached["node"].as_str().unwrap();
    let session = the_only_session();
    let heal = |uri: &str, timeout: &str| {
        let healed = guest::lunbd(&["heal", uri, "--timeout", timeout]);
        (healed.status.code(), said(&healed))
    };
    let (code, text) = heal(&uri, "60s");
    assert!(code == Some(0) && text.contains("serves"), "{text}");
    target.portal_down(0);
    guest::wait_until("the session to be lost", Duration::from_secs(60), || {
        (session.state() != "LOGGED_IN").then_some(())
    });
    let (code, text) = heal(&uri, "5s");
    assert!(code == Some(1) && text.contains("lost"), "{text}");
    target.portal_up(0);
    let (code, text) = heal(&uri, "60s");
    assert!(
        code == Some(0) && text.contains("logged in again"),
        "{text}"
    );
    assert_eq!(session.state(), "LOGGED_IN");
    first_block(node.as_ref()).unwrap();
    let (code, text) = heal(&target.uri(&[1], 1), "60s");
    assert!(
        code == Some(3) && text.contains("attach --log-in"),
        "{text}"
    );
    let detached = guest::lunbd(&["detach", &uri]);
    assert!(detached.status.success(), "{}", said(&detached));
    nothing_is_left();
}

/// A file on a file server that does not answer waits as a pipe does that no process writes.
#[test]
fn heal_ends_in_time_if_the_file_of_its_secrets_does_not_answer() {
    const FILE: &str = "/tmp/heal-chap";
    iscsi_tcp::prepare();
    let target = IscsiTarget::serve(IQN, &[1], 8 << 20);
    let uri = target.uri(&[0], 1);
    let attached = guest::lunbd(&["attach", &uri, "--log-in"]);
    assert!(attached.status.success(), "{}", said(&attached));
    let session = the_only_session();
    target.portal_down(0);
    guest::wait_until("the session to be lost", Duration::from_secs(60), || {
        (session.state() != "LOGGED_IN").then_some(())
    });
    nix::unistd::mkfifo(FILE, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let start = Instant::now();
    // One attempt takes at most 10 s of it.
    let healed = guest::lunbd(&["heal", &uri, "--timeout", "12s", "--chap-file", FILE]);
    let took = start.elapsed();
    assert_eq!(healed.status.code(), Some(1), "{}", said(&healed));
    assert!(took < Duration::from_secs(17), "{took:?}");
    fs::remove_file(FILE).unwrap();
    target.portal_up(0);
    let healed = guest::lunbd(&["heal", &uri, "--timeout", "60s"]);
    assert!(healed.status.success(), "{}", said(&healed));
    let detached = guest::lunbd(&["detach", &uri]);
    assert!(detached.status.success(), "{}", said(&detached));
    nothing_is_left();
}
