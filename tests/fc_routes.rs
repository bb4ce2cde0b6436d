//! The address of a Fibre Channel target port, on a machine that is a directory with the sysfs
//! layout of Linux 6.1.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

#[allow(dead_code, reason = "each suite uses a part of it")]
mod machine;

use std::fs;
use std::os::unix::fs::symlink;

use lunbd::id::{FcUri, Hctl};
use lunbd::transport::{MissingReason, Route, fc_routes, transport_of};
use machine::Machine;

const ADAPTER: &str = "devices/pci0000:00/0000:00:05.0";

/// A local port.
fn host(machine: &Machine, number: u32, state: &str) {
    let below = format!("{ADAPTER}/host{number}/fc_host/host{number}");
    machine.write(&format!("sys/{below}/port_state"), &format!("{state}\n"));
    link(machine, "fc_host", &format!("host{number}"), &below);
}

fn link(machine: &Machine, class: &str, name: &str, below_sys: &str) {
    let folder = machine.path(&format!("sys/class/{class}"));
    fs::create_dir_all(&folder).unwrap();
    symlink(format!("../../{below_sys}"), folder.join(name)).unwrap();
}

/// A remote port that a local port sees, by its kernel name; a usable target.
struct Rport<'a> {
    machine: &'a Machine,
    dir: String,
}

impl<'a> Rport<'a> {
    fn new(machine: &'a Machine, name: &str, wwpn: &str) -> Self {
        let (host, _) = name
            .strip_prefix("rport-")
            .unwrap()
            .split_once(':')
            .unwrap();
        let dir = format!("{ADAPTER}/host{host}/{name}/fc_remote_ports/{name}");
        link(machine, "fc_remote_ports", name, &dir);
        let dir = format!("sys/{dir}");
        let rport = Self { machine, dir };
        for (attribute, text) in [
            ("port_name", wwpn),
            ("port_state", "Online"),
            ("roles", "FCP Target"),
            ("scsi_target_id", "0"),
        ] {
            rport.set(attribute, text);
        }
        rport
    }

    fn set(&self, attribute: &str, text: &str) {
        let path = format!("{}/{attribute}", self.dir);
        self.machine.write(&path, &format!("{text}\n"));
    }

    fn remove(&self, attribute: &str) {
        let path = self.machine.path(&format!("{}/{attribute}", self.dir));
        fs::remove_file(path).unwrap();
    }

    /// Makes a read of the attribute fail, as with `EINVAL`: here with `EISDIR`.
    fn break_attribute(&self, attribute: &str) {
        self.remove(attribute);
        let path = self.machine.path(&format!("{}/{attribute}", self.dir));
        fs::create_dir(path).unwrap();
    }
}

const ONE: &str = "0x5001438000000001";
const TWO: &str = "0x5001438000000002";

fn routes(machine: &Machine, ports: &str) -> Vec<Route> {
    let uri: FcUri = format!("fc://{ports}/7").parse().unwrap();
    fc_routes(&machine.roots(), &uri).unwrap()
}

/// `VIA at H:C:T:L`, or why there is no route.
fn told(routes: &[Route]) -> Vec<String> {
    let told = routes.iter().map(|route| match &route.address {
        Ok(hctl) => format!("{} at {hctl}", route.via),
        Err(missing) => missing.to_string(),
    });
    told.collect()
}

fn reason(route: &Route) -> MissingReason {
    route.address.as_ref().unwrap_err().reason.clone()
}

#[test]
fn every_local_port_that_sees_a_target_port_is_a_route() {
    let machine = Machine::new();
    for number in [2, 10] {
        host(&machine, number, "Online");
    }
    Rport::new(&machine, "rport-10:0-1", ONE);
    Rport::new(&machine, "rport-2:0-3", ONE).set("scsi_target_id", "5");
    Rport::new(&machine, "rport-2:0-4", TWO).set("port_state", "Marginal");
    Rport::new(&machine, "rport-2:0-5", "0x5001438000000003");
    assert_eq!(
        told(&routes(
            &machine,
            "50:01:43:80:00:00:00:02,5001438000000001"
        )),
        [
            "rport-2:0-4 at 2:0:0:7",
            "rport-2:0-3 at 2:0:5:7",
            "rport-10:0-1 at 10:0:0:7",
        ]
    );
}

#[test]
fn a_port_that_no_host_sees_is_one_missing_route() {
    let machine = Machine::new();
    let found = routes(&machine, ONE);
    assert_eq!(
        told(&found),
        ["no local port sees 0x5001438000000001: this machine has no Fibre Channel port"]
    );
    assert_eq!(reason(&found[0]), MissingReason::NoHosts);
    host(&machine, 2, "Online");
    host(&machine, 3, "Linkdown");
    Rport::new(&machine, "rport-2:0-1", TWO);
    let found = routes(&machine, &format!("{ONE},{TWO}"));
    assert_eq!(
        told(&found),
        [
            "no local port sees 0x5001438000000001: host2 is Online, host3 is Linkdown",
            "rport-2:0-1 at 2:0:0:7",
        ]
    );
    assert_eq!(reason(&found[0]), MissingReason::NoRemotePort);
    assert_eq!(found[0].via.to_string(), ONE);
}

#[test]
fn a_port_that_is_down_is_data_about_one_path() {
    let machine = Machine::new();
    host(&machine, 2, "Online");
    host(&machine, 3, "Online");
    Rport::new(&machine, "rport-2:0-1", ONE);
    let down = Rport::new(&machine, "rport-3:0-1", ONE);
    // A port that is not present has no role any more.
    down.set("roles", "unknown");
    for state in ["Blocked", "Not Present", "Offline"] {
        down.set("port_state", state);
        let found = routes(&machine, ONE);
        assert_eq!(
            told(&found),
            [
                "rport-2:0-1 at 2:0:0:7".to_owned(),
                format!("rport-3:0-1 to {ONE} is {state}"),
            ]
        );
        let state = state.to_owned();
        assert_eq!(reason(&found[1]), MissingReason::PortDown { state });
    }
}

#[test]
fn what_a_local_port_knew_before_is_no_path_beside_what_it_sees_now() {
    let machine = Machine::new();
    host(&machine, 2, "Online");
    let before = Rport::new(&machine, "rport-2:0-1", ONE);
    before.set("port_state", "Not Present");
    assert_eq!(told(&routes(&machine, ONE)).len(), 1);
    Rport::new(&machine, "rport-2:0-9", ONE);
    assert_eq!(told(&routes(&machine, ONE)), ["rport-2:0-9 at 2:0:0:7"]);
}

#[test]
fn a_port_that_is_no_scsi_target_is_said_to_be_none() {
    let machine = Machine::new();
    host(&machine, 2, "Online");
    let rport = Rport::new(&machine, "rport-2:0-1", ONE);
    for roles in ["FCP Initiator", "NVMe Target", "unknown", ""] {
        rport.set("roles", roles);
        let found = routes(&machine, ONE);
        assert_eq!(reason(&found[0]), MissingReason::NotATarget, "{roles}");
        assert!(told(&found)[0].contains(roles));
    }
    rport.set("roles", "FCP Target, FCP Initiator");
    assert!(routes(&machine, ONE)[0].address.is_ok());
    rport.set("scsi_target_id", "-1");
    assert_eq!(reason(&routes(&machine, ONE)[0]), MissingReason::NotATarget);
}

#[test]
fn unreadable_attributes_are_reported_and_stop_nothing() {
    let machine = Machine::new();
    host(&machine, 2, "Online");
    Rport::new(&machine, "rport-2:0-1", ONE);
    let rport = Rport::new(&machine, "rport-2:0-2", TWO);
    let both = format!("{ONE},{TWO}");
    for attribute in ["scsi_target_id", "roles", "port_state"] {
        rport.break_attribute(attribute);
        let found = routes(&machine, &both);
        assert!(found[0].address.is_ok());
        let state = "unreadable".to_owned();
        assert_eq!(
            reason(&found[1]),
            MissingReason::PortDown { state },
            "{attribute}"
        );
        assert!(
            told(&found)[1].starts_with("rport-2:0-2 to 0x5001438000000002 cannot be examined")
        );
    }
    rport.break_attribute("port_name");
    let found = routes(&machine, &both);
    assert_eq!(reason(&found[1]), MissingReason::NoRemotePort);
    let text = &told(&found)[1];
    assert!(
        text.contains("there is rport-2:0-2, whose name cannot be read"),
        "{text}"
    );
}

#[test]
fn a_port_that_is_removed_while_it_is_read_is_left_out() {
    let machine = Machine::new();
    host(&machine, 2, "Online");
    let rport = Rport::new(&machine, "rport-2:0-1", ONE);
    for attribute in ["scsi_target_id", "roles", "port_state", "port_name"] {
        rport.remove(attribute);
        let found = routes(&machine, ONE);
        assert_eq!(
            reason(&found[0]),
            MissingReason::NoRemotePort,
            "{attribute}"
        );
    }
}

#[test]
fn a_device_is_reached_by_the_remote_port_that_it_is_below() {
    let machine = Machine::new();
    host(&machine, 2, "Online");
    let rport = Rport::new(&machine, "rport-2:0-1", ONE);
    let device = format!("{ADAPTER}/host2/rport-2:0-1/target2:0:0/2:0:0:7");
    machine.write(&format!("sys/{device}/type"), "0\n");
    let on_bus = machine.path("sys/bus/scsi/devices/2:0:0:7");
    symlink(format!("../../../{device}"), on_bus).unwrap();
    let hctl: Hctl = "2:0:0:7".parse().unwrap();
    let reached = || {
        transport_of(&machine.roots(), hctl)
            .unwrap()
            .unwrap()
            .to_string()
    };
    assert_eq!(reached(), format!("rport-2:0-1, {ONE}"));
    rport.break_attribute("port_name");
    assert_eq!(reached(), "rport-2:0-1");
}
