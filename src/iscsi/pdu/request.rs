//! The PDUs that an initiator sends. All are immediate, so they use up no `CmdSN`.

use super::{HEADER, Isid, LoginStage, NO_TAG, assemble, put};

const IMMEDIATE: u8 = 0x40;
/// The F bit, or T in a login: the last PDU of its kind.
const FINAL: u8 = 0x80;

/// One request of a login, of protocol version 0.
#[derive(Debug, Clone, Copy)]
pub struct LoginRequest<'a> {
    /// The stage that the request belongs to.
    pub stage: LoginStage,
    /// The stage that the initiator asks to enter next.
    pub transit: Option<LoginStage>,
    /// The initiator's part of the session's name.
    pub isid: Isid,
    /// The target's part of the session's name; 0 for a new session.
    pub tsih: u16,
    /// The task's tag, which is the same in the whole login.
    pub tag: u32,
    /// The number of the connection.
    pub cid: u16,
    /// The `CmdSN` of the session's first command.
    pub cmd_sn: u32,
    /// The `StatSN` that is expected next.
    pub exp_stat_sn: u32,
    /// Keys and values, at most 8,192 bytes.
    pub text: &'a [u8],
}

impl LoginRequest<'_> {
    /// The whole PDU.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut header = [0; HEADER];
        header[0] = IMMEDIATE | 0x03;
        header[1] = (self.stage as u8) << 2;
        if let Some(next) = self.transit {
            header[1] |= FINAL | next as u8;
        }
        header[8..14].copy_from_slice(&self.isid.0);
        header[14..16].copy_from_slice(&self.tsih.to_be_bytes());
        put(&mut header, 16, self.tag);
        header[20..22].copy_from_slice(&self.cid.to_be_bytes());
        put(&mut header, 24, self.cmd_sn);
        put(&mut header, 28, self.exp_stat_sn);
        assemble(header, self.text)
    }
}

/// A text request, whole in one PDU.
#[derive(Debug, Clone, Copy)]
pub struct TextRequest<'a> {
    /// The task's tag, which is the same in a request and in its continuations.
    pub tag: u32,
    /// The value from the response to continue; [`NO_TAG`] in a first request.
    pub transfer_tag: u32,
    /// The value from the response to continue; else 0.
    pub lun: [u8; 8],
    /// The `CmdSN` of the session's next command.
    pub cmd_sn: u32,
    /// The `StatSN` that is expected next.
    pub exp_stat_sn: u32,
    /// Keys and values.
    pub text: &'a [u8],
}

impl TextRequest<'_> {
    /// The whole PDU.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut header = [0; HEADER];
        header[0] = IMMEDIATE | 0x04;
        header[1] = FINAL;
        header[8..16].copy_from_slice(&self.lun);
        put(&mut header, 16, self.tag);
        put(&mut header, 20, self.transfer_tag);
        put(&mut header, 24, self.cmd_sn);
        put(&mut header, 28, self.exp_stat_sn);
        assemble(header, self.text)
    }
}

/// The request to close the session.
#[derive(Debug, Clone, Copy)]
pub struct LogoutRequest {
    /// The tag of the logout's task.
    pub tag: u32,
    /// The `CmdSN` of the session's next command.
    pub cmd_sn: u32,
    /// The `StatSN` that is expected next.
    pub exp_stat_sn: u32,
}

impl LogoutRequest {
    /// The whole PDU.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut header = [0; HEADER];
        header[0] = IMMEDIATE | 0x06;
        // The reason code 0 closes the session.
        header[1] = FINAL;
        put(&mut header, 16, self.tag);
        put(&mut header, 24, self.cmd_sn);
        put(&mut header, 28, self.exp_stat_sn);
        assemble(header, &[])
    }
}

/// The answer to a target's ping.
#[derive(Debug, Clone, Copy)]
pub struct NopOut {
    /// The value from the ping.
    pub lun: [u8; 8],
    /// The value from the ping.
    pub transfer_tag: u32,
    /// The `CmdSN` of the session's next command.
    pub cmd_sn: u32,
    /// The `StatSN` that is expected next.
    pub exp_stat_sn: u32,
}

impl NopOut {
    /// The whole PDU.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut header = [0; HEADER];
        header[0] = IMMEDIATE;
        header[1] = FINAL;
        header[8..16].copy_from_slice(&self.lun);
        put(&mut header, 16, NO_TAG);
        put(&mut header, 20, self.transfer_tag);
        put(&mut header, 24, self.cmd_sn);
        put(&mut header, 28, self.exp_stat_sn);
        assemble(header, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_request_is_the_bytes_of_the_rfc() {
        let pdu = LoginRequest {
            stage: LoginStage::Operational,
            transit: Some(LoginStage::FullFeature),
            isid: Isid([0x80, 1, 2, 3, 4, 5]),
            tsih: 0x0607,
            tag: 0x1011_1213,
            cid: 0x1415,
            cmd_sn: 0x1819_1a1b,
            exp_stat_sn: 0x1c1d_1e1f,
            text: b"a=b\0c",
        }
        .encode();
        let mut expected = vec![0x43, 0x87, 0, 0, 0, 0, 0, 5, 0x80, 1, 2, 3, 4, 5, 6, 7];
        expected.extend([0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0, 0]);
        expected.extend([0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f]);
        expected.extend([0; 16]);
        expected.extend(b"a=b\0c\0\0\0");
        assert_eq!(pdu, expected);
    }

    #[test]
    fn the_others_are_immediate_and_final_with_their_numbers_in_place() {
        let lun = [1, 2, 3, 4, 5, 6, 7, 8];
        let (tag, transfer_tag, cmd_sn, exp_stat_sn) = (0x0a, 0x0b, 0x0c, 0x0d);
        let text = TextRequest {
            tag,
            transfer_tag,
            lun,
            cmd_sn,
            exp_stat_sn,
            text: b"x",
        };
        let logout = LogoutRequest {
            tag,
            cmd_sn,
            exp_stat_sn,
        };
        let nop = NopOut {
            lun,
            transfer_tag,
            cmd_sn,
            exp_stat_sn,
        };
        let words = |pdu: &[u8]| [16, 20, 24, 28].map(|at| pdu[at + 3]);
        let pdu = text.encode();
        assert_eq!(
            (&pdu[..8], pdu.len()),
            (&[0x44, 0x80, 0, 0, 0, 0, 0, 1][..], 52)
        );
        assert_eq!((&pdu[8..16], words(&pdu)), (&lun[..], [10, 11, 12, 13]));
        let pdu = logout.encode();
        assert_eq!(pdu[..8], [0x46, 0x80, 0, 0, 0, 0, 0, 0]);
        assert_eq!(words(&pdu), [10, 0, 12, 13]);
        let pdu = nop.encode();
        assert_eq!(pdu[..8], [0x40, 0x80, 0, 0, 0, 0, 0, 0]);
        assert_eq!(pdu[16..20], [0xff; 4]);
        assert_eq!((&pdu[8..16], words(&pdu)), (&lun[..], [255, 11, 12, 13]));
    }
}
