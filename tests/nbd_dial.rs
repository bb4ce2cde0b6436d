//! Dials a server, and checks the socket that is handed over.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

mod nbd_server;

use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use lunbd::error::Stage;
use lunbd::id::NbdUri;
use lunbd::{Deadline, ErrorKind, nbd};
use nbd_server::bytes::*;
use nbd_server::{Server, Step, until_go, with};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{getsockopt, sockopt};

const GIB: u64 = 1 << 30;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

#[test]
fn the_socket_is_blocking_and_has_no_timeouts_when_it_is_handed_over() {
    let script = with(until_go(), [Step::Send(go(GIB, FLAGS)), Step::ExpectClose]);
    for server in [Server::tcp(script.clone()), Server::unix(script)] {
        let connection = nbd::dial(&server.uri(""), soon()).unwrap();
        let socket = connection.stream.as_fd();
        for timeout in [
            getsockopt(&socket, sockopt::ReceiveTimeout).unwrap(),
            getsockopt(&socket, sockopt::SendTimeout).unwrap(),
        ] {
            assert_eq!((timeout.tv_sec(), timeout.tv_usec()), (0, 0));
        }
        let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL).unwrap());
        assert!(!flags.contains(OFlag::O_NONBLOCK));
        let flags = fcntl(socket, FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags, nix::libc::FD_CLOEXEC);
        drop(connection);
        server.finish();
    }
}

#[test]
fn where_nobody_listens_the_server_is_unreachable() {
    // At this address the other tests, which run meanwhile, have no server.
    let listener = TcpListener::bind("127.0.0.2:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = nbd::dial(&format!("nbd://{address}/a").parse().unwrap(), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert_eq!(error.stage(), Some(Stage::Dial));
    assert!(error.to_string().contains(&address.to_string()), "{error}");

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let uri = NbdUri::unix(&path, "a").unwrap();
    let absent = nbd::dial(&uri, soon()).unwrap_err();
    assert_eq!(absent.kind(), ErrorKind::Unreachable);
    assert_eq!(absent.path(), Some(path.as_path()));
    drop(UnixListener::bind(&path).unwrap());
    let left_over = nbd::dial(&uri, soon()).unwrap_err();
    assert_eq!(left_over.kind(), ErrorKind::Unreachable);
}

#[test]
fn a_name_is_resolved_and_each_of_its_addresses_is_tried() {
    // If localhost is ::1 too, no server listens there.
    let script = with(until_go(), [Step::Send(go(GIB, FLAGS)), Step::ExpectClose]);
    let server = Server::tcp(script);
    let by_number = server.uri("a").to_string();
    let by_name = by_number.replace("127.0.0.1", "localhost").parse().unwrap();
    drop(nbd::dial(&by_name, soon()).unwrap());
    server.finish();
}

#[test]
fn a_unix_server_whose_queue_is_full_is_waited_for_until_the_deadline() {
    use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, UnixAddr};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
    socket::bind(socket.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    socket::listen(&socket, Backlog::new(0).unwrap()).unwrap();
    let _queued = UnixStream::connect(&path).unwrap();

    let uri = NbdUri::unix(&path, "a").unwrap();
    let began = Instant::now();
    let limit = Duration::from_millis(200);
    let error = nbd::dial(&uri, Deadline::after(limit)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Dial));
    // No process accepts the connection, so a dial that ignores the deadline waits forever.
    let took = began.elapsed();
    assert!(took >= limit && took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn after_the_deadline_no_server_is_asked() {
    let uri = "nbd://127.0.0.1:1/a".parse().unwrap();
    let error = nbd::dial(&uri, Deadline::after(Duration::ZERO)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.stage(), Some(Stage::Dial));
}
