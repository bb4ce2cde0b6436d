//! open-iscsi's daemon, with the sessions that it makes.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::daemon::Daemon;
use super::scsi_disk::{disk_of, have_followed, openable_disk_of};

const SESSIONS: &str = "/sys/class/iscsi_session";
/// The daemon binds it before it answers any command.
const SOCKET: &str = "@ISCSIADM_ABSTRACT_NAMESPACE";
/// The initiator name of every session.
pub const INITIATOR: &str = "iqn.2026-01.example:lunbd-initiator";

/// A session's timeouts for a silent or lost target, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// How long I/O waits for the session to come back. On the sessions of its paths multipathd
    /// sets its own `fast_io_fail_tmo` instead.
    pub replacement: u32,
    /// The time between two pings of an idle connection; 0 for none.
    pub noop_interval: u32,
    /// The time to wait for the answer to a ping.
    pub noop_timeout: u32,
}

impl Default for Timeouts {
    /// iscsid's own values, except the answer to a ping: no target here is silent, and a busy
    /// machine may answer late.
    fn default() -> Self {
        Self {
            replacement: 120,
            noop_interval: 5,
            noop_timeout: 60,
        }
    }
}

/// A running `iscsid`. Dropping it first logs out of every session.
#[derive(Debug)]
pub struct Iscsid {
    daemon: Option<Daemon>,
}

impl Iscsid {
    /// Starts the daemon; returns when it answers.
    #[must_use]
    pub fn start() -> Self {
        super::enter();
        super::modprobe("iscsi_tcp", &[]);
        for directory in ["/etc/iscsi", "/run/lock"] {
            fs::create_dir_all(directory).expect(directory);
        }
        let name = format!("InitiatorName={INITIATOR}\n");
        fs::write("/etc/iscsi/initiatorname.iscsi", name).expect("the initiator's name");
        configure(Timeouts::default());
        Self {
            daemon: Some(Self::start_daemon()),
        }
    }

    fn start_daemon() -> Daemon {
        Daemon::start(&["iscsid", "-f"], || {
            let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
            sockets.contains(SOCKET)
        })
    }

    /// Logs in, with `node.session.scan = manual`: no LUN is scanned.
    #[must_use]
    pub fn login(&self, portal: &str, iqn: &str, timeouts: Timeouts) -> Session {
        configure(timeouts);
        let node = ["iscsiadm", "-m", "node", "-T", iqn, "-p", portal];
        super::run(&[&node[..], &["-o", "new"]].concat());
        one_more_by(&[&node[..], &["--login"]].concat())
    }

    /// Makes a second session on the portal of the first.
    #[must_use]
    pub fn login_again(&self, session: &Session) -> Session {
        let id = session.id.to_string();
        one_more_by(&["iscsiadm", "-m", "session", "-r", &id, "--op", "new"])
    }

    /// Ends the daemon and starts another one; the sessions stay.
    pub fn restart(&mut self) {
        self.daemon = None;
        self.daemon = Some(Self::start_daemon());
    }
}

impl Drop for Iscsid {
    fn drop(&mut self) {
        for session in sessions() {
            session.end();
        }
        self.daemon = None;
        for directory in ["nodes", "send_targets", "ifaces"] {
            let _never_made = fs::remove_dir_all(format!("/etc/iscsi/{directory}"));
        }
    }
}

/// Sets the defaults of new node records.
fn configure(timeouts: Timeouts) {
    let configuration = format!(
        "node.startup = manual\nnode.session.scan = manual\n\
         node.session.timeo.replacement_timeout = {}\n\
         node.conn[0].timeo.noop_out_interval = {}\n\
         node.conn[0].timeo.noop_out_timeout = {}\n\
         node.conn[0].timeo.login_timeout = 15\n\
         node.session.err_timeo.abort_timeout = 5\n\
         node.session.err_timeo.lu_reset_timeout = 5\n\
         node.session.err_timeo.tgt_reset_timeout = 5\n",
        timeouts.replacement, timeouts.noop_interval, timeouts.noop_timeout
    );
    fs::write("/etc/iscsi/iscsid.conf", configuration).expect("iscsid's configuration");
}

/// The session that a command of iscsiadm makes.
fn one_more_by(command: &[&str]) -> Session {
    let before = sessions();
    super::run(command);
    let mut new = sessions();
    new.retain(|session| !before.contains(session));
    assert_eq!(
        new.len(),
        1,
        "{command:?} made other than one session: {new:?}"
    );
    new.remove(0)
}

/// A session with a target.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Session {
    /// The N of `sessionN`.
    pub id: u32,
    /// The SCSI host of the session.
    pub host: u32,
}

/// The only session of the kernel.
#[must_use]
pub fn the_only_session() -> Session {
    let [session] = &sessions()[..] else {
        panic!("{:?}", sessions());
    };
    session.clone()
}

/// The kernel's sessions, by number.
#[must_use]
pub fn sessions() -> Vec<Session> {
    let mut found: Vec<Session> = super::entries(SESSIONS)
        .into_iter()
        .filter_map(|name| {
            let path = fs::canonicalize(format!("{SESSIONS}/{name}")).ok()?;
            let mut hosts = path
                .iter()
                .filter_map(|part| part.to_str()?.strip_prefix("host"));
            Some(Session {
                id: name.strip_prefix("session")?.parse().ok()?,
                host: hosts.find_map(|number| number.parse().ok())?,
            })
        })
        .collect();
    found.sort();
    found
}

impl Session {
    /// `LOGGED_IN`, `FAILED`, `FREE`; empty when the session is gone.
    #[must_use]
    pub fn state(&self) -> String {
        let path = format!("{SESSIONS}/session{}/state", self.id);
        let state = fs::read_to_string(path).unwrap_or_default();
        state.trim().to_owned()
    }

    /// Waits until the session is in this state and its devices have followed: the kernel first
    /// reports the session's state, and blocks or unblocks its devices later in separate work.
    /// Panics after `limit`.
    pub fn wait_for_state(&self, state: &str, limit: Duration) {
        self.wait_for(&format!("to be {state}"), limit, |found| found == state);
    }

    /// Waits until the session is lost (FAILED or already FREE) and its devices have followed.
    /// Panics after `limit`.
    pub fn wait_until_lost(&self, limit: Duration) {
        self.wait_for("to be lost", limit, |found| found != "LOGGED_IN");
    }

    fn wait_for(&self, what: &str, limit: Duration, is_it: impl Fn(&str) -> bool) {
        let what = format!("session {} {what}, with its devices", self.id);
        super::wait_until(&what, limit, || {
            let state = self.state();
            let lost = state != "LOGGED_IN";
            (is_it(&state) && have_followed(self.host, lost)).then_some(())
        });
    }

    /// Writes `0 0 LUN` to its host's `scan`.
    pub fn scan(&self, lun: u64) {
        let path = format!("/sys/class/scsi_host/host{}/scan", self.host);
        fs::write(&path, format!("0 0 {lun}")).unwrap_or_else(|error| panic!("{path}: {error}"));
    }

    /// The sysfs directory of a LUN's SCSI device.
    #[must_use]
    pub fn device_dir(&self, lun: u64) -> PathBuf {
        PathBuf::from(format!("/sys/bus/scsi/devices/{}:0:0:{lun}", self.host))
    }

    /// The name of a LUN's disk below `/sys/block`, if it has one.
    #[must_use]
    pub fn disk(&self, lun: u64) -> Option<String> {
        disk_of(&self.device_dir(lun))
    }

    /// Scans for a LUN by hand and waits for a disk that can be opened.
    #[allow(
        clippy::must_use_candidate,
        reason = "some tests want the device and not its name"
    )]
    pub fn scanned_disk(&self, lun: u64) -> String {
        self.scan(lun);
        openable_disk_of(&self.device_dir(lun))
    }

    /// Logs out: the session's devices and host are gone when this returns.
    pub fn logout(self) {
        let id = self.id.to_string();
        super::run(&["iscsiadm", "-m", "session", "-r", &id, "-u"]);
        assert!(!sessions().contains(&self), "session {id} is still there");
    }

    /// Logs out if possible; ignores errors.
    fn end(&self) {
        let id = self.id.to_string();
        let ended = Command::new("iscsiadm")
            .args(["-m", "session", "-r", &id, "-u"])
            .output();
        match ended {
            Ok(output) if output.status.success() => {}
            other => eprintln!("session {id} stays: {other:?}"),
        }
    }
}
