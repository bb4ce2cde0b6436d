//! Reads the first and the last bytes of an export over a connection that the kernel does
//! not have yet (`proto.md`, "Transmission phase": requests, and simple replies).

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{Read, Write};
use std::os::fd::AsFd as _;

use super::content;
use super::dial::Connection;
use super::export::Export;
use super::violation::violation;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::id::ContentName;
use crate::kernel::peer::Peer;
use crate::kernel::stream::DeadlineStream;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const CMD_READ: u16 = 0;

/// What the first bytes of an export reveal about its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    /// They were read.
    Read(FirstBytes),
    /// The server answered the read with this error of the protocol.
    Unread(u32),
}

/// The first bytes of a volume, as far as they are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FirstBytes {
    /// The content's names; none if it is blank or of an unknown kind.
    pub(crate) names: Vec<ContentName>,
    /// Differs with other bytes. It is compared within one process alone.
    pub(crate) digest: u64,
}

impl FirstBytes {
    /// `bytes` may be longer than the names need, as the server's blocks may be.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let length = usize::try_from(content::LENGTH).unwrap_or(usize::MAX);
        let mut digest = DefaultHasher::new();
        bytes.get(..length).unwrap_or(bytes).hash(&mut digest);
        Self {
            names: content::names(bytes),
            digest: digest.finish(),
        }
    }
}

/// A server's answer to a read: the bytes, or an error of the protocol.
pub(crate) type Answer = std::result::Result<Vec<u8>, u32>;

impl Content {
    /// The content of these first bytes.
    pub(crate) fn of(first: Answer) -> Self {
        match first {
            Ok(bytes) => Self::Read(FirstBytes::of(&bytes)),
            Err(error) => Self::Unread(error),
        }
    }
}

impl Connection {
    /// Reads the names of the export's content.
    ///
    /// # Errors
    /// Those of [`first_bytes`](Self::first_bytes).
    pub(crate) fn content(&self, deadline: Deadline) -> Result<Content> {
        Ok(Content::of(self.first_bytes(deadline)?))
    }

    /// Reads the bytes that hold the names of the content. If they exceed the server's
    /// longest request it sends several requests, all at once. It leaves no byte of a reply
    /// in the socket.
    ///
    /// # Errors
    /// `Unreachable`; `Protocol`; `TimedOut` at stage `identify`. After an error the
    /// connection cannot be used.
    pub(crate) fn first_bytes(&self, deadline: Deadline) -> Result<Answer> {
        let what = "a read of the export's first bytes";
        self.read(what, 0, &first_lengths(&self.export), deadline)
    }

    /// Reads `length` bytes at `offset`, both in whole blocks of the server.
    ///
    /// # Errors
    /// Those of [`first_bytes`](Self::first_bytes).
    pub(crate) fn bytes_at(&self, offset: u64, length: u32, deadline: Deadline) -> Result<Answer> {
        let (_, longest, _) = sizes(&self.export);
        let what = "a read of some blocks of the export";
        self.read(what, offset, &in_parts(length, longest), deadline)
    }

    /// Reads the last block of the export.
    ///
    /// # Errors
    /// Those of [`first_bytes`](Self::first_bytes).
    pub(crate) fn last_block(&self, deadline: Deadline) -> Result<Answer> {
        let (offset, length) = last_request(&self.export);
        let what = "a read of the export's last block";
        self.read(what, offset, &[length], deadline)
    }

    fn read(&self, what: &str, offset: u64, lengths: &[u32], deadline: Deadline) -> Result<Answer> {
        let mut stream = DeadlineStream::new(self.stream.as_fd(), deadline);
        let read = read_in_parts(&mut stream, what, offset, lengths, deadline);
        read.map_err(|error| error.at(Stage::Identify))
    }
}

/// Reads consecutive ranges of these lengths.
fn read_in_parts(
    stream: &mut (impl Read + Write),
    what: &str,
    mut offset: u64,
    lengths: &[u32],
    deadline: Deadline,
) -> Result<Answer> {
    let mut requests = Vec::new();
    for (cookie, length) in (0_u64..).zip(lengths) {
        requests.extend(request(cookie, offset, *length));
        offset += u64::from(*length);
    }
    let mut peer = Peer::new(stream, "the NBD server", Stage::Identify, deadline);
    peer.write(what, &requests)?;
    let mut answers: Vec<Option<Vec<u8>>> = vec![None; lengths.len()];
    let mut refused = None;
    for _ in lengths {
        let mut reply = [0; 16];
        peer.fill(what, &mut reply)?;
        let (error, cookie) = reply_of(reply)?;
        let place = usize::try_from(cookie).ok();
        let asked = place.and_then(|place| Some((lengths.get(place)?, answers.get_mut(place)?)));
        let Some((length, answer @ None)) = asked else {
            return Err(violation("cookie of a reply", cookie, "that of a request"));
        };
        let mut bytes = Vec::new();
        if error == 0 {
            bytes.resize(usize::try_from(*length).unwrap_or(0), 0);
            peer.fill(what, &mut bytes)?;
        } else {
            refused = Some(error);
        }
        *answer = Some(bytes);
    }
    let answers: Vec<Vec<u8>> = answers.into_iter().flatten().collect();
    Ok(refused.map_or_else(|| Ok(answers.concat()), Err))
}

/// The sizes for requests to an export: its block, its longest request, and its length in
/// whole blocks, all in bytes.
fn sizes(export: &Export) -> (u32, u32, u64) {
    let sizes = export.block_sizes.unwrap_or_default();
    let block = sizes.minimum.max(1);
    let longest = (sizes.maximum - sizes.maximum % block).max(block);
    (block, longest, export.size - export.size % u64::from(block))
}

/// The length of each request for the first bytes. Together they are as long as the names
/// need, in whole blocks of the server, but no longer than the export.
fn first_lengths(export: &Export) -> Vec<u32> {
    let (block, longest, there) = sizes(export);
    let wanted = u64::from(content::LENGTH.next_multiple_of(block));
    in_parts(u32::try_from(wanted.min(there)).unwrap_or(0), longest)
}

/// The lengths of requests for `left` bytes.
fn in_parts(mut left: u32, longest: u32) -> Vec<u32> {
    let mut lengths = Vec::new();
    while left > 0 {
        let next = left.min(longest);
        lengths.push(next);
        left -= next;
    }
    lengths
}

/// The offset and the length of the last block.
fn last_request(export: &Export) -> (u64, u32) {
    let (block, _, there) = sizes(export);
    let length = u32::try_from(there.min(u64::from(block.max(512)))).unwrap_or(block);
    (there - u64::from(length), length)
}

fn request(cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(28);
    bytes.extend(REQUEST_MAGIC.to_be_bytes());
    bytes.extend(0_u16.to_be_bytes());
    bytes.extend(CMD_READ.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes
}

/// The error and the cookie of a simple reply.
fn reply_of(bytes: [u8; 16]) -> Result<(u32, u64)> {
    let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = bytes;
    let magic = u32::from_be_bytes([m0, m1, m2, m3]);
    if magic != REPLY_MAGIC {
        let expected = format!("{REPLY_MAGIC:#010x}");
        return Err(violation(
            "simple reply magic",
            format!("{magic:#010x}"),
            &expected,
        ));
    }
    let error = u32::from_be_bytes([e0, e1, e2, e3]);
    Ok((error, u64::from_be_bytes(cookie)))
}

#[cfg(test)]
mod tests {
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
}
