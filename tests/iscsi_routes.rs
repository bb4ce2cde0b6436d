//! The address of an iSCSI portal and target, on a machine that is a directory with the sysfs
//! layout of Linux 6.1.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

#[allow(dead_code, reason = "each suite uses a part of it")]
mod machine;

use std::fs;
use std::os::unix::fs::symlink;

use lunbd::id::{Hctl, IscsiUri};
use lunbd::transport::{MissingReason, Route, TransportInfo, iscsi_routes, transport_of};
use machine::Machine;

const TARGET: &str = "iqn.2003-01.org.lunbd:array";

/// A logged-in session, as the kernel shows it.
struct Session<'a> {
    machine: &'a Machine,
    host: u32,
    id: u32,
}

impl<'a> Session<'a> {
    /// A session through this portal. Its host's number is the session's plus 1.
    fn new(machine: &'a Machine, id: u32, address: &str, port: u16) -> Self {
        let session = Self {
            machine,
            host: id + 1,
            id,
        };
        let classes = [
            ("iscsi_session", format!("session{id}"), session.class()),
            (
                "iscsi_connection",
                format!("connection{id}:0"),
                session.connection(),
            ),
        ];
        for (class, name, dir) in classes {
            let folder = machine.path(&format!("sys/class/{class}"));
            fs::create_dir_all(&folder).unwrap();
            let below_sys = dir.strip_prefix("sys").unwrap();
            symlink(format!("../..{below_sys}"), folder.join(name)).unwrap();
        }
        session.set("targetname", TARGET);
        session.set("state", "LOGGED_IN");
        session.set("target_id", "0");
        let port = port.to_string();
        for (attribute, text) in [
            ("persistent_address", address),
            ("persistent_port", &port),
            ("address", address),
            ("port", &port),
        ] {
            session.set_connection(attribute, text);
        }
        session
    }

    fn dir(&self) -> String {
        format!("sys/devices/platform/host{}/session{}", self.host, self.id)
    }

    fn class(&self) -> String {
        format!("{}/iscsi_session/session{}", self.dir(), self.id)
    }

    fn connection(&self) -> String {
        let id = self.id;
        format!(
            "{}/connection{id}:0/iscsi_connection/connection{id}:0",
            self.dir()
        )
    }

    fn set(&self, attribute: &str, text: &str) {
        self.machine.write(
            &format!("{}/{attribute}", self.class()),
            &format!("{text}\n"),
        );
    }

    fn set_connection(&self, attribute: &str, text: &str) {
        let path = format!("{}/{attribute}", self.connection());
        self.machine.write(&path, &format!("{text}\n"));
    }

    fn remove(&self, attribute: &str) {
        fs::remove_file(self.machine.path(&format!("{}/{attribute}", self.class()))).unwrap();
    }

    /// Makes a read of the attribute fail, as with `ENOTCONN`: here with `EISDIR`.
    fn break_attribute(&self, path: &str) {
        let path = self.machine.path(path);
        fs::remove_file(&path).unwrap();
        fs::create_dir(path).unwrap();
    }

    fn break_connection(&self, attributes: &[&str]) {
        for attribute in attributes {
            self.break_attribute(&format!("{}/{attribute}", self.connection()));
        }
    }

    fn device(&self, hctl: &str) {
        let (target, _) = hctl.rsplit_once(':').unwrap();
        let below = format!("devices/platform/host{}/session{}", self.host, self.id);
        let dir = format!("{below}/target{target}/{hctl}");
        self.machine.write(&format!("sys/{dir}/type"), "0\n");
        let link = self.machine.path(&format!("sys/bus/scsi/devices/{hctl}"));
        symlink(format!("../../../{dir}"), link).unwrap();
    }
}

fn routes(machine: &Machine, portals: &str) -> Vec<Route> {
    let uri: IscsiUri = format!("iscsi://{portals}/{TARGET}/7").parse().unwrap();
    iscsi_routes(&machine.roots(), &uri).unwrap()
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
fn two_portals_are_two_routes_in_the_uris_order() {
    let machine = Machine::new();
    Session::new(&machine, 1, "10.0.0.1", 3260);
    Session::new(&machine, 2, "10.0.0.2", 3261);
    assert_eq!(
        told(&routes(&machine, "10.0.0.2:3261,10.0.0.1")),
        [
            "session 2 to 10.0.0.2:3261 at 3:0:0:7",
            "session 1 to 10.0.0.1:3260 at 2:0:0:7",
        ]
    );
}

#[test]
fn two_sessions_through_one_portal_are_two_routes_and_ten_comes_after_nine() {
    let machine = Machine::new();
    for id in [10, 9] {
        Session::new(&machine, id, "10.0.0.1", 3260);
    }
    assert_eq!(
        told(&routes(&machine, "10.0.0.1")),
        [
            "session 9 to 10.0.0.1:3260 at 10:0:0:7",
            "session 10 to 10.0.0.1:3260 at 11:0:0:7",
        ]
    );
}

#[test]
fn a_portal_without_a_session_is_one_route_that_is_missing() {
    let machine = Machine::new();
    assert_eq!(
        told(&routes(&machine, "10.0.0.1")),
        ["no session with iqn.2003-01.org.lunbd:array through 10.0.0.1:3260"]
    );
    Session::new(&machine, 1, "10.0.0.1", 3260);
    let found = routes(&machine, "10.0.0.9,10.0.0.1:3261,10.0.0.1");
    assert_eq!(
        told(&found),
        [
            "no session with iqn.2003-01.org.lunbd:array through 10.0.0.9:3260",
            "no session with iqn.2003-01.org.lunbd:array through 10.0.0.1:3261",
            "session 1 to 10.0.0.1:3260 at 2:0:0:7",
        ]
    );
    assert_eq!(reason(&found[0]), MissingReason::NoSession);
    assert_eq!(found[0].via.to_string(), "10.0.0.9:3260");
}

#[test]
fn a_session_with_another_target_is_none() {
    let machine = Machine::new();
    let session = Session::new(&machine, 1, "10.0.0.1", 3260);
    for name in ["iqn.2003-01.org.lunbd:array2", "(null)", ""] {
        session.set("targetname", name);
        assert_eq!(
            reason(&routes(&machine, "10.0.0.1")[0]),
            MissingReason::NoSession
        );
    }
    session.set("targetname", "IQN.2003-01.org.lunbd:Array");
    assert!(routes(&machine, "10.0.0.1")[0].address.is_ok());
}

#[test]
fn sessions_elsewhere_are_named_where_one_is_missing() {
    let machine = Machine::new();
    Session::new(&machine, 1, "10.0.0.1", 3260);
    assert_eq!(
        told(&routes(&machine, "array.example")),
        [
            "no session with iqn.2003-01.org.lunbd:array through array.example:3260 \
          (a name is not looked up: name the address); there is session 1 to 10.0.0.1:3260"
        ]
    );
    for id in 2..=5 {
        Session::new(&machine, id, "10.0.0.1", 3260);
    }
    let text = told(&routes(&machine, "10.0.0.9")).concat();
    assert!(
        text.ends_with("session 3 to 10.0.0.1:3260 and 2 more"),
        "{text}"
    );
}

#[test]
fn a_session_that_is_not_logged_in_is_data_about_one_path() {
    let machine = Machine::new();
    Session::new(&machine, 1, "10.0.0.1", 3260);
    let failed = Session::new(&machine, 2, "10.0.0.2", 3260);
    for state in ["FAILED", "FREE"] {
        failed.set("state", state);
        // The kernel knows no peer of a dead connection.
        let found = routes(&machine, "10.0.0.1,10.0.0.2");
        assert_eq!(
            told(&found),
            [
                "session 1 to 10.0.0.1:3260 at 2:0:0:7".to_owned(),
                format!("session 2 to 10.0.0.2:3260 is {state}"),
            ]
        );
        let state = state.to_owned();
        assert_eq!(reason(&found[1]), MissingReason::SessionDown { state });
    }
}

#[test]
fn a_dead_connection_is_known_by_where_it_was_to_go() {
    let machine = Machine::new();
    let session = Session::new(&machine, 1, "10.0.0.1", 3260);
    session.set("state", "FAILED");
    session.break_connection(&["address", "port"]);
    assert_eq!(
        told(&routes(&machine, "10.0.0.1")),
        ["session 1 to 10.0.0.1:3260 is FAILED"]
    );
}

#[test]
fn unreadable_attributes_are_reported_and_stop_nothing() {
    let machine = Machine::new();
    Session::new(&machine, 1, "10.0.0.1", 3260);
    let stateless = Session::new(&machine, 2, "10.0.0.2", 3260);
    stateless.break_attribute(&format!("{}/state", stateless.class()));
    let nameless = Session::new(&machine, 3, "10.0.0.3", 3260);
    nameless.break_attribute(&format!("{}/targetname", nameless.class()));
    let homeless = Session::new(&machine, 4, "10.0.0.4", 3260);
    homeless.break_connection(&["address", "persistent_address"]);

    let found = routes(&machine, "10.0.0.1,10.0.0.2,10.0.0.3");
    let told = told(&found);
    assert_eq!(told[0], "session 1 to 10.0.0.1:3260 at 2:0:0:7");
    assert!(
        told[1].starts_with("session 2 to 10.0.0.2:3260 is in no readable state: cannot read"),
        "{told:?}"
    );
    let state = "unreadable".to_owned();
    assert_eq!(reason(&found[1]), MissingReason::SessionDown { state });
    assert!(told[2].starts_with("no session with"), "{told:?}");
    assert!(
        told[2].contains("session 3, whose target is unknown: cannot read"),
        "{told:?}"
    );
    assert!(
        told[2].contains("session 4, whose portal cannot be read"),
        "{told:?}"
    );
}

#[test]
fn a_session_that_is_removed_while_it_is_read_is_left_out() {
    let machine = Machine::new();
    let session = Session::new(&machine, 1, "10.0.0.1", 3260);
    session.remove("state");
    assert_eq!(
        reason(&routes(&machine, "10.0.0.1")[0]),
        MissingReason::NoSession
    );
    session.remove("targetname");
    assert_eq!(
        reason(&routes(&machine, "10.0.0.1")[0]),
        MissingReason::NoSession
    );
    // The link of the class goes last.
    fs::remove_dir_all(machine.path(&session.dir())).unwrap();
    assert_eq!(
        reason(&routes(&machine, "10.0.0.1")[0]),
        MissingReason::NoSession
    );
}

#[test]
fn a_redirected_session_is_found_by_either_portal_and_counts_once() {
    let machine = Machine::new();
    let session = Session::new(&machine, 1, "10.0.0.100", 3260);
    session.set_connection("address", "10.0.0.1");
    session.set_connection("port", "3261");
    for portal in ["10.0.0.100", "10.0.0.1:3261"] {
        assert_eq!(routes(&machine, portal).len(), 1);
        assert!(routes(&machine, portal)[0].address.is_ok(), "{portal}");
    }
    assert_eq!(
        reason(&routes(&machine, "10.0.0.1:3260")[0]),
        MissingReason::NoSession
    );
    let both = routes(&machine, "10.0.0.1:3261,10.0.0.100");
    assert_eq!(reason(&both[0]), MissingReason::NoSession);
    assert_eq!(both[1].via.to_string(), "session 1 to 10.0.0.100:3260");
}

#[test]
fn addresses_are_compared_as_addresses() {
    let machine = Machine::new();
    for (id, address) in [
        (1, "fe80:0000:0000:0000:0000:0000:0000:0001"),
        (2, "[fe80::2]"),
        (3, "FE80::3%eth0"),
        (4, "::ffff:10.0.0.4"),
        (5, "Array.Example"),
    ] {
        Session::new(&machine, id, address, 3260);
    }
    let portals = "[fe80::1],[fe80:0::2],[fe80::3],10.0.0.4,array.example";
    let found = routes(&machine, portals);
    assert_eq!(found.len(), 5);
    assert_eq!(told(&found)[0], "session 1 to [fe80::1]:3260 at 2:0:0:7");
    assert!(
        found.iter().all(|route| route.address.is_ok()),
        "{:?}",
        told(&found)
    );
}

#[test]
fn the_target_is_the_sessions_target_id_or_else_what_was_scanned_or_else_0() {
    let machine = Machine::new();
    let session = Session::new(&machine, 1, "10.0.0.1", 3260);
    session.set("target_id", "4");
    assert_eq!(
        told(&routes(&machine, "10.0.0.1")),
        ["session 1 to 10.0.0.1:3260 at 2:0:4:7"]
    );
    session.set("target_id", "-1");
    let found = routes(&machine, "10.0.0.1");
    assert_eq!(reason(&found[0]), MissingReason::NoTarget);
    session.remove("target_id");
    assert_eq!(
        told(&routes(&machine, "10.0.0.1")),
        ["session 1 to 10.0.0.1:3260 at 2:0:0:7"]
    );
    session.device("2:0:3:1");
    assert_eq!(
        told(&routes(&machine, "10.0.0.1")),
        ["session 1 to 10.0.0.1:3260 at 2:0:3:7"]
    );
    session.set("target_id", "4");
    assert_eq!(
        told(&routes(&machine, "10.0.0.1")),
        ["session 1 to 10.0.0.1:3260 at 2:0:4:7"]
    );
    session.device("2:1:4:1");
    assert_eq!(
        told(&routes(&machine, "10.0.0.1")),
        ["session 1 to 10.0.0.1:3260 at 2:1:4:7"]
    );
}

#[test]
fn a_device_is_reached_by_the_session_that_it_is_below() {
    let machine = Machine::new();
    let session = Session::new(&machine, 3, "127.0.0.1", 3260);
    session.device("4:0:0:7");
    machine.disk("1:0:0:4", "sdb");
    let address = |text: &str| text.parse::<Hctl>().unwrap();
    let reached = |text| transport_of(&machine.roots(), address(text)).unwrap();
    let by = reached("4:0:0:7").unwrap();
    assert_eq!(
        by.to_string(),
        format!("session 3, 127.0.0.1:3260, {TARGET}")
    );
    assert!(matches!(by, TransportInfo::Iscsi { .. }));
    assert_eq!(reached("1:0:0:4"), None);
    assert_eq!(reached("4:0:0:8"), None);
    session.break_connection(&["address", "persistent_address"]);
    assert_eq!(
        reached("4:0:0:7").unwrap().to_string(),
        format!("session 3, {TARGET}")
    );
    session.remove("targetname");
    assert_eq!(reached("4:0:0:7").unwrap().to_string(), "session 3");
}

/// How often this thread has called read(2).
fn reads() -> usize {
    let io = fs::read_to_string("/proc/thread-self/io").unwrap();
    let count = io.lines().find_map(|line| line.strip_prefix("syscr: "));
    count.unwrap().parse().unwrap()
}

#[test]
fn a_thousand_sessions_are_each_read_once() {
    let machine = Machine::new();
    let mut portals = Vec::new();
    let mut cost = Vec::new();
    for id in 1..=1000_u32 {
        let address = format!("10.1.{}.{}", id / 250, id % 250);
        Session::new(&machine, id, &address, 3260);
        portals.push(address);
        if matches!(id, 100 | 1000) {
            let before = reads();
            let found = routes(&machine, &portals.join(","));
            cost.push(reads() - before);
            assert_eq!(found.len(), portals.len());
            assert!(found.iter().all(|route| route.address.is_ok()));
        }
    }
    assert!(cost[0] > 100 && cost[1] <= 10 * cost[0], "{cost:?}");

    // The sessions of other targets cost one attribute each. The engine finds an existing
    // device without a look at any session but its own.
    let uri = format!("iscsi://10.1.0.1/{TARGET}2/7").parse().unwrap();
    let before = reads();
    assert_eq!(iscsi_routes(&machine.roots(), &uri).unwrap().len(), 1);
    let cost = reads() - before;
    assert!((1000..=3100).contains(&cost), "{cost}");
    let before = reads();
    let absent = "501:0:0:1".parse().unwrap();
    assert_eq!(transport_of(&machine.roots(), absent).unwrap(), None);
    assert!(reads() - before < 10);
}
