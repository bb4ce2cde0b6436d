//! Servers that close, hang, dribble, lie about lengths and break the protocol.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

mod nbd_server;

use std::thread;
use std::time::{Duration, Instant};

use lunbd::error::{Retry, Stage};
use lunbd::{Deadline, Error, ErrorKind, nbd};
use nbd_server::bytes::*;
use nbd_server::{Server, Step, until_go, with};

const GIB: u64 = 1 << 30;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// Dials a server that sends this answer to `OPT_GO` and then expects the client to close.
fn refused(answer: Vec<u8>) -> Error {
    let server = Server::tcp(with(until_go(), [Step::Send(answer), Step::ExpectClose]));
    let error = nbd::dial(&server.uri("a"), soon()).unwrap_err();
    server.finish();
    error
}

/// Like `refused`, for an answer that is an error: the client then aborts politely.
fn refused_with(kind: u32, text: &[u8]) -> Error {
    let answer = Step::Send(reply(OPT_GO, kind, text));
    let leave = [answer, Step::ExpectOption(OPT_ABORT), Step::ExpectClose];
    let server = Server::tcp(with(until_go(), leave));
    let error = nbd::dial(&server.uri("a"), soon()).unwrap_err();
    server.finish();
    error
}

/// Tests each script on a thread of its own, since each takes its whole deadline.
fn each_at_once<const N: usize>(scripts: [Vec<Step>; N], test: impl Fn(Vec<Step>) + Sync) {
    let test = &test;
    thread::scope(|scope| {
        for script in scripts {
            scope.spawn(move || test(script));
        }
    });
}

fn assert_broken(error: &Error, field: &str) {
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert_eq!(error.stage(), Some(Stage::Handshake));
    assert!(error.to_string().contains(field), "{error}");
}

#[test]
fn a_server_that_closes_at_any_byte_of_the_handshake_is_unreachable() {
    let (first, second) = (greeting(), go(GIB, FLAGS));
    let in_greeting = (0..first.len()).map(|at| vec![Step::Send(first[..at].to_vec())]);
    let in_answer =
        (0..second.len()).map(|at| with(until_go(), [Step::Send(second[..at].to_vec())]));
    let between = [
        vec![Step::Send(first.clone())],
        vec![Step::Send(first.clone()), Step::Expect(client_flags(3))],
    ];
    let scripts: Vec<_> = in_greeting.chain(in_answer).chain(between).collect();
    let rounds = scripts.len();
    let server = Server::tcp_sessions(scripts);
    for _ in 0..rounds {
        let error = nbd::dial(&server.uri("a"), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert_eq!(error.stage(), Some(Stage::Handshake));
        assert_eq!(error.retry(), Retry::Again);
    }
    server.finish();
}

#[test]
fn a_server_that_dribbles_or_hangs_does_not_outlast_the_deadline() {
    // The whole greeting takes ninety seconds.
    let interval = Duration::from_secs(5);
    let scripts = [
        vec![Step::Dribble(greeting(), interval), Step::Hang],
        with(
            until_go(),
            [Step::Dribble(go(GIB, FLAGS), interval), Step::Hang],
        ),
        vec![Step::Hang],
        with(until_go(), [Step::Hang]),
    ];
    each_at_once(scripts, |script| {
        let server = Server::tcp(script);
        let began = Instant::now();
        let limit = Duration::from_millis(7500);
        let error = nbd::dial(&server.uri("a"), Deadline::after(limit)).unwrap_err();
        let took = began.elapsed();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(error.stage(), Some(Stage::Handshake));
        assert!(took >= limit && took < limit * 8, "{took:?}");
        assert!(error.last_seen().unwrap().contains(" bytes"), "{error}");
        server.finish();
    });
}

#[test]
fn a_length_that_is_too_long_is_refused_before_a_byte_of_it_is_read() {
    for (kind, length) in [
        (REP_INFO, 65_537),
        (REP_ACK, u32::MAX),
        (ERR_UNKNOWN, 1 << 31),
    ] {
        // A client that believed it would now wait for the rest.
        let error = refused(reply_of_length(OPT_GO, kind, length, b"begun"));
        assert_broken(&error, "length of a reply");
    }
}

#[test]
fn each_breach_of_the_protocol_is_an_error_that_names_the_field() {
    let info = |payload: Vec<u8>| reply(OPT_GO, REP_INFO, &payload);
    let export = info(info_export(GIB, FLAGS));
    let ack = reply(OPT_GO, REP_ACK, b"");
    let sizes = |minimum, preferred, maximum| info(info_block_size(minimum, preferred, maximum));
    let whole = |size, flags| [info(info_export(size, flags)), ack.clone()].concat();
    let mut wrong_magic = ack.clone();
    wrong_magic[7] ^= 1;
    for (answer, field) in [
        (wrong_magic, "reply magic"),
        (reply(OPT_LIST, REP_ACK, b""), "option of a reply"),
        (
            reply(OPT_GO, REP_SERVER, &listed("a", "")),
            "type of a reply",
        ),
        (ack.clone(), "INFO_EXPORT"),
        (
            info(info_export(GIB, FLAGS)[..11].to_vec()),
            "length of INFO_EXPORT",
        ),
        (
            info([info_export(GIB, FLAGS), vec![0]].concat()),
            "length of INFO_EXPORT",
        ),
        ([export.clone(), export.clone()].concat(), "INFO_EXPORT"),
        (
            info(info_block_size(1, 512, 512)[..13].to_vec()),
            "length of INFO_BLOCK_SIZE",
        ),
        (sizes(3, 4096, 4096), "minimum block size"),
        (sizes(0, 4096, 4096), "minimum block size"),
        (sizes(131_072, 131_072, u32::MAX), "minimum block size"),
        (sizes(1024, 512, 4096), "preferred block size"),
        (sizes(512, 5000, 8192), "preferred block size"),
        (
            [export.clone(), sizes(512, 4096, 2048), ack.clone()].concat(),
            "maximum block size",
        ),
        (whole(GIB, FLAGS & !1), "HAS_FLAGS"),
        (whole(0, FLAGS), "export size"),
        (whole(1 << 63, FLAGS), "export size"),
        (
            [export, reply(OPT_GO, REP_ACK, b"x")].concat(),
            "length of an ACK",
        ),
        (info(vec![0, 9]).repeat(1000), "number of replies"),
    ] {
        assert_broken(&refused(answer), field);
    }
}

#[test]
fn a_greeting_that_is_no_fixed_newstyle_is_refused() {
    let error = |first: Vec<u8>| {
        let server = Server::tcp(vec![Step::Send(first), Step::ExpectClose]);
        let error = nbd::dial(&server.uri("a"), soon()).unwrap_err();
        server.finish();
        error
    };
    assert_broken(&error(b"SSH-2.0-OpenSSH_9.2p1\r\n".to_vec()), "magic");
    assert_broken(&error(b"NBDMAGICNOTIHAVE\0\x03".to_vec()), "second magic");
    assert_eq!(error(greeting_with(0)).kind(), ErrorKind::NotSupported);
}

#[test]
fn a_servers_words_are_shown_on_one_line_and_escaped() {
    let error = refused_with(ERR_UNKNOWN, b"no\nsuch\x1b[31m thing").to_string();
    assert!(error.contains(r"no\nsuch\u{1b}[31m thing"), "{error}");
    assert!(!error.contains(char::is_control), "{error}");
    let error = refused_with(ERR_UNKNOWN, &vec![b'x'; 65_536]).to_string();
    assert!(error.len() < 500, "{}", error.len());
}

#[test]
fn a_list_that_is_forbidden_or_broken_is_an_error() {
    let error = |answer: Vec<u8>, ends: Vec<Step>| {
        let script = vec![
            Step::Send(greeting()),
            Step::Expect(client_flags(3)),
            Step::ExpectOption(OPT_LIST),
            Step::SendUntilClosed(answer),
        ];
        let server = Server::tcp(with(script, ends));
        let error = nbd::list_exports(server.uri("").server(), soon()).unwrap_err();
        server.finish();
        error
    };
    let leave = vec![Step::ExpectOption(OPT_ABORT), Step::ExpectClose];
    let forbidden = error(reply(OPT_LIST, ERR_POLICY, b"not here"), leave);
    assert_eq!(forbidden.kind(), ErrorKind::NotPermitted);
    assert!(forbidden.to_string().contains("not here"));

    let mut too_long = listed("abc", "");
    too_long[3] = 4;
    for (payload, field) in [
        (too_long, "length of a listed export's name"),
        (
            listed(&"a".repeat(4097), ""),
            "length of a listed export's name",
        ),
        (vec![0, 0], "length of a listed export"),
        (b"\0\0\0\x01\xff".to_vec(), "name of a listed export"),
    ] {
        let answer = reply(OPT_LIST, REP_SERVER, &payload);
        assert_broken(&error(answer, vec![Step::ExpectClose]), field);
    }
    let endless = reply(OPT_LIST, REP_SERVER, &listed("a", &"x".repeat(60_000))).repeat(80);
    assert_broken(&error(endless, vec![Step::Hang]), "list of exports");
}

#[test]
fn a_server_that_dribbles_or_hangs_while_it_is_discovered_does_not_outlast_the_deadline() {
    let interval = Duration::from_secs(5);
    let until_list = || {
        vec![
            Step::Send(greeting()),
            Step::Expect(client_flags(3)),
            Step::ExpectOption(OPT_LIST),
        ]
    };
    let list = [
        reply(OPT_LIST, REP_SERVER, &listed("a", "")),
        reply(OPT_LIST, REP_ACK, b""),
    ]
    .concat();
    let info = described(OPT_INFO, GIB, FLAGS);
    let ends = [
        vec![Step::Hang],
        vec![Step::Dribble(list.clone(), interval), Step::Hang],
        vec![Step::Send(list.clone()), Step::Hang],
        vec![
            Step::Send(list),
            Step::ExpectOption(OPT_INFO),
            Step::Dribble(info, interval),
            Step::Hang,
        ],
    ];
    each_at_once(ends, |ends| {
        let server = Server::tcp(with(until_list(), ends));
        let limit = Deadline::after(Duration::from_secs(10));
        let error = nbd::discover(server.uri("").server(), limit).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(error.stage(), Some(Stage::Handshake), "{error}");
        server.finish();
    });
}

#[test]
fn no_other_error_makes_the_client_fall_back() {
    for (kind, expected) in [
        (ERR_POLICY, ErrorKind::NotPermitted),
        (0x8000_0003, ErrorKind::Refused),
        (0x8000_0004, ErrorKind::NotSupported),
        (ERR_TLS_REQD, ErrorKind::NotSupported),
        (ERR_UNKNOWN, ErrorKind::NotFound),
        (ERR_SHUTDOWN, ErrorKind::NotReady),
        (0x8000_0008, ErrorKind::Refused),
        (0xffff_ffff, ErrorKind::Refused),
    ] {
        assert_eq!(refused_with(kind, b"").kind(), expected, "{kind:#x}");
    }
}
