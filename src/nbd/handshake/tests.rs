//! Tests of the handshake against a server that is a slice of bytes.

use std::io;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// Sends what a server would send, and records what it receives.
struct Canned<'a> {
    input: &'a [u8],
    output: Vec<u8>,
    /// The longest buffer that the client passed to a read: it allocated as
    /// much.
    longest: usize,
}

impl<'a> Canned<'a> {
    fn new(input: &'a [u8]) -> Self {
        Self {
            input,
            output: Vec::new(),
            longest: 0,
        }
    }
}

impl Read for Canned<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.longest = self.longest.max(buffer.len());
        self.input.read(buffer)
    }
}

impl Write for Canned<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.output.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";
const EXPORT: &[u8] = b"\0\0\0\0\0\0\0\0\x10\0\0\x05";
const GO: u32 = 7;
const LIST: u32 = 3;

fn reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    reply_of_length(option, kind, u32::try_from(payload.len()).unwrap(), payload)
}

fn reply_of_length(option: u32, kind: u32, length: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
    bytes.extend([option, kind, length].map(u32::to_be_bytes).concat());
    bytes.extend(payload);
    bytes
}

#[test]
fn what_follows_the_ack_is_left_in_the_stream() {
    let input = [
        GREETING,
        &reply(GO, 3, EXPORT),
        &reply(GO, 1, b""),
        b"kernel",
    ]
    .concat();
    let mut stream = Canned::new(&input);
    let export = negotiate(&mut stream, "a", soon()).unwrap();
    assert_eq!((export.name.as_str(), export.size), ("a", 4096));
    assert_eq!(stream.input, b"kernel");
    assert_eq!(
        stream.output,
        [
            &[0, 0, 0, 3][..],
            &wire::export_request(OptionCode::Go, "a")
        ]
        .concat()
    );
}

#[test]
fn no_length_that_a_server_claims_is_allocated_beyond_the_limit() {
    for length in [65_536, 65_537, 1 << 31, u32::MAX] {
        for (option, kind) in [(GO, 1), (GO, 3), (LIST, 2), (GO, (1 << 31) | 6)] {
            let input = [GREETING, &reply_of_length(option, kind, length, &[0; 100])].concat();
            let mut stream = Canned::new(&input);
            if option == GO {
                negotiate(&mut stream, "a", soon()).unwrap_err();
            } else {
                discover(&mut stream, soon()).unwrap_err();
            }
            let longest = if length == 65_536 { 65_536 } else { 20 };
            assert_eq!(
                stream.longest, longest,
                "{length} in a reply of type {kind}"
            );
        }
    }
}

#[test]
fn a_server_that_never_comes_to_its_ack_is_refused() {
    let info = reply(GO, 3, b"\0\x01name");
    let input = [GREETING, &info.repeat(1000)].concat();
    let error = negotiate(&mut Canned::new(&input), "a", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("number of replies"), "{error}");

    let long = reply(
        LIST,
        2,
        &[&[0, 0, 0, 1, b'a'][..], &vec![b'x'; 65_000]].concat(),
    );
    let input = [GREETING, &long.repeat(100)].concat();
    let error = list(&mut Canned::new(&input), soon()).unwrap_err();
    assert!(error.to_string().contains("list of exports"), "{error}");

    let short = reply(LIST, 2, &[0; 4]);
    let input = [GREETING, &short.repeat(65_537)].concat();
    let error = list(&mut Canned::new(&input), soon()).unwrap_err();
    assert!(error.to_string().contains("list of exports"), "{error}");
}

/// A list of `count` exports without a name, each described by `answer`.
fn described(count: usize, answer: &[u8]) -> Vec<u8> {
    let listed = reply(LIST, 2, &[0; 4]).repeat(count);
    [
        GREETING,
        &listed,
        &reply(LIST, 1, b""),
        &answer.repeat(count),
    ]
    .concat()
}

#[test]
fn what_a_server_says_of_its_exports_is_bounded_for_each_and_for_all() {
    const INFO: u32 = 6;
    let protocol = |input: &[u8], field: &str| {
        let error = discover(&mut Canned::new(input), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains(field), "{error}");
    };
    let endless = reply(INFO, 3, b"\0\x01name").repeat(1000);
    protocol(&described(1, &endless), "number of replies");
    // Test a long answer and a long refusal.
    let long = vec![b'x'; 65_000];
    let described_at_length = [
        reply(INFO, 3, &long),
        reply(INFO, 3, EXPORT),
        reply(INFO, 1, b""),
    ];
    let refused_at_length = reply(INFO, (1 << 31) | 2, &long);
    for answer in [described_at_length.concat(), refused_at_length] {
        let few = discover(&mut Canned::new(&described(100, &answer)), soon());
        assert_eq!(few.unwrap().len(), 100);
        protocol(&described(200, &answer), "description of the exports");
    }
}

#[test]
fn a_server_that_never_makes_the_client_wait_is_held_to_the_deadline_too() {
    let input = [GREETING, &reply(GO, 3, EXPORT), &reply(GO, 1, b"")].concat();
    let passed = Deadline::after(Duration::ZERO);
    let error = negotiate(&mut Canned::new(&input), "a", passed).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.last_seen(), Some("0 of 18 bytes"));
}

#[test]
fn a_name_over_4096_bytes_is_not_sent() {
    let mut stream = Canned::new(GREETING);
    let error = negotiate(&mut stream, &"a".repeat(4097), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(stream.output.is_empty());
}

#[test]
fn a_refusal_is_answered_by_taking_leave() {
    let unknown = (1 << 31) | 6;
    let input = [GREETING, &reply(GO, unknown, b"no such export")].concat();
    let mut stream = Canned::new(&input);
    let error = negotiate(&mut stream, "a", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(error.stage(), Some(Stage::Handshake));
    assert!(stream.output.ends_with(b"IHAVEOPT\0\0\0\x02\0\0\0\0"));
}

proptest! {
    #[test]
    fn no_bytes_of_a_server_panic(kinds in prop::collection::vec((0..5_u32, any::<bool>(), any::<Vec<u8>>()), 0..6), junk: Vec<u8>) {
        let replies: Vec<u8> = kinds
            .iter()
            .flat_map(|(kind, error, payload)| reply(GO, kind | u32::from(*error) << 31, payload))
            .collect();
        let input = [GREETING, &replies, &junk].concat();
        let _ = negotiate(&mut Canned::new(&input), "a", soon());
        let _ = negotiate(&mut Canned::new(&junk), "a", soon());
        let _ = list(&mut Canned::new(&input), soon());
        let _ = discover(&mut Canned::new(&input), soon());
    }
}
