//! The iSCSI PDUs (RFC 7143, 11) that login, discovery and logout need. The functions
//! encode and decode without I/O.
//!
//! A PDU is a header of 48 bytes, additional headers (unused here and skipped), and a data
//! segment padded to four bytes.

mod request;
mod response;

use std::fmt;

pub use request::{LoginRequest, LogoutRequest, NopOut, TextRequest};
pub use response::{
    AsyncMessage, LoginResponse, LogoutResponse, NopIn, Reject, Response, TextResponse,
};

use super::violation;
use crate::error::Result;

/// The length of a header in bytes.
pub const HEADER: usize = 48;
/// The tag that means no task or no transfer.
pub const NO_TAG: u32 = 0xffff_ffff;
/// The longest data segment in bytes before a limit is declared, which includes the whole
/// login phase (RFC 7143, 13.12).
pub const DEFAULT_DATA: u32 = 8192;

/// The stage of a login (RFC 7143, 11.12.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LoginStage {
    /// The two sides authenticate.
    Security = 0,
    /// The two sides negotiate the session's parameters.
    Operational = 1,
    /// The login is over.
    FullFeature = 3,
}

impl LoginStage {
    fn of(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::Security),
            1 => Some(Self::Operational),
            3 => Some(Self::FullFeature),
            _ => None,
        }
    }
}

/// The initiator's part of a session's name. If two sessions of one initiator with one
/// portal group have the same ISID, the second ends the first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isid(pub [u8; 6]);

impl fmt::Debug for Isid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// How many bytes follow a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    additional: usize,
    data: usize,
}

impl Lengths {
    /// Reads the lengths from `header`, before anything after it is read.
    ///
    /// # Errors
    /// `Protocol` if the data segment is longer than `limit`, which we declared.
    pub fn decode(header: &[u8; HEADER], limit: u32) -> Result<Self> {
        let data = word(header, 4) & 0x00ff_ffff;
        if data > limit {
            let expected = format!("at most {limit}");
            return Err(violation("DataSegmentLength", data, &expected));
        }
        Ok(Self {
            additional: usize::from(header[4]) * 4,
            data: usize::try_from(data).unwrap_or(0),
        })
    }

    /// The number of bytes after the header, with padding: at most 1,020 more than the
    /// limit and its padding.
    #[must_use]
    pub fn following(self) -> usize {
        self.additional + self.data.next_multiple_of(4)
    }

    /// Removes everything except the data segment from the bytes after the header.
    pub fn keep_data(self, following: &mut Vec<u8>) {
        following.drain(..self.additional.min(following.len()));
        following.truncate(self.data);
    }
}

/// Joins header and data, and fills in the data's length and padding.
fn assemble(mut header: [u8; HEADER], data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes();
    header[5..8].copy_from_slice(&length[1..]);
    let mut pdu = Vec::with_capacity(HEADER + data.len().next_multiple_of(4));
    pdu.extend(header);
    pdu.extend(data);
    pdu.resize(HEADER + data.len().next_multiple_of(4), 0);
    pdu
}

fn put(header: &mut [u8; HEADER], at: usize, word: u32) {
    header[at..at + 4].copy_from_slice(&word.to_be_bytes());
}

fn word(header: &[u8; HEADER], at: usize) -> u32 {
    u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

fn half(header: &[u8; HEADER], at: usize) -> u16 {
    u16::from_be_bytes([header[at], header[at + 1]])
}

fn lun(header: &[u8; HEADER]) -> [u8; 8] {
    let mut lun = [0; 8];
    lun.copy_from_slice(&header[8..16]);
    lun
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_data_segment_longer_than_declared_is_refused_by_its_header() {
        let mut header = [0; HEADER];
        put(&mut header, 4, 8193);
        let error = Lengths::decode(&header, DEFAULT_DATA).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.to_string().contains("DataSegmentLength is 8193"));
        assert_eq!(Lengths::decode(&header, 8193).unwrap().following(), 8196);
    }

    #[test]
    fn additional_headers_and_padding_are_no_data() {
        let mut header = [0; HEADER];
        put(&mut header, 4, 2 << 24 | 5);
        let lengths = Lengths::decode(&header, DEFAULT_DATA).unwrap();
        assert_eq!(lengths.following(), 16);
        let mut following = b"AHSAHSAHhello\0\0\0".to_vec();
        lengths.keep_data(&mut following);
        assert_eq!(following, b"hello");
    }

    proptest! {
        #[test]
        fn what_is_assembled_says_its_own_length(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            let pdu = assemble([0; HEADER], &data);
            let (header, following) = pdu.split_first_chunk::<HEADER>().unwrap();
            let lengths = Lengths::decode(header, DEFAULT_DATA).unwrap();
            prop_assert_eq!(lengths.following(), following.len());
            let mut following = following.to_vec();
            lengths.keep_data(&mut following);
            prop_assert_eq!(following, data);
        }
    }
}
