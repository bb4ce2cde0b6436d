//! Dials a server, and checks the socket that is handed over.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test panics to fail")]

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
fn without_a_listener_the_server_is_unreachable() {
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

/// The list of one export, and this answer to `OPT_INFO`; then the client ends the handshake.
fn listing(name: &str, answer: Vec<u8>) -> Vec<Step> {
    let list = [
        reply(OPT_LIST, REP_SERVER, &listed(name, "")),
        reply(OPT_LIST, REP_ACK, b""),
    ];
    vec![
        Step::Send(greeting()),
        Step::Expect(client_flags(3)),
        Step::ExpectOption(OPT_LIST),
        Step::Send(list.concat()),
        Step::ExpectOption(OPT_INFO),
        Step::Send(answer),
        Step::ExpectOption(OPT_ABORT),
    ]
}

#[test]
fn an_export_whose_size_a_server_says_to_a_client_that_opens_it_is_opened_to_discover_it() {
    let no_size = described(OPT_INFO, 0, FLAGS);
    let no_info = reply(OPT_INFO, ERR_UNSUP, b"");
    for answer in [no_size, no_info] {
        let opened = with(until_go(), [Step::Send(go(GIB, FLAGS)), Step::ExpectClose]);
        let server = Server::tcp_sessions(vec![listing("a", answer), opened]);
        let found = nbd::discover(server.uri("").server(), soon()).unwrap();
        let [found] = found.as_slice() else {
            panic!("{found:?}");
        };
        assert!(found.error.is_none(), "{found:?}");
        let export = found.export.as_ref().unwrap();
        assert_eq!((&*export.name, export.size), ("a", GIB));
        server.finish();
    }
}

#[test]
fn an_export_that_hangs_when_it_is_opened_leaves_the_others_their_share_of_the_time() {
    let names = ["hangs", "serves", "serves too"];
    let list = names.map(|name| reply(OPT_LIST, REP_SERVER, &listed(name, "")));
    let list = [list.concat(), reply(OPT_LIST, REP_ACK, b"")].concat();
    let listing = vec![
        Step::Send(greeting()),
        Step::Expect(client_flags(3)),
        Step::ExpectOption(OPT_LIST),
        Step::Send(list),
        Step::ExpectOption(OPT_INFO),
        Step::Send(reply(OPT_INFO, ERR_UNSUP, b"")),
        Step::ExpectOption(OPT_ABORT),
    ];
    let hangs = with(until_go(), [Step::Hang]);
    let opened = with(until_go(), [Step::Send(go(GIB, FLAGS)), Step::ExpectClose]);
    let server = Server::tcp_sessions(vec![listing, hangs, opened.clone(), opened]);
    let limit = Deadline::after(Duration::from_secs(30));
    let found = nbd::discover(server.uri("").server(), limit).unwrap();
    let [hung, others @ ..] = &found[..] else {
        panic!("{found:?}");
    };
    let error = hung.error.as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    for export in others {
        assert!(export.export.is_some(), "{export:?}");
    }
    server.finish();
}

#[test]
fn an_export_that_a_server_refuses_to_describe_or_to_open_has_its_reason() {
    let refused = reply(OPT_INFO, ERR_POLICY, b"not you");
    let server = Server::tcp(listing("a", refused));
    let found = nbd::discover(server.uri("").server(), soon()).unwrap();
    let error = found[0].error.as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
    server.finish();

    let not_opened = [
        Step::Send(reply(OPT_GO, ERR_UNKNOWN, b"gone")),
        Step::ExpectOption(OPT_ABORT),
    ];
    let sessions = vec![
        listing("a", described(OPT_INFO, 0, FLAGS)),
        with(until_go(), not_opened),
    ];
    let server = Server::tcp_sessions(sessions);
    let found = nbd::discover(server.uri("").server(), soon()).unwrap();
    assert!(found[0].export.is_none());
    let error = found[0].error.as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    server.finish();
}
