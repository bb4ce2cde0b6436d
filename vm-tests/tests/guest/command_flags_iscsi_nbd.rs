//! Flags of the `lunbd` command whose effect only a kernel can show.

use std::fs;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use vm_tests::guest;
use vm_tests::guest::iscsi_target::IscsiTarget;
use vm_tests::guest::iscsi_tcp::{self, attribute, nothing_is_left};
use vm_tests::guest::iscsid::sessions;
use vm_tests::guest::lio;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};

const MIB: u64 = 1 << 20;

/// Runs the command, which must succeed, and returns what it printed.
#[track_caller]
fn json(arguments: &[&str]) -> Value {
    let Output {
        status,
        stdout,
        stderr,
    } = guest::lunbd(&[arguments, &["--json"]].concat());
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{arguments:?}: {said}");
    serde_json::from_slice(&stdout).unwrap()
}

/// The connections of this machine to a server's port.
fn connections_to(port: u16) -> usize {
    const ESTABLISHED: &str = "01";
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let is_open = |line: &&str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields[2].ends_with(&format!(":{port:04X}")) && fields[3] == ESTABLISHED
    };
    table.lines().skip(1).filter(is_open).count()
}

#[test]
fn index_backend_and_connections_say_which_device_is_connected_under_which_id_and_how_often() {
    let _module = NbdModule::with_backend_ids(2);
    let store = Store::sparse(8 * MIB);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let At::Tcp(address) = server.at() else {
        unreachable!("a TCP server");
    };
    let uri = server.uri("disk");
    let shown = |index: u32| fs::read_to_string(format!("/sys/block/nbd{index}/backend"));
    for (index, backend, count) in [(3, "agent-7", 2), (5, "agent-8", 1)] {
        let (number, connections) = (index.to_string(), count.to_string());
        let attached = json(&[
            "attach",
            &uri,
            "--index",
            &number,
            "--backend",
            backend,
            "--connections",
            &connections,
        ]);
        let id = shown(index).unwrap_or_default();
        let seen = (&attached["node"], id.trim(), connections_to(address.port()));
        let node = Value::from(format!("/dev/nbd{index}"));
        assert_eq!(seen, (&node, backend, count));
        // The URI is not the id, so the command finds no device under it.
        assert_eq!(json(&["detach", &uri])["changed"], false);
        let healed = json(&["heal", &uri, "--backend", backend]);
        assert_eq!(healed["devices"][0]["outcome"], "healthy", "{healed}");
        let detached = json(&["detach", &uri, "--backend", backend]);
        assert_eq!(detached["changed"], true, "{detached}");
    }
}

#[test]
fn recovery_timeout_is_the_sessions_and_keep_sessions_leaves_the_session_logged_in() {
    const IQN: &str = "iqn.2026-01.example:flags";
    iscsi_tcp::prepare();
    let mut target = IscsiTarget::new(IQN);
    target.map(1, &lio::Store::ramdisk("fl", 8 * MIB));
    let source = target.uri(&[0], 1);
    let ids = || -> Vec<u32> { sessions().iter().map(|session| session.id).collect() };
    json(&["attach", &source, "--log-in", "--recovery-timeout", "17s"]);
    let [session] = ids()[..] else {
        panic!("{:?}", sessions());
    };
    let timeout = attribute(session, "recovery_tmo");
    let kept = json(&["detach", &source, "--keep-sessions"]);
    assert_eq!(kept["changed"], true);
    let seen = (timeout.as_str(), &kept["logged_out"], ids());
    assert_eq!(seen, ("17", &serde_json::json!([]), vec![session]));
    json(&["attach", &source]);
    let ended = json(&["detach", &source]);
    assert_eq!(
        ended["logged_out"],
        serde_json::json!([session.to_string()])
    );
    nothing_is_left();
}

/// Accepts connections until there are `most`, or until none arrives within `wait`.
fn accept(listener: &TcpListener, most: usize, wait: Duration) -> Vec<TcpStream> {
    let mut accepted = Vec::new();
    let mut last = Instant::now();
    while accepted.len() < most && last.elapsed() < wait {
        match listener.accept() {
            Ok((stream, _)) => {
                accepted.push(stream);
                last = Instant::now();
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => panic!("{error}"),
        }
    }
    accepted
}

#[test]
fn apply_works_on_as_many_volumes_at_once_as_it_is_given_threads() {
    guest::enter();
    let _module = NbdModule::with_backend_ids(2);
    for threads in [1, 2, 4] {
        // The server sends no greeting, so a volume that connects to it gets no further.
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        server.set_nonblocking(true).unwrap();
        let address = server.local_addr().unwrap();
        let volume = |number| {
            format!("[[volume]]\nid = \"v{number}\"\nsource = \"nbd://{address}/{number}\"\n")
        };
        fs::write("/tmp/threads.toml", (0..4).map(volume).collect::<String>()).unwrap();
        let mut apply = Command::new("lunbd")
            .args(["apply", "/tmp/threads.toml", "--journal", "/tmp/threads"])
            .args(["--threads", &threads.to_string(), "--timeout", "50s"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let first = accept(&server, threads, Duration::from_secs(40));
        let more = accept(&server, 1, Duration::from_secs(2));
        apply.kill().unwrap();
        apply.wait().unwrap();
        fs::remove_dir_all("/tmp/threads").unwrap();
        assert_eq!((first.len(), more.len()), (threads, 0));
    }
    fs::remove_file("/tmp/threads.toml").unwrap();
}
