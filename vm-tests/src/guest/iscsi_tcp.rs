//! The kernel's initiator without a daemon.

use std::fs;
use std::time::Duration;

use super::iscsid;

/// Loads the driver, and gives the machine an initiator name.
pub fn prepare() {
    super::enter();
    super::modprobe("iscsi_tcp", &[]);
    fs::create_dir_all("/etc/iscsi").expect("/etc/iscsi");
    let name = format!("InitiatorName={}\n", iscsid::INITIATOR);
    fs::write("/etc/iscsi/initiatorname.iscsi", name).expect("the initiator's name");
}

/// Whether a daemon with its own sessions runs.
#[must_use]
pub fn iscsid_runs() -> bool {
    super::entries("/proc").iter().any(|process| {
        let name = fs::read_to_string(format!("/proc/{process}/comm"));
        name.is_ok_and(|name| name.trim() == "iscsid")
    })
}

/// Connections at port 3260, without listeners and without connections in `TIME_WAIT`.
#[must_use]
pub fn connections() -> Vec<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    let tables = tables.map(|path| fs::read_to_string(path).expect(path));
    let lines = tables.iter().flat_map(|table| table.lines().skip(1));
    let is_open = |line: &&str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let mut addresses = fields[1..3].iter();
        let at_port = addresses.any(|address| address.ends_with(":0CBC"));
        at_port && !matches!(fields[3], "0A" | "06")
    };
    lines.filter(is_open).map(str::to_owned).collect()
}

/// Panics if the kernel has an iSCSI session, connection or host, or if a TCP connection does
/// not go soon.
pub fn nothing_is_left() {
    for class in ["iscsi_session", "iscsi_connection", "iscsi_host"] {
        let there = super::entries(format!("/sys/class/{class}"));
        assert!(there.is_empty(), "{class}: {there:?}");
    }
    super::wait_until_ok(Duration::from_secs(60), || match &connections()[..] {
        [] => Ok(()),
        open => Err(format!("no TCP connection, but {open:#?}")),
    });
}

/// An attribute of a session or of its connection, as sysfs shows it.
#[must_use]
pub fn attribute(session: u32, name: &str) -> String {
    attribute_if_there(session, name).expect(name)
}

/// The same attribute, or `None` if it cannot be read.
#[must_use]
pub fn attribute_if_there(session: u32, name: &str) -> Option<String> {
    let of_session = format!("/sys/class/iscsi_session/session{session}/{name}");
    let of_connection = format!("/sys/class/iscsi_connection/connection{session}:0/{name}");
    let text = fs::read_to_string(of_session).or_else(|_| fs::read_to_string(of_connection));
    text.ok().map(|text| text.trim().to_owned())
}
