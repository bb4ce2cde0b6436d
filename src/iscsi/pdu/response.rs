//! The PDUs that a target sends.

use super::{HEADER, Isid, LoginStage, NO_TAG, half, lun, word};
use crate::error::Result;
use crate::iscsi::violation;

const FINAL: u8 = 0x80;
const CONTINUE: u8 = 0x40;

/// A PDU from a target, without its data segment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Response {
    /// The answer to a login request.
    Login(LoginResponse),
    /// The answer to a text request.
    Text(TextResponse),
    /// The answer to a logout request.
    Logout(LogoutResponse),
    /// The target does not accept a PDU of ours.
    Reject(Reject),
    /// A ping.
    NopIn(NopIn),
    /// An asynchronous message of the target.
    Async(AsyncMessage),
}

/// The fields of a login response (RFC 7143, 11.13).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoginResponse {
    /// The stage that the response belongs to.
    pub stage: LoginStage,
    /// The stage that follows at once.
    pub transit: Option<LoginStage>,
    /// Whether the text continues in the next response.
    pub continues: bool,
    /// The active version of the protocol.
    pub version: u8,
    /// The value from the request.
    pub isid: Isid,
    /// The target's part of the session's name.
    pub tsih: u16,
    /// The value from the request.
    pub tag: u32,
    /// The `StatSN` of this status.
    pub stat_sn: u32,
    /// The class of the result: 0 is success.
    pub status_class: u8,
    /// The detail of the result.
    pub status_detail: u8,
}

/// The fields of a text response (RFC 7143, 11.11).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextResponse {
    /// Whether this is the last response.
    pub is_final: bool,
    /// Whether the text continues in the next response, possibly in the middle of a pair.
    pub continues: bool,
    /// The next request must return this value.
    pub lun: [u8; 8],
    /// The value from the request.
    pub tag: u32,
    /// The next request must return this value; it has no meaning in the last response.
    pub transfer_tag: u32,
    /// The `StatSN` of this status.
    pub stat_sn: u32,
}

/// The fields of a logout response (RFC 7143, 11.15).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogoutResponse {
    /// 0 if the session is closed.
    pub response: u8,
    /// The value from the request.
    pub tag: u32,
}

/// The fields of a reject (RFC 7143, 11.17).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reject {
    /// The reason code.
    pub reason: u8,
}

/// The fields of a ping (RFC 7143, 11.19).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NopIn {
    /// The answer must return this value.
    pub lun: [u8; 8],
    /// The answer must return this value; [`NO_TAG`] if the target wants no answer.
    pub transfer_tag: u32,
    /// The `StatSN` of the last status, or of the next if the target wants no answer.
    pub stat_sn: u32,
}

/// The fields of an asynchronous message (RFC 7143, 11.9).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncMessage {
    /// The event: 1 asks for a logout; 2 and 3 drop connections; 4 asks for a negotiation.
    pub event: u8,
    /// Their meaning depends on the event: the number of a dropped connection; how many
    /// seconds to wait before a reconnect; how many seconds are left for the requested
    /// action.
    pub parameters: [u16; 3],
}

impl Response {
    /// Decodes a header.
    ///
    /// # Errors
    /// `Protocol`, naming the field.
    pub fn decode(header: &[u8; HEADER]) -> Result<Self> {
        let flags = header[1];
        let (is_final, continues) = (flags & FINAL != 0, flags & CONTINUE != 0);
        // The target's two top bits of the opcode byte are reserved.
        Ok(match header[0] & 0x3f {
            0x20 => Self::NopIn(NopIn {
                lun: lun(header),
                transfer_tag: word(header, 20),
                stat_sn: word(header, 24),
            }),
            0x23 => Self::Login(LoginResponse::decode(header)?),
            0x24 => {
                let transfer_tag = word(header, 20);
                if is_final && continues {
                    return Err(violation("C of a text response", 1, "0 where F is 1"));
                }
                // LIO leaves a tag in the last of several responses: only F marks the end.
                if !is_final && transfer_tag == NO_TAG {
                    let expected = "another where F is 0";
                    return Err(violation("Target Transfer Tag", "0xffffffff", expected));
                }
                Self::Text(TextResponse {
                    is_final,
                    continues,
                    lun: lun(header),
                    tag: word(header, 16),
                    transfer_tag,
                    stat_sn: word(header, 24),
                })
            }
            0x26 => Self::Logout(LogoutResponse {
                response: header[2],
                tag: word(header, 16),
            }),
            0x32 => Self::Async(AsyncMessage {
                event: header[36],
                parameters: [38, 40, 42].map(|at| half(header, at)),
            }),
            0x3f => Self::Reject(Reject { reason: header[2] }),
            opcode => {
                let expected = "a response of login, text, logout, NOP, or a reject";
                return Err(violation("opcode", format!("{opcode:#04x}"), expected));
            }
        })
    }

    /// The PDU's name in errors.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Login(_) => "a login response",
            Self::Text(_) => "a text response",
            Self::Logout(_) => "a logout response",
            Self::Reject(_) => "a reject",
            Self::NopIn(_) => "a NOP-In",
            Self::Async(_) => "an asynchronous message",
        }
    }
}

impl LoginResponse {
    fn decode(header: &[u8; HEADER]) -> Result<Self> {
        let flags = header[1];
        let (transits, continues) = (flags & FINAL != 0, flags & CONTINUE != 0);
        let (status_class, status_detail) = (header[36], header[37]);
        let mut isid = [0; 6];
        isid.copy_from_slice(&header[8..14]);
        let mut decoded = Self {
            stage: LoginStage::Security,
            transit: None,
            continues: false,
            version: header[3],
            isid: Isid(isid),
            tsih: half(header, 14),
            tag: word(header, 16),
            stat_sn: word(header, 24),
            status_class,
            status_detail,
        };
        if status_class != 0 {
            // The flags have no meaning then (RFC 7143, 11.13.5).
            return Ok(decoded);
        }
        let current = LoginStage::of(flags >> 2 & 3);
        decoded.stage = current
            .filter(|stage| *stage != LoginStage::FullFeature)
            .ok_or_else(|| violation("CSG", flags >> 2 & 3, "0 or 1"))?;
        if transits {
            if continues {
                return Err(violation("C of a login response", 1, "0 where T is 1"));
            }
            let next = LoginStage::of(flags & 3).filter(|next| *next > decoded.stage);
            let next = next.ok_or_else(|| violation("NSG", flags & 3, "a later stage than CSG"))?;
            decoded.transit = Some(next);
        }
        decoded.continues = continues;
        Ok(decoded)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn header(opcode: u8, flags: u8) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        (header[0], header[1]) = (opcode, flags);
        header
    }

    #[test]
    fn a_login_response_is_read_from_the_places_of_the_rfc() {
        let mut bytes: [u8; HEADER] = std::array::from_fn(|at| u8::try_from(at).unwrap());
        (bytes[0], bytes[1], bytes[36]) = (0x23, 0x87, 0);
        let expected = LoginResponse {
            stage: LoginStage::Operational,
            transit: Some(LoginStage::FullFeature),
            continues: false,
            version: 3,
            isid: Isid([8, 9, 10, 11, 12, 13]),
            tsih: 0x0e0f,
            tag: 0x1011_1213,
            stat_sn: 0x1819_1a1b,
            status_class: 0,
            status_detail: 37,
        };
        assert_eq!(Response::decode(&bytes).unwrap(), Response::Login(expected));
    }

    #[test]
    fn an_asynchronous_message_has_its_event_and_three_parameters() {
        let mut bytes = header(0x32, 0x80);
        (bytes[36], bytes[39], bytes[41]) = (2, 1, 3);
        (bytes[42], bytes[43]) = (1, 4);
        let expected = AsyncMessage {
            event: 2,
            parameters: [1, 3, 260],
        };
        assert_eq!(Response::decode(&bytes).unwrap(), Response::Async(expected));
    }

    #[test]
    fn the_field_that_is_wrong_is_named() {
        let mut more = header(0x24, 0);
        more[20..24].copy_from_slice(&[0xff; 4]);
        let mut both = header(0x24, 0xc0);
        both[20..24].copy_from_slice(&[0xff; 4]);
        for (bytes, field) in [
            (header(0x23, 0x08), "CSG is 2"),
            (header(0x23, 0x0c), "CSG is 3"),
            (header(0x23, 0x82), "NSG is 2"),
            (header(0x23, 0x85), "NSG is 1"),
            (header(0x23, 0x80), "NSG is 0"),
            (header(0x23, 0xc1), "C of a login response"),
            (more, "Target Transfer Tag is 0xffffffff"),
            (both, "C of a text response"),
            (header(0x21, 0x80), "opcode is 0x21"),
            (header(0x00, 0x80), "opcode is 0x00"),
        ] {
            let error = Response::decode(&bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(field), "{error}");
        }
    }

    #[test]
    fn of_a_login_that_failed_only_the_status_counts() {
        let mut bytes = header(0x23, 0xff);
        (bytes[36], bytes[37]) = (2, 1);
        let Response::Login(failed) = Response::decode(&bytes).unwrap() else {
            panic!("no login response");
        };
        assert_eq!((failed.status_class, failed.status_detail), (2, 1));
    }

    proptest! {
        #[test]
        fn no_header_breaks_the_decoder(start: [u8; 32], end: [u8; 16]) {
            let mut header = [0; HEADER];
            header[..32].copy_from_slice(&start);
            header[32..].copy_from_slice(&end);
            let _ = Response::decode(&header);
        }
    }
}
