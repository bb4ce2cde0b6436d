//! The paths of an iSCSI source, read from the sysfs of sessions of open-iscsi's daemon with
//! the kernel's own target.

use std::fs;
use std::time::Duration;

use lunbd::Roots;
use lunbd::id::{Hctl, HostNo, IscsiUri, Lun, SessionId};
use lunbd::transport::{MissingReason, Route, RouteKind, iscsi_routes, transport_of};
use vm_tests::guest;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Session, Timeouts};
use vm_tests::guest::lio::Store;

const IQN: &str = "iqn.2026-01.example:routes";
const LIMIT: Duration = Duration::from_secs(60);
fn routes(portals: &[&str]) -> Vec<Route> {
    let uri: IscsiUri = format!("iscsi://{}/{IQN}/3", portals.join(","))
        .parse()
        .unwrap();
    iscsi_routes(&Roots::default(), &uri).unwrap()
}

fn hctl(session: &Session, lun: u64) -> Hctl {
    Hctl {
        host: HostNo(session.host),
        channel: 0,
        target: 0,
        lun: Lun::from_kernel(lun),
    }
}

fn route(portal: &str, session: &Session) -> Route {
    Route {
        via: RouteKind::Iscsi {
            portal: portal.parse().unwrap(),
            session: Some(SessionId(session.id)),
        },
        address: Ok(hctl(session, 3)),
    }
}

/// The errno of reading an attribute of the session's connection; `None` if the read succeeds.
fn errno(session: &Session, attribute: &str) -> Option<i32> {
    let id = session.id;
    let path = format!("/sys/class/iscsi_connection/connection{id}:0/{attribute}");
    fs::read(path).err().and_then(|error| error.raw_os_error())
}

#[test]
fn each_portal_is_a_route_to_where_a_scan_finds_the_unit() {
    let store = Store::ramdisk("7a1", 8 << 20);
    let mut target = IscsiTarget::new(IQN);
    target.map(3, &store);
    let iscsid = Iscsid::start();
    let sessions = [0, 1, 2].map(|portal| iscsid.login(PORTALS[portal], IQN, Timeouts::default()));
    let expected = [2, 0, 1].map(|portal| route(PORTALS[portal], &sessions[portal]));
    // The kernel spells the IPv6 address in full.
    let found = routes(&["[0:0:0:0:0:0:0:1]", "127.0.0.1", "127.0.0.2:3260"]);
    assert_eq!(found, expected);

    for (portal, session) in PORTALS.iter().zip(&sessions) {
        let Hctl {
            host,
            channel,
            target,
            lun,
        } = hctl(session, 3);
        assert_eq!(
            transport_of(&Roots::default(), hctl(session, 3)).unwrap(),
            None
        );
        let scan = format!("/sys/class/scsi_host/host{host}/scan");
        fs::write(scan, format!("{channel} {target} {lun}")).unwrap();
        let by = transport_of(&Roots::default(), hctl(session, 3))
            .unwrap()
            .unwrap();
        let id = session.id;
        assert_eq!(by.to_string(), format!("session {id}, {portal}, {IQN}"));
    }
    // A scanned target has a directory now.
    assert_eq!(routes(&["[::1]", "127.0.0.1", "127.0.0.2"]), expected);
}

#[test]
fn a_dead_connection_is_data_about_one_path() {
    let target = IscsiTarget::new(IQN);
    let iscsid = Iscsid::start();
    let [alive, dead] =
        [0, 2].map(|portal| iscsid.login(PORTALS[portal], IQN, Timeouts::default()));
    target.portal_down(2);
    dead.wait_for_state("FAILED", LIMIT);
    let portals = [PORTALS[0], PORTALS[2], PORTALS[1]];
    let found = routes(&portals);
    // Otherwise the test would not show that an unreadable attribute does no harm.
    guest::wait_until("the peer to be unknown", LIMIT, || {
        (errno(&dead, "address") == Some(nix::libc::ENOTCONN)).then_some(())
    });
    assert_eq!(found[0], route(PORTALS[0], &alive));
    let missing = found[1].address.as_ref().unwrap_err();
    let id = dead.id;
    assert_eq!(
        missing.text,
        format!("session {id} to [::1]:3260 is FAILED")
    );
    let state = "FAILED".to_owned();
    assert_eq!(missing.reason, MissingReason::SessionDown { state });
    let none = found[2].address.as_ref().unwrap_err();
    assert_eq!(none.reason, MissingReason::NoSession);
    assert_eq!(routes(&portals), found);

    target.portal_up(2);
    dead.wait_for_state("LOGGED_IN", LIMIT);
    assert_eq!(routes(&portals)[1], route(PORTALS[2], &dead));
}

#[test]
fn two_sessions_through_one_portal_are_two_routes_and_a_logout_leaves_one() {
    let _target = IscsiTarget::new(IQN);
    let iscsid = Iscsid::start();
    let first = iscsid.login(PORTALS[0], IQN, Timeouts::default());
    let second = iscsid.login_again(&first);
    let portal = PORTALS[0];
    let both = [route(portal, &first), route(portal, &second)];
    assert_eq!(routes(&[portal]), both);
    first.logout();
    assert_eq!(routes(&[portal]), both[1..]);
    second.logout();
    let none = routes(&[portal]).remove(0).address.unwrap_err();
    assert_eq!(none.reason, MissingReason::NoSession);
}
