//! The netlink port -1, from which sessions are made so that an iscsid that starts leaves
//! them alone. The kernel gives it to any user who asks for it first.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Deadline, ErrorKind, Source};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ISCSI};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{
    AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, socket,
};
use vm_tests::guest;
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::crash::Place;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::{INITIATOR, Iscsid, sessions, the_only_session};
use vm_tests::guest::served::Served;
use vm_tests::guest::writer::first_block;

const IQN: &str = "iqn.2026-01.example:port";
const LOCK: &str = "/sys/module/iscsi_tcp/uevent";
const NOBODY: u32 = 65_534;
const LIMIT: Duration = Duration::from_secs(60);

/// A process that has the port -1. A process of the user `nobody` cannot make a session.
struct Holder(Child);

impl Holder {
    fn start(user: u32) -> Self {
        let (kind, protocol) = (SockType::Raw, SockProtocol::NetlinkISCSI);
        let flags = SockFlag::SOCK_CLOEXEC;
        let port = socket(AddressFamily::Netlink, kind, flags, protocol).unwrap();
        bind(port.as_raw_fd(), &NetlinkAddr::new(u32::MAX, 0)).unwrap();
        let mut command = Command::new("sleep");
        let command = command.arg("600").stdin(Stdio::from(port));
        Self(command.uid(user).gid(user).spawn().unwrap())
    }

    fn words(&self) -> String {
        format!("process {} (sleep) has the netlink port -1", self.0.id())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

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

fn creator(session: u32) -> i32 {
    attribute(session, "creator").parse().unwrap()
}

#[test]
fn while_another_user_has_the_port_logins_go_on_from_other_ports_and_the_process_is_named() {
    iscsi_tcp::prepare();
    let target = IscsiTarget::serve(IQN, &[1, 2], 8 << 20);
    let holder = Holder::start(NOBODY);
    let portals: Vec<usize> = (0..PORTALS.len()).collect();
    let uri = target.uri(&portals, 1);
    let attached = done(&["attach", &uri, "--log-in", "--min-paths", "3", "-v"]);
    assert!(attached.contains(&holder.words()), "{attached}");
    assert!(attached.contains("creator is -"), "{attached}");
    let made = sessions();
    assert_eq!(made.len(), PORTALS.len(), "{made:?}");
    for session in &made {
        assert!(creator(session.id) < -1, "{}", creator(session.id));
    }
    let listed = done(&["sessions"]);
    assert_eq!(
        listed.matches("lunbd from port -").count(),
        made.len(),
        "{listed}"
    );
    let doctor = said(&guest::lunbd(&["doctor"]));
    assert!(doctor.contains(&holder.words()), "{doctor}");
    assert!(doctor.contains("made from another port"), "{doctor}");
    done(&["detach", &uri]);
    nothing_is_left();
    drop(holder);

    let attached = done(&["attach", &uri, "--log-in", "--min-paths", "3", "-v"]);
    assert!(!attached.contains("creator"), "{attached}");
    assert!(sessions().iter().all(|session| creator(session.id) == -1));
    let doctor = said(&guest::lunbd(&["doctor"]));
    assert!(doctor.contains("the netlink port -1 is free"), "{doctor}");
    done(&["detach", &uri]);
    nothing_is_left();
}

#[test]
fn several_processes_that_make_sessions_at_once_without_the_port_each_make_theirs() {
    iscsi_tcp::prepare();
    let target = IscsiTarget::serve(IQN, &[1], 8 << 20);
    let _holder = Holder::start(NOBODY);
    let uri = |portal: usize| target.uri(&[portal], 1);
    let uris: Vec<String> = (0..PORTALS.len()).map(uri).collect();
    thread::scope(|scope| {
        for uri in &uris {
            scope.spawn(|| done(&["attach", uri, "--log-in", "--multipath=off"]));
        }
    });
    assert_eq!(sessions().len(), uris.len());
    done(&["detach", &uris[0]]);
    nothing_is_left();
}

/// The file is the lock: a user who cannot open it cannot delay a login.
#[test]
fn the_lock_for_making_sessions_is_roots_alone_and_its_holder_is_named() {
    iscsi_tcp::prepare();
    let engine = engine();
    let target = IscsiTarget::serve(IQN, &[1], 8 << 20);
    let source: Source = target.uri(&[0], 1).parse().unwrap();
    let options = SessionOptions::new(INITIATOR.parse().unwrap());
    let request = AttachRequest::new(source.clone()).log_in(options);
    let found = fs::metadata(LOCK).unwrap();
    assert_eq!((found.mode() & 0o777, found.uid()), (0o200, 0));
    let file = File::options().write(true).open(LOCK).unwrap();
    let held = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
    let short = Deadline::after(Duration::from_secs(20));
    let error = engine.attach(&request, short).unwrap_err();
    drop(held);
    let named = format!("process {} (", std::process::id());
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(error.to_string().contains(&named), "{error}");
    nothing_is_left();
    engine.attach(&request, soon()).unwrap();
    engine.detach(source, soon()).unwrap();
    nothing_is_left();
}

/// `ISCSI_UEVENT_CREATE_SESSION` from a port that is neither -1 nor a process's number.
fn make_a_session_without_names() {
    let handle = fs::read_to_string("/sys/class/iscsi_transport/tcp/handle").unwrap();
    let handle: u64 = handle.trim().parse().unwrap();
    let mut message = vec![0; 72];
    message[..4].copy_from_slice(&72_u32.to_ne_bytes());
    message[4..6].copy_from_slice(&11_u16.to_ne_bytes());
    message[6] = 1;
    message[16..20].copy_from_slice(&11_u32.to_ne_bytes());
    message[24..32].copy_from_slice(&handle.to_ne_bytes());
    message[32] = 1;
    let mut socket = Socket::new(NETLINK_ISCSI).unwrap();
    let port = (-77_777_i32).cast_unsigned();
    socket.bind(&SocketAddr::new(port, 0)).unwrap();
    socket.send_to(&message, &SocketAddr::new(0, 0), 0).unwrap();
}

#[test]
fn what_a_login_from_another_port_left_is_ended_though_another_user_has_the_port() {
    iscsi_tcp::prepare();
    let engine = engine();
    let place = Place::new();
    let journal = place.open(&engine);
    let recover = || {
        let limit = Deadline::after(Duration::from_secs(10));
        let recovery = engine.recover(&journal, limit).unwrap();
        (recovery.is_whole(), sessions().len())
    };
    let left = "/run/lunbd/iscsi-login-800000000001.lock";
    fs::create_dir_all("/run/lunbd").unwrap();
    fs::write(left, "1").unwrap();
    make_a_session_without_names();
    assert_eq!(creator(the_only_session().id), -77_777);
    {
        // A process of root may be at a login right now.
        let _root = Holder::start(0);
        assert_eq!(recover().1, 1);
    }
    let _holder = Holder::start(NOBODY);
    assert_eq!(recover(), (true, 0));
    place.require_clean("ended");
    nothing_is_left();
}

#[test]
fn iscsid_that_runs_leaves_a_session_of_another_port_alone_and_one_that_starts_takes_it_up() {
    iscsi_tcp::prepare();
    let target = IscsiTarget::serve(IQN, &[1, 2], 8 << 20);
    let mut iscsid = Iscsid::start();
    let holder = Holder::start(NOBODY);
    let other = target.uri(&[0], 1);
    let text = done(&["attach", &other, "--log-in", "--json"]);
    let attached: serde_json::Value = serde_json::from_str(&text).unwrap();
    let node = attached["node"].as_str().unwrap();
    drop(holder);
    let own = target.uri(&[1], 2);
    done(&["attach", &own, "--log-in"]);
    let [one, two] = [0, 1].map(|at| sessions()[at].id);
    assert!(creator(one) < -1 && creator(two) == -1);
    iscsid.restart();
    for at in [0, 1] {
        target.portal_down(at);
    }
    for session in sessions() {
        session.wait_until_lost(LIMIT);
    }
    for at in [0, 1] {
        target.portal_up(at);
    }
    // No process of lunbd recovers sessions here.
    let state = |at: usize| sessions()[at].state();
    guest::wait_until("iscsid to have its session back", LIMIT, || {
        (state(0) == "LOGGED_IN").then_some(())
    });
    assert_ne!(state(1), "LOGGED_IN");
    first_block(node.as_ref()).unwrap();
    done(&["heal", &own]);
    assert_eq!(state(1), "LOGGED_IN");
    for uri in [&other, &own] {
        done(&["detach", uri]);
    }
    nothing_is_left();
}
