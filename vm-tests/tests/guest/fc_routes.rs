//! The paths of a Fibre Channel source, read from the sysfs of real ports.

use std::fs;
use std::time::Duration;

use lunbd::Roots;
use lunbd::id::{FcUri, Hctl, HostNo};
use lunbd::transport::{
    MissingReason, Route, RouteKind, RouteUnavailable, fc_routes, transport_of,
};
use vm_tests::guest;
use vm_tests::guest::fcoe::FcFabric;
use vm_tests::guest::lio::Store;

const LIMIT: Duration = Duration::from_secs(60);
/// A name that no port has.
const NOBODY: &str = "0x50014380000000ff";

fn routes(ports: &[&str]) -> Vec<Route> {
    let uri: FcUri = format!("fc://{}/2", ports.join(",")).parse().unwrap();
    fc_routes(&Roots::default(), &uri).unwrap()
}

fn missing(route: Route) -> RouteUnavailable {
    route.address.unwrap_err()
}

fn is_down(missing: &RouteUnavailable, state: &str) -> bool {
    let state = state.to_owned();
    missing.reason == MissingReason::PortDown { state }
}

#[test]
fn a_target_port_is_a_route_to_where_a_scan_finds_the_unit() {
    let store = Store::ramdisk("fc7", 8 << 20);
    let mut fabric = FcFabric::up();
    fabric.map(2, &store);
    // The target's port sees the initiator's port, which presents nothing. The fabric has
    // waited only for the other direction.
    guest::wait_until("the target's port to see the initiator's", LIMIT, || {
        let [route] = routes(&[fabric.initiator_wwpn()]).try_into().unwrap();
        (missing(route).reason == MissingReason::NotATarget).then_some(())
    });
    let found = routes(&[NOBODY, fabric.target_wwpn(), fabric.initiator_wwpn()]);
    assert_eq!(found.len(), 3);

    let hctl = *found[1].address.as_ref().unwrap();
    let rport = fabric.rport().unwrap();
    let via = RouteKind::Fc {
        host: Some(HostNo(fabric.host())),
        wwpn: fabric.target_wwpn().parse().unwrap(),
        rport: Some(rport.clone()),
    };
    assert_eq!(found[1].via, via);
    assert_eq!(transport_of(&Roots::default(), hctl).unwrap(), None);
    let Hctl {
        host,
        channel,
        target,
        lun,
    } = hctl;
    let scan = format!("/sys/class/scsi_host/host{host}/scan");
    fs::write(scan, format!("{channel} {target} {lun}")).unwrap();
    let by = transport_of(&Roots::default(), hctl).unwrap().unwrap();
    assert_eq!(by.to_string(), format!("{rport}, {}", fabric.target_wwpn()));

    assert_eq!(missing(found[2].clone()).reason, MissingReason::NotATarget);
    let nobody = missing(found[0].clone());
    assert_eq!(nobody.reason, MissingReason::NoRemotePort);
    assert!(nobody.text.contains("is Online"), "{nobody}");
}

#[test]
fn a_port_that_is_lost_is_data_about_one_path() {
    let fabric = FcFabric::up();
    let port = fabric.target_wwpn();
    fabric.set_rport("fast_io_fail_tmo", "1");
    fabric.set_rport("dev_loss_tmo", "10");
    fabric.link_down();
    let blocked = missing(routes(&[port]).remove(0));
    let rport = fabric.rport().unwrap();
    assert_eq!(blocked.text, format!("{rport} to {port} is Blocked"));
    assert!(is_down(&blocked, "Blocked"));
    fabric.wait_for_rport("Not Present");
    assert!(is_down(&missing(routes(&[port]).remove(0)), "Not Present"));
    fabric.link_up();
    guest::wait_until("the route to be back", LIMIT, || {
        routes(&[port]).remove(0).address.ok()
    });
}
