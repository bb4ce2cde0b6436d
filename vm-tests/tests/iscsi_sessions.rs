//! Sessions of our own in the kernel, with the kernel's own target and no daemon
//! on the machine.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test panics to fail"
)]

use std::time::Instant;

use lunbd::iscsi::{
    KernelSession, SessionName, SessionOptions, StandingSession, connect, hand_over, log_out,
};
use lunbd::{Result, Roots};
use vm_tests::guest;
use vm_tests::guest::agent::soon;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, Session};
use vm_tests::guest::lio::Store;

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

fn standing(session: KernelSession) -> StandingSession {
    StandingSession::new(&Roots::default(), session.id)
}

#[test]
fn a_session_is_made_and_ended_without_a_daemon_and_nothing_of_it_is_left() {
    iscsi_tcp::prepare();
    assert!(!iscsi_tcp::iscsid_runs());
    let store = Store::ramdisk("e1", 8 * MIB);
    let mut target = IscsiTarget::new(IQN);
    target.map(300, &store);
    for portal in 0..PORTALS.len() {
        let name = name(portal);
        let start = Instant::now();
        let session = log_in(&name, &options()).unwrap();
        let took = start.elapsed();
        let standing = standing(session);
        assert_eq!(standing.state().unwrap().as_deref(), Some("LOGGED_IN"));
        assert_eq!(standing.name().unwrap(), Some(name));
        assert!(standing.is_ours().unwrap());
        let (id, host) = (session.id.0, session.host.0);
        assert_eq!(attribute(id, "creator"), "-1");
        assert_eq!(attribute(id, "recovery_tmo"), "120");
        assert_eq!(attribute(id, "tpgt"), "1");
        // Nothing is scanned but what is asked for.
        assert_eq!(standing.devices().unwrap(), []);
        let seen = Session { id, host };
        let disk = seen.scanned_disk(16684);
        let devices = standing.devices().unwrap();
        assert_eq!(devices.len(), 1, "{devices:?}");
        let start = Instant::now();
        log_out(&Roots::default(), &standing, soon()).unwrap();
        println!(
            "{}: login {took:?}, {disk}, logout {:?}",
            PORTALS[portal],
            start.elapsed()
        );
        assert!(!standing.is_there());
        assert!(!seen.device_dir(16684).exists());
        nothing_is_left();
        // Once more is no error.
        log_out(&Roots::default(), &standing, soon()).unwrap();
    }
    assert_eq!(guest::entries("/sys/class/iscsi_session"), [] as [&str; 0]);
}
