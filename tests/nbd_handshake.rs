//! What the client negotiates with a server, and what it leaves to the kernel.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

mod nbd_server;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use lunbd::nbd::{self, BlockSizes, Connection};
use lunbd::{Deadline, ErrorKind};
use nbd_server::bytes::*;
use nbd_server::{Server, Step, until_go, with};

const GIB: u64 = 1 << 30;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

#[test]
fn an_export_is_negotiated_over_tcp_and_over_a_unix_socket() {
    let script = with(
        until_go(),
        [Step::Send(go(3 << 40, FLAGS)), Step::ExpectClose],
    );
    for server in [Server::tcp(script.clone()), Server::unix(script)] {
        let Connection { stream, export, .. } = nbd::dial(&server.uri("a b"), soon()).unwrap();
        assert_eq!((export.name.as_str(), export.size), ("a b", 3 << 40));
        assert_eq!(export.flags.bits(), FLAGS);
        let sizes = export.block_sizes.unwrap();
        assert_eq!(
            (sizes.minimum, sizes.preferred, sizes.maximum),
            (1, 4096, 32 << 20)
        );
        assert!(!export.read_only() && !export.can_multi_conn());
        drop(stream);
        server.finish();
    }
}

#[test]
fn what_follows_the_ack_is_left_in_the_socket() {
    let behind = b"the kernel's bytes";
    let answer = [&go(GIB, FLAGS)[..], behind].concat();
    let request = Step::Expect(b"from the kernel".to_vec());
    for unix in [false, true] {
        let script = with(until_go(), [Step::Send(answer.clone()), request.clone()]);
        let server = if unix {
            Server::unix(script)
        } else {
            Server::tcp(script)
        };
        let connection = nbd::dial(&server.uri(""), soon()).unwrap();
        // Only read and write are used, which work for both kinds of socket.
        let mut stream = TcpStream::from(connection.stream);
        let mut bytes = vec![0; behind.len()];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, behind);
        stream.write_all(b"from the kernel").unwrap();
        server.finish();
    }
}

#[test]
fn a_server_that_does_not_know_go_is_asked_by_name() {
    for (offered, zeroes) in [(3, 0), (1, 124)] {
        let server = Server::tcp(vec![
            Step::Send(greeting_with(offered)),
            Step::Expect(client_flags(u32::from(offered))),
            Step::ExpectOption(OPT_GO),
            Step::Send(reply(OPT_GO, ERR_UNSUP, b"what?")),
            Step::Expect(b"IHAVEOPT\0\0\0\x01\0\0\0\x02ab".to_vec()),
            Step::Send([&GIB.to_be_bytes()[..], &[0, 7], &vec![0; zeroes], b"next"].concat()),
            Step::ExpectClose,
        ]);
        let connection = nbd::dial(&server.uri("ab"), soon()).unwrap();
        let export = &connection.export;
        assert_eq!((export.size, export.flags.bits()), (GIB, 7));
        assert!(export.read_only());
        assert_eq!(export.block_sizes, None::<BlockSizes>);
        let mut next = [0; 4];
        TcpStream::from(connection.stream)
            .read_exact(&mut next)
            .unwrap();
        assert_eq!(&next, b"next");
        server.finish();
    }
}

#[test]
fn a_server_that_closes_when_it_is_asked_by_name_may_not_have_the_export() {
    let unsupported = Step::Send(reply(OPT_GO, ERR_UNSUP, b""));
    let server = Server::tcp(with(
        until_go(),
        [unsupported, Step::ExpectOption(OPT_EXPORT_NAME)],
    ));
    let error = nbd::dial(&server.uri("a"), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(error.to_string().contains("no such export"), "{error}");
    server.finish();
}

/// A server that lists these exports.
fn lists(names: &[&str]) -> Vec<Step> {
    let entry = |name: &&str| Step::Send(reply(OPT_LIST, REP_SERVER, &listed(name, "")));
    let until_list = [
        Step::Send(greeting()),
        Step::Expect(client_flags(3)),
        Step::ExpectOption(OPT_LIST),
    ];
    let mut script: Vec<Step> = until_list
        .into_iter()
        .chain(names.iter().map(entry))
        .collect();
    script.push(Step::Send(reply(OPT_LIST, REP_ACK, b"")));
    script
}

#[test]
fn each_export_of_a_server_is_discovered_with_its_size_and_flags_or_why_it_has_none() {
    let answers = [
        described(OPT_INFO, GIB, FLAGS),
        reply(OPT_INFO, ERR_POLICY, b"not yours"),
        described(OPT_INFO, 0, FLAGS),
        described(OPT_INFO, 512, FLAGS | 0b10),
    ];
    let asked = answers
        .into_iter()
        .flat_map(|answer| [Step::ExpectOption(OPT_INFO), Step::Send(answer)]);
    let leave = [Step::ExpectOption(OPT_ABORT), Step::ExpectClose];
    let script = lists(&["a", "b", "empty", "d"]);
    let server = Server::tcp(with(script, asked.chain(leave)));
    let found = nbd::discover(server.uri("").server(), soon()).unwrap();
    server.finish();
    let names: Vec<&str> = found.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "empty", "d"]);
    let sizes: Vec<Option<u64>> = found
        .iter()
        .map(|one| Some(one.export.as_ref()?.size))
        .collect();
    assert_eq!(sizes, [Some(GIB), None, None, Some(512)]);
    assert!(found[3].export.as_ref().unwrap().read_only());
    let kinds: Vec<Option<ErrorKind>> = found
        .iter()
        .map(|one| Some(one.error.as_ref()?.kind()))
        .collect();
    let expected = [
        None,
        Some(ErrorKind::NotPermitted),
        Some(ErrorKind::Protocol),
        None,
    ];
    assert_eq!(kinds, expected);
}

#[test]
fn a_server_that_does_not_know_info_is_asked_once_and_its_names_are_discovered() {
    let unknown = [
        Step::ExpectOption(OPT_INFO),
        Step::Send(reply(OPT_INFO, ERR_UNSUP, b"")),
        Step::ExpectOption(OPT_ABORT),
        Step::ExpectClose,
    ];
    let server = Server::unix(with(lists(&["a", "b", "c"]), unknown));
    let found = nbd::discover(server.uri("").server(), soon()).unwrap();
    server.finish();
    assert_eq!(found.len(), 3);
    for one in &found {
        let kind = one.error.as_ref().map(lunbd::Error::kind);
        assert_eq!(kind, Some(ErrorKind::NotSupported), "{one:?}");
    }
}

#[test]
fn the_exports_of_a_server_are_listed() {
    let server = Server::unix(vec![
        Step::Send(greeting()),
        Step::Expect(client_flags(3)),
        Step::Expect(b"IHAVEOPT\0\0\0\x03\0\0\0\0".to_vec()),
        Step::Send(reply(OPT_LIST, REP_SERVER, &listed("", ""))),
        Step::Send(reply(
            OPT_LIST,
            REP_SERVER,
            &listed("disk\u{e9}", "a\tdisk"),
        )),
        Step::Send(reply(OPT_LIST, REP_ACK, b"")),
        Step::ExpectOption(OPT_ABORT),
        Step::ExpectClose,
    ]);
    let exports = nbd::list_exports(server.uri("").server(), soon()).unwrap();
    let exports: Vec<_> = exports
        .iter()
        .map(|export| (export.name.as_str(), export.description.as_deref()))
        .collect();
    assert_eq!(exports, [("", None), ("disk\u{e9}", Some("a\\tdisk"))]);
    server.finish();
}
