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
mod tests;
