//! The commands of a login, a logout and a re-login to the kernel's iSCSI, and the steps of the
//! logins on our own socket. Each fails or never returns: five consecutive seeds cover every
//! step, and 25 cover every step in every way (`guest::faults`).

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use vm_tests::guest;
use vm_tests::guest::fault_table::{ERRORS, Ended, FAULTS, HANGS, Row, expected, faults_of};
use vm_tests::guest::faults::FaultSweep;
use vm_tests::guest::inject::{self, Fault, Traced};
use vm_tests::guest::iscsi_target::IscsiTarget;
use vm_tests::guest::iscsi_tcp::{self, nothing_is_left};
use vm_tests::guest::iscsid::{Session, sessions, the_only_session};
use vm_tests::guest::lio::Store;
use vm_tests::guest::rotation::Part;
use vm_tests::guest::writer::Writer;

/// All acts, without the settings that come after the names: one of them stands for all.
fn is_tried(act: &str) -> bool {
    /// `MAX_RECV_DLENGTH`, and the settings that name a session.
    const SET: [&str; 6] = ["0", "32", "15", "34", "17", "18"];
    match act.split_once(" iscsi set ") {
        Some((_, param)) => SET.iter().any(|set| param.split(':').next() == Some(set)),
        None => act.contains(" iscsi "),
    }
}

const NOT_TOLD: &str =
    "a target that is not told of the logout ends the session with its connection";

const LOGIN: &[Row] = &[
    Row::refused_as("attach iscsi connect:*", ERRORS, "dial", &["unreachable"]),
    Row::refused("attach iscsi connect:*", HANGS, "login"),
    Row::refused_as("attach iscsi send:*", ERRORS, "login", &["unreachable"]),
    Row::refused("attach iscsi send:*", HANGS, "login"),
    Row::refused("attach iscsi event 11:*", ERRORS, "session"),
    Row::refused("attach iscsi event 11:*", HANGS, "login"),
    Row::refused("attach iscsi event 13:*", ERRORS, "session"),
    Row::refused("attach iscsi event 13:*", HANGS, "login"),
    Row::refused("attach iscsi event 15:*", ERRORS, "session"),
    Row::refused("attach iscsi event 15:*", HANGS, "login"),
    Row::refused("attach iscsi set 32:*", ERRORS, "session"),
    Row::refused("attach iscsi set 32:*", HANGS, "login"),
    Row::refused("attach iscsi set 15:*", ERRORS, "session"),
    Row::refused("attach iscsi set 15:*", HANGS, "login"),
    Row::refused("attach iscsi set 34:*", ERRORS, "session"),
    Row::refused("attach iscsi set 34:*", HANGS, "login"),
    Row::refused("attach iscsi set 17:*", ERRORS, "session"),
    Row::refused("attach iscsi set 17:*", HANGS, "login"),
    Row::refused("attach iscsi set 18:*", ERRORS, "session"),
    Row::refused("attach iscsi set 18:*", HANGS, "login"),
    Row::refused("attach iscsi set 0:*", ERRORS, "session"),
    Row::refused("attach iscsi set 0:*", HANGS, "login"),
    Row::refused("attach iscsi event 17:*", ERRORS, "session"),
    Row::refused("attach iscsi event 17:*", HANGS, "login"),
    Row::refused("detach iscsi event 27:*", &FAULTS, "logout"),
    Row::refused("detach iscsi event 18:*", &FAULTS, "logout"),
    Row::refused("detach iscsi event 14:*", &FAULTS, "logout"),
    Row::refused("detach iscsi event 43:*", &FAULTS, "logout"),
    Row::succeeds("detach iscsi event 19:*", ERRORS, NOT_TOLD),
    Row::refused("detach iscsi event 19:*", HANGS, "logout"),
];

/// What the recovery must say of the try that has the fault. The next try succeeds.
const LOGIN_AGAIN: &[Row] = &[
    Row::refused_as("heal iscsi connect:*", ERRORS, "dial", &["unreachable"]),
    Row::refused("heal iscsi connect:*", HANGS, "session"),
    Row::refused_as("heal iscsi send:*", ERRORS, "login", &["unreachable"]),
    Row::refused("heal iscsi send:*", HANGS, "session"),
    Row::refused("heal iscsi event 15:*", &FAULTS, "session"),
    Row::refused("heal iscsi event 17:*", &FAULTS, "session"),
    Row::refused("heal iscsi event 18:*", &FAULTS, "session"),
    Row::refused("heal iscsi event 19:*", &FAULTS, "session"),
    Row::refused("heal iscsi set 32:*", &FAULTS, "session"),
    Row::refused("heal iscsi set 15:*", &FAULTS, "session"),
    Row::refused("heal iscsi set 34:*", &FAULTS, "session"),
    Row::refused("heal iscsi set 17:*", &FAULTS, "session"),
    Row::refused("heal iscsi set 18:*", &FAULTS, "session"),
    Row::refused("heal iscsi set 0:*", &FAULTS, "session"),
];

/// The error of the first try in the output of `heal --watch`: one line, or several.
fn first_failure(said: &Value) -> Option<Value> {
    let first = match said.as_str() {
        Some(lines) => serde_json::from_str(lines.lines().next()?).ok()?,
        None => said.clone(),
    };
    (first["outcome"] == "failed").then(|| first["detail"].clone())
}

#[test]
fn steps_of_a_login_and_a_logout_that_fail_or_hang_end_as_their_table_says() {
    guest::sweep_time_limit();
    iscsi_tcp::prepare();
    let mut target = IscsiTarget::new("iqn.2026-01.example:faults");
    target.map(1, &Store::ramdisk("f1", 8 << 20));
    let source = target.uri(&[0], 1);
    let stands = || !sessions().is_empty();
    FaultSweep::new("iSCSI", vec![source], LOGIN, stands)
        .attach_options(&["--log-in"])
        .only(is_tried)
        .run(&[
            "attach iscsi connect:1",
            "detach iscsi event 27:1",
            // The kernel destroys the session asynchronously.
            "detach iscsi event 43:1",
        ]);
    nothing_is_left();
}

#[test]
fn a_session_without_names_whose_connection_is_lost_too_is_ended_by_the_next_login() {
    iscsi_tcp::prepare();
    let mut target = IscsiTarget::new("iqn.2026-01.example:faults");
    target.map(1, &Store::ramdisk("f3", 8 << 20));
    let source = target.uri(&[0], 1);
    let mut is_cut = false;
    let arguments = ["attach", &source, "--log-in", "--timeout", "300s"].map(str::to_owned);
    // The first setting that names the session.
    let fault = Some(("iscsi set 32:1", Fault::Hangs));
    let traced = inject::run_until(&arguments, fault, |_| {
        let Some(session) = sessions().pop() else {
            return false;
        };
        // A session has an address as soon as it is bound.
        let address = iscsi_tcp::attribute_if_there(session.id, "address");
        if !is_cut && address.is_some_and(|address| address == "127.0.0.1") {
            target.cut(0);
            is_cut = true;
        }
        is_cut && session.state() == "FAILED"
    });
    assert!(traced.injected, "{traced:?}");
    assert_eq!(the_only_session().state(), "FAILED");
    let attached = guest::lunbd(&["attach", &source, "--log-in"]);
    assert!(attached.status.success(), "{attached:?}");
    assert_eq!(the_only_session().state(), "LOGGED_IN");
    let detached = guest::lunbd(&["detach", &source]);
    assert!(detached.status.success(), "{detached:?}");
    nothing_is_left();
}

/// Runs a process that recovers the session until it serves again, or until `patience` is over,
/// which begins with the fault.
fn keep(session: &Session, fault: Option<(&str, Fault)>, patience: Duration) -> Traced {
    /// The time in which the process prints what it did.
    const SPEAKS: Duration = Duration::from_millis(500);
    /// In this time the process comes to the act that has the fault.
    const STARTS: Duration = Duration::from_secs(120);
    let start = Instant::now();
    let mut serves_since = None;
    let arguments = ["heal", "--watch"].map(str::to_owned);
    let mut injected_at = None;
    inject::run_until(&arguments, fault, |is_injected| {
        if is_injected {
            injected_at.get_or_insert_with(Instant::now);
        }
        let (begun, limit) = match injected_at {
            Some(at) => (at, patience),
            None if fault.is_some() => (start, STARTS),
            None => (start, patience),
        };
        // The recovery has no more work if it holds no lock.
        let leases = guest::entries("/run/lunbd");
        let works = leases.iter().any(|name| name.starts_with("iscsi-login"));
        let serves = session.state() == "LOGGED_IN" && !works;
        let since = serves.then(|| *serves_since.get_or_insert_with(Instant::now));
        since.is_some_and(|since| since.elapsed() > SPEAKS) || begun.elapsed() > limit
    })
}

#[test]
fn the_try_after_a_failed_or_hung_step_of_a_re_login_succeeds() {
    /// One try takes at most 10 seconds, and one that hangs is reported after 15.
    const HUNG: Duration = Duration::from_secs(40);
    const LIMIT: Duration = Duration::from_secs(120);
    guest::sweep_time_limit();
    let begun = Instant::now();
    iscsi_tcp::prepare();
    let mut target = IscsiTarget::new("iqn.2026-01.example:faults");
    target.map(1, &Store::file("f2", 16 << 20));
    let source = target.uri(&[0], 1);
    let attached = guest::lunbd(&["attach", &source, "--log-in", "--json"]);
    let attached: Value = serde_json::from_slice(&attached.stdout).unwrap();
    let session = the_only_session();
    // Longer than all hangs of this test.
    let budget = format!(
        "/sys/class/iscsi_session/session{}/recovery_tmo",
        session.id
    );
    std::fs::write(budget, "600").unwrap();
    let writer = Writer::start(Path::new(attached["node"].as_str().unwrap()));
    let lose = || {
        writer.goes_on();
        target.cut(0);
        session.wait_for_state("FAILED", LIMIT);
    };
    lose();
    let undisturbed = keep(&session, None, LIMIT);
    println!("acts: {:?}", undisturbed.acts);
    // The commands that stop the connection, bind the new socket and start the session.
    for act in ["iscsi event 18:1", "iscsi event 15:1", "iscsi event 17:1"] {
        assert!(undisturbed.acts.iter().any(|done| done == act), "{act}");
    }
    let tried = undisturbed
        .acts
        .iter()
        .filter(|act| is_tried(&format!("heal {act}")));
    let tried: Vec<String> = tried.cloned().collect();
    for act in &tried {
        for fault in FAULTS {
            let row = expected(LOGIN_AGAIN, &format!("heal {act}"), fault);
            assert!(row.is_ok(), "{act}: {row:?}");
        }
    }
    let part = Part::of_this_run();
    let faults = faults_of(part, guest::seed(), "login again", &tried);
    let (mut met, mut hung) = (Vec::new(), 0);
    for (act, fault) in &faults {
        let fault = *fault;
        let hangs = fault == Fault::Hangs;
        lose();
        let patience = if hangs { HUNG } else { LIMIT };
        let traced = keep(&session, Some((act, fault)), patience);
        println!("{act}, {fault:?}: {traced:?}");
        assert!(traced.injected, "{act}, {fault:?}");
        assert_eq!(traced.code, None, "{act}, {fault:?}: it ended by itself");
        let failure = first_failure(&traced.said).unwrap_or_default();
        let said = failure["stage"].as_str().zip(failure["kind"].as_str());
        let ended = said.map_or(Ended::Succeeded, |(stage, kind)| {
            Ended::Refused(stage, kind)
        });
        let row = expected(LOGIN_AGAIN, &format!("heal {act}"), fault);
        let compared = row.and_then(|row| row.compare(fault, ended));
        compared.unwrap_or_else(|why| panic!("{act}, {fault:?}: {why}: {traced:?}"));
        if session.state() != "LOGGED_IN" {
            assert!(hangs, "{act}, {fault:?}: it was not tried again");
            keep(&session, None, LIMIT);
        }
        assert_eq!(session.state(), "LOGGED_IN", "{act}, {fault:?}");
        met.push(format!("{act} {fault}"));
        hung += usize::from(hangs);
    }
    assert!(hung > 0, "{met:?}");
    // The next login of the session removes what a hung one has left.
    lose();
    keep(&session, None, LIMIT);
    assert_eq!(session.state(), "LOGGED_IN");
    guest::tell_met(&format!(
        "login again faults: {} of {} this run ({part}), {hung} of them hung, in {} s: {}",
        met.len(),
        FAULTS.len() * tried.len(),
        begun.elapsed().as_secs(),
        met.join("; "),
    ));
    if guest::sweeps_are_whole() {
        guest::tell_whole_sweep(
            "failing and hanging calls, a login again",
            format!("{} failed, {hung} hung", met.len() - hung),
            format!("{} acts", tried.len()),
            begun.elapsed(),
        );
    }
    writer.goes_on();
    writer.end();
    let detached = guest::lunbd(&["detach", &source]);
    assert!(detached.status.success(), "{detached:?}");
    nothing_is_left();
}
