//! The encoding of the handshake. All numbers are big-endian.

use bitflags::bitflags;

use crate::error::{Error, ErrorKind, Result};
use crate::nbd::violation::violation;

const NBDMAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const IHAVEOPT: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// An oldstyle server sends this instead of `IHAVEOPT`.
const OLDSTYLE: u64 = 0x0000_4202_8186_1253;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

const INFO_BLOCK_SIZE: u16 = 3;

/// The length of size and flags, after `EXPORT_NAME`, in bytes.
pub(super) const EXPORT_NAME_REPLY: usize = 10;
/// How many zero bytes follow those, unless `NO_ZEROES` was negotiated.
pub(super) const ZEROES: usize = 124;

bitflags! {
    /// The same bits appear in the greeting and in the client's answer.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct HandshakeFlags: u16 {
        const FIXED_NEWSTYLE = 1 << 0;
        const NO_ZEROES = 1 << 1;
    }
}

/// The server's first bytes.
#[derive(Debug, Clone, Copy)]
pub(in crate::nbd) struct Greeting(HandshakeFlags);

impl Greeting {
    pub(super) const LENGTH: usize = 18;

    pub(super) fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self> {
        let mut fields = Fields(bytes);
        let (magic, style) = (fields.u64(), fields.u64());
        let flags = HandshakeFlags::from_bits_truncate(fields.u16());
        if magic != NBDMAGIC {
            return Err(violation("magic", format!("{magic:#018x}"), "NBDMAGIC"));
        }
        let old = match style {
            IHAVEOPT => !flags.contains(HandshakeFlags::FIXED_NEWSTYLE),
            OLDSTYLE => true,
            _ => {
                return Err(violation(
                    "second magic",
                    format!("{style:#018x}"),
                    "IHAVEOPT",
                ));
            }
        };
        if old {
            let message = "the NBD server speaks an older handshake than fixed newstyle";
            return Err(Error::new(ErrorKind::NotSupported, message));
        }
        Ok(Self(flags))
    }

    /// The client's answer: those of the server's flags that are known.
    pub(super) fn client_flags(self) -> [u8; 4] {
        u32::from(self.0.bits()).to_be_bytes()
    }

    /// Whether the server leaves out the 124 bytes after `EXPORT_NAME`.
    pub(super) fn no_zeroes(self) -> bool {
        self.0.contains(HandshakeFlags::NO_ZEROES)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OptionCode {
    ExportName = 1,
    Abort = 2,
    List = 3,
    #[cfg(feature = "tls")]
    StartTls = 5,
    Info = 6,
    Go = 7,
}

/// Encodes an option. `data` is at most a little longer than a name.
pub(super) fn option(code: OptionCode, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(16 + data.len());
    bytes.extend(IHAVEOPT.to_be_bytes());
    bytes.extend((code as u32).to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Encodes `OPT_GO` or `OPT_INFO` for the export `name`. It requests the block sizes,
/// because a server may insist that a client does.
pub(super) fn export_request(code: OptionCode, name: &str) -> Vec<u8> {
    let length = u32::try_from(name.len()).unwrap_or(u32::MAX);
    let mut data = Vec::with_capacity(8 + name.len());
    data.extend(length.to_be_bytes());
    data.extend(name.as_bytes());
    data.extend(1_u16.to_be_bytes());
    data.extend(INFO_BLOCK_SIZE.to_be_bytes());
    option(code, &data)
}

/// The header of each reply to an option.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReplyHeader {
    pub(super) kind: u32,
    pub(super) length: u32,
}

impl ReplyHeader {
    pub(super) const LENGTH: usize = 20;
    pub(super) const ACK: u32 = 1;
    pub(super) const SERVER: u32 = 2;
    pub(super) const INFO: u32 = 3;
    /// No valid reply is longer.
    const LONGEST: u32 = 64 * 1024;

    pub(super) fn decode(bytes: &[u8; Self::LENGTH], to: OptionCode) -> Result<Self> {
        let mut fields = Fields(bytes);
        let (magic, option) = (fields.u64(), fields.u32());
        let (kind, length) = (fields.u32(), fields.u32());
        if magic != REPLY_MAGIC {
            let expected = format!("{REPLY_MAGIC:#018x}");
            return Err(violation(
                "reply magic",
                format!("{magic:#018x}"),
                &expected,
            ));
        }
        if option != to as u32 {
            let expected = format!("{} ({to:?})", to as u32);
            return Err(violation("option of a reply", option, &expected));
        }
        if length > Self::LONGEST {
            return Err(violation("length of a reply", length, "at most 65536"));
        }
        Ok(Self { kind, length })
    }
}

pub(super) fn empty_ack(payload: &[u8]) -> Result<()> {
    if payload.is_empty() {
        return Ok(());
    }
    Err(violation("length of an ACK", payload.len(), "0"))
}

/// The size in bytes and the transmission flags.
pub(super) fn export_name_reply(bytes: &[u8; EXPORT_NAME_REPLY]) -> (u64, u16) {
    let mut fields = Fields(bytes);
    (fields.u64(), fields.u16())
}

/// Reads one field after the other. At the end of the bytes it reads zeroes, so the
/// caller must have checked the length.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk().unwrap_or((&[0; N], &[]));
        self.0 = rest;
        *head
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn greeting(magic: [u8; 8], style: [u8; 8], flags: u16) -> [u8; 18] {
        let bytes = [&magic[..], &style, &flags.to_be_bytes()].concat();
        bytes.try_into().unwrap()
    }

    #[test]
    fn flags_that_are_not_known_are_not_answered() {
        let answer = |flags| {
            let bytes = greeting(*b"NBDMAGIC", *b"IHAVEOPT", flags);
            Greeting::decode(&bytes).unwrap().client_flags()
        };
        assert_eq!(answer(0xffff), [0, 0, 0, 3]);
        assert_eq!(answer(1), [0, 0, 0, 1]);
    }

    #[test]
    fn a_server_of_another_protocol_and_an_old_server_give_different_errors() {
        let error =
            |magic, style, flags| Greeting::decode(&greeting(magic, style, flags)).unwrap_err();
        let http = error(*b"HTTP/1.1", *b" 400 Bad", 0);
        assert_eq!(http.kind(), ErrorKind::Protocol);
        assert!(http.to_string().contains("magic is 0x485454502f312e31"));
        let other = error(*b"NBDMAGIC", *b"IHAVENOT", 1);
        assert_eq!(other.kind(), ErrorKind::Protocol);
        let newstyle = error(*b"NBDMAGIC", *b"IHAVEOPT", 2);
        assert_eq!(newstyle.kind(), ErrorKind::NotSupported);
        let oldstyle = error(*b"NBDMAGIC", [0, 0, 0x42, 2, 0x81, 0x86, 0x12, 0x53], 1);
        assert_eq!(oldstyle.kind(), ErrorKind::NotSupported);
    }

    #[test]
    fn go_and_info_ask_for_the_block_sizes_of_the_export_and_for_nothing_else() {
        for (option, code) in [(OptionCode::Go, 7), (OptionCode::Info, 6)] {
            let mut expected = *b"IHAVEOPT\0\0\0\0\0\0\0\x0a\0\0\0\x02ab\0\x01\0\x03";
            expected[11] = code;
            assert_eq!(export_request(option, "ab"), expected);
        }
        assert_eq!(
            option(OptionCode::List, &[]),
            *b"IHAVEOPT\0\0\0\x03\0\0\0\0"
        );
    }

    fn header(magic: u64, option: u32, kind: u32, length: u32) -> [u8; 20] {
        let words = [option, kind, length].map(u32::to_be_bytes).concat();
        [&magic.to_be_bytes()[..], &words]
            .concat()
            .try_into()
            .unwrap()
    }

    #[test]
    fn the_field_of_a_reply_that_is_wrong_is_named() {
        for (bytes, field) in [
            (header(REPLY_MAGIC + 1, 7, 1, 0), "reply magic"),
            (header(REPLY_MAGIC, 3, 1, 0), "option of a reply"),
            (header(REPLY_MAGIC, 7, 1, 65_537), "length of a reply"),
            (header(REPLY_MAGIC, 7, 1, u32::MAX), "length of a reply"),
        ] {
            let error = ReplyHeader::decode(&bytes, OptionCode::Go).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(field), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_header_within_its_limits_is_read_as_it_was_written(kind: u32, length in 0..=65_536_u32) {
            let bytes = header(REPLY_MAGIC, 3, kind, length);
            let read = ReplyHeader::decode(&bytes, OptionCode::List).unwrap();
            prop_assert_eq!((read.kind, read.length), (kind, length));
        }
    }
}
