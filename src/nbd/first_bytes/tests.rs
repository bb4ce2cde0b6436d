use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::*;
use crate::error::ErrorKind;
use crate::nbd::BlockSizes;

fn export(size: u64, minimum: u32, maximum: u32) -> Export {
    let sizes = BlockSizes::new(minimum, minimum.max(4096), maximum).unwrap();
    Export::new("a", size, 1, Some(sizes)).unwrap()
}

/// A request as the server reads it: cookie, offset and length.
type Request = (u64, u64, u32);

fn take_request(stream: &mut UnixStream) -> Request {
    let mut bytes = [0; 28];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0]);
    (
        u64::from_be_bytes(bytes[8..16].try_into().unwrap()),
        u64::from_be_bytes(bytes[16..24].try_into().unwrap()),
        u32::from_be_bytes(bytes[24..].try_into().unwrap()),
    )
}

fn reply(error: u32, cookie: u64, bytes: &[u8]) -> Vec<u8> {
    let head = [0x67, 0x44, 0x66, 0x98];
    [
        &head[..],
        &error.to_be_bytes(),
        &cookie.to_be_bytes(),
        bytes,
    ]
    .concat()
}

/// A client's stream, and a server that runs `serve`.
fn served<T: Send + 'static>(
    serve: impl FnOnce(&mut UnixStream) -> T + Send + 'static,
) -> (UnixStream, JoinHandle<T>) {
    let (near, mut far) = UnixStream::pair().unwrap();
    for stream in [&near, &far] {
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
    }
    (near, thread::spawn(move || serve(&mut far)))
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn read_first(stream: &mut UnixStream, export: &Export) -> Result<Answer> {
    read_in_parts(stream, "a read", 0, &first_lengths(export), soon())
}

#[test]
fn first_bytes_are_the_same_whatever_block_the_server_reads_and_others_differ() {
    let names_need = usize::try_from(content::LENGTH).unwrap();
    let mut bytes = vec![7; names_need];
    let same = FirstBytes::of(&bytes);
    bytes.extend([8; 4096]);
    assert_eq!(FirstBytes::of(&bytes), same);
    bytes[names_need - 1] = 8;
    assert_ne!(FirstBytes::of(&bytes), same);
    assert_ne!(FirstBytes::of(&bytes[..4096]), same);
}

#[test]
fn the_last_block_is_one_of_the_server_and_of_the_kernel_at_least() {
    for (size, minimum, expected) in [
        (1 << 30, 1, ((1 << 30) - 512, 512)),
        (1 << 30, 4096, ((1 << 30) - 4096, 4096)),
        (1 << 30, 65_536, ((1 << 30) - 65_536, 65_536)),
        (10_000, 4096, (4096, 4096)),
        (300, 1, (0, 300)),
    ] {
        assert_eq!(last_request(&export(size, minimum, 32 << 20)), expected);
    }
}

#[test]
fn the_requests_are_whole_blocks_within_the_export_and_what_the_server_takes() {
    let all = 68 * 1024;
    for (size, minimum, maximum, expected) in [
        (1 << 30, 1, 32 << 20, vec![all]),
        (1 << 30, 512, u32::MAX, vec![all]),
        (1 << 30, 65_536, 32 << 20, vec![131_072]),
        (1 << 30, 512, 32 << 10, vec![32_768, 32_768, 4096]),
        (1 << 30, 512, 40_000, vec![39_936, 29_696]),
        (100_000, 65_536, 100_000, vec![65_536]),
        (1300, 512, 32 << 20, vec![1024]),
    ] {
        let lengths = first_lengths(&export(size, minimum, maximum));
        assert_eq!(lengths, expected, "{size} {minimum} {maximum}");
    }
}

#[test]
fn replies_in_any_order_are_put_where_they_belong_and_nothing_behind_them_is_read() {
    let (mut stream, server) = served(|stream| {
        let requests: Vec<Request> = (0..3).map(|_| take_request(stream)).collect();
        for (cookie, offset, length) in requests.into_iter().rev() {
            let filler = u8::try_from(offset / 32_768).unwrap() + 1;
            let bytes = vec![filler; usize::try_from(length).unwrap()];
            stream.write_all(&reply(0, cookie, &bytes)).unwrap();
        }
        stream.write_all(b"kernel").unwrap();
    });
    let read = read_first(&mut stream, &export(1 << 30, 512, 32 << 10));
    let bytes = read.unwrap().unwrap();
    assert_eq!(bytes.len(), 68 * 1024);
    assert_eq!([bytes[0], bytes[32_768], bytes[65_536]], [1, 2, 3]);
    let mut rest = [0; 6];
    stream.read_exact(&mut rest).unwrap();
    assert_eq!(&rest, b"kernel");
    server.join().unwrap();
}

#[test]
fn an_error_of_the_server_is_its_answer_and_the_connection_is_read_to_its_end() {
    let (mut stream, server) = served(|stream| {
        let (first, _, length) = take_request(stream);
        let (second, ..) = take_request(stream);
        let third = take_request(stream).0;
        stream.write_all(&reply(5, second, &[])).unwrap();
        let bytes = vec![0; usize::try_from(length).unwrap()];
        stream.write_all(&reply(0, first, &bytes)).unwrap();
        stream.write_all(&reply(0, third, &[0; 4096])).unwrap();
        stream.write_all(b"kernel").unwrap();
    });
    let read = read_first(&mut stream, &export(1 << 30, 512, 32 << 10));
    assert_eq!(read.unwrap(), Err(5));
    let mut rest = [0; 6];
    stream.read_exact(&mut rest).unwrap();
    assert_eq!(&rest, b"kernel");
    server.join().unwrap();
}

#[test]
fn a_reply_that_breaks_the_protocol_is_named() {
    for (answer, field) in [
        (reply(0, 7, &[]), "cookie of a reply"),
        (vec![0x66; 16], "simple reply magic"),
    ] {
        let (mut stream, server) = served(move |stream| {
            take_request(stream);
            stream.write_all(&answer).unwrap();
        });
        let read = read_first(&mut stream, &export(4096, 512, 32 << 20));
        let error = read.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains(field), "{error}");
        server.join().unwrap();
    }
}

#[test]
fn a_request_that_is_answered_twice_is_refused() {
    let (mut stream, server) = served(|stream| {
        let (cookie, _, length) = take_request(stream);
        let bytes = vec![0; usize::try_from(length).unwrap()];
        for _ in 0..2 {
            stream.write_all(&reply(0, cookie, &bytes)).unwrap();
        }
        let mut rest = Vec::new();
        // This returns when the client closes.
        let _ = stream.read_to_end(&mut rest);
    });
    let read = read_first(&mut stream, &export(1 << 30, 512, 32 << 10));
    assert_eq!(read.unwrap_err().kind(), ErrorKind::Protocol);
    drop(stream);
    server.join().unwrap();
}

#[test]
fn a_server_that_never_answers_costs_its_caller_the_deadline_alone() {
    let (near, _far) = UnixStream::pair().unwrap();
    let export = export(4096, 512, 32 << 20);
    let stream = near.into();
    let limit = Deadline::after(Duration::from_millis(20));
    let tls = None;
    let connection = Connection {
        stream,
        export,
        tls,
    };
    let error = connection.content(limit).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.stage(), Some(Stage::Identify), "{error}");
}
