//! Requests from a program to the kernel.

use std::mem::{offset_of, size_of};
use std::os::fd::RawFd;

use super::{DATA, HEADER, Header, HostParam, Param, U, Uevent};

/// `NLM_F_REQUEST` of `include/uapi/linux/netlink.h`.
const REQUEST: u16 = 1;
/// The length of `struct iscsi_hdr`. The kernel accepts no other.
const BHS: usize = 48;

/// `struct msg_bind_conn`: the code uses only its layout.
#[repr(C)]
struct BindConn {
    sid: u32,
    cid: u32,
    transport_eph: u64,
    is_leading: u32,
}

/// `struct msg_stop_conn`: the code uses only its layout.
#[repr(C)]
struct StopConn {
    sid: u32,
    cid: u32,
    conn_handle: u64,
    flag: u32,
}

// All other messages are consecutive words.
const _: () = {
    assert!(offset_of!(BindConn, transport_eph) == 8);
    assert!(offset_of!(BindConn, is_leading) == 16);
    assert!(size_of::<BindConn>() == 24);
    assert!(offset_of!(StopConn, conn_handle) == 8);
    assert!(offset_of!(StopConn, flag) == 16);
    assert!(size_of::<StopConn>() == 24);
};

/// How a connection is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Stop {
    /// `STOP_CONN_TERM`: for good; pending commands fail.
    #[doc(alias = "STOP_CONN_TERM")]
    Terminate = 1,
    /// `STOP_CONN_RECOVER`: until it is bound again; pending commands wait.
    #[doc(alias = "STOP_CONN_RECOVER")]
    Recover = 3,
}

/// One message to the kernel, with the kernel's name for it. `sid` and `cid`
/// number a session and a connection in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// `ISCSI_UEVENT_CREATE_SESSION`. With 0 for the last two fields the driver
    /// chooses.
    #[doc(alias = "ISCSI_UEVENT_CREATE_SESSION")]
    CreateSession {
        /// The number of the first command, which is that of the login.
        initial_cmdsn: u32,
        /// How many commands the session may have in flight: a power of 2.
        cmds_max: u16,
        /// How many of these one unit may have.
        queue_depth: u16,
    },
    /// `ISCSI_UEVENT_CREATE_CONN`.
    #[doc(alias = "ISCSI_UEVENT_CREATE_CONN")]
    CreateConnection {
        /// The session.
        sid: u32,
        /// The new connection.
        cid: u32,
    },
    /// `ISCSI_UEVENT_DESTROY_CONN`.
    #[doc(alias = "ISCSI_UEVENT_DESTROY_CONN")]
    DestroyConnection {
        /// The session.
        sid: u32,
        /// The connection.
        cid: u32,
    },
    /// `ISCSI_UEVENT_BIND_CONN`.
    #[doc(alias = "ISCSI_UEVENT_BIND_CONN")]
    BindConnection {
        /// The session.
        sid: u32,
        /// The connection.
        cid: u32,
        /// A connected TCP socket of the sending process.
        fd: RawFd,
    },
    /// `ISCSI_UEVENT_SET_PARAM`.
    #[doc(alias = "ISCSI_UEVENT_SET_PARAM")]
    SetParam {
        /// The session.
        sid: u32,
        /// The connection.
        cid: u32,
        /// The parameter.
        param: Param,
        /// The value, without a zero byte.
        value: &'a str,
    },
    /// `ISCSI_UEVENT_SET_HOST_PARAM`.
    #[doc(alias = "ISCSI_UEVENT_SET_HOST_PARAM")]
    SetHostParam {
        /// The SCSI host.
        host: u32,
        /// The parameter.
        param: HostParam,
        /// The value, without a zero byte.
        value: &'a str,
    },
    /// `ISCSI_UEVENT_START_CONN`.
    #[doc(alias = "ISCSI_UEVENT_START_CONN")]
    StartConnection {
        /// The session.
        sid: u32,
        /// The connection.
        cid: u32,
    },
    /// `ISCSI_UEVENT_STOP_CONN`.
    #[doc(alias = "ISCSI_UEVENT_STOP_CONN")]
    StopConnection {
        /// The session.
        sid: u32,
        /// The connection.
        cid: u32,
        /// How the connection is stopped.
        stop: Stop,
    },
    /// `ISCSI_UEVENT_SEND_PDU`: the kernel assigns the `CmdSN`.
    #[doc(alias = "ISCSI_UEVENT_SEND_PDU")]
    SendPdu {
        /// The session.
        sid: u32,
        /// The connection.
        cid: u32,
        /// The basic header segment.
        header: &'a [u8; BHS],
        /// The data segment, with its padding.
        data: &'a [u8],
    },
    /// `ISCSI_UEVENT_UNBIND_SESSION`: removes the target and its devices.
    #[doc(alias = "ISCSI_UEVENT_UNBIND_SESSION")]
    UnbindSession {
        /// The session.
        sid: u32,
    },
    /// `ISCSI_UEVENT_DESTROY_SESSION`.
    #[doc(alias = "ISCSI_UEVENT_DESTROY_SESSION")]
    DestroySession {
        /// The session.
        sid: u32,
    },
    /// `ISCSI_UEVENT_DESTROY_SESSION_ASYNC`: Linux 5.7.
    #[doc(alias = "ISCSI_UEVENT_DESTROY_SESSION_ASYNC")]
    DestroySessionAsync {
        /// The session.
        sid: u32,
    },
}

impl Request<'_> {
    /// The message's number in `enum iscsi_uevent_e`.
    #[must_use]
    pub fn number(&self) -> u16 {
        match self {
            Self::CreateSession { .. } => 11,
            Self::DestroySession { .. } => 12,
            Self::CreateConnection { .. } => 13,
            Self::DestroyConnection { .. } => 14,
            Self::BindConnection { .. } => 15,
            Self::SetParam { .. } => 16,
            Self::StartConnection { .. } => 17,
            Self::StopConnection { .. } => 18,
            Self::SendPdu { .. } => 19,
            Self::SetHostParam { .. } => 26,
            Self::UnbindSession { .. } => 27,
            Self::DestroySessionAsync { .. } => 43,
        }
    }

    /// The whole message, for the transport with this handle.
    #[must_use]
    pub fn encode(&self, transport_handle: u64) -> Vec<u8> {
        let mut message = vec![0; DATA];
        match *self {
            Self::SetParam { value, .. } | Self::SetHostParam { value, .. } => {
                message.extend(value.as_bytes());
                message.push(0);
            }
            Self::SendPdu { header, data, .. } => {
                message.extend(header);
                message.extend(data);
            }
            _ => {}
        }
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(place) = message.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        put(offset_of!(Header, kind), &self.number().to_ne_bytes());
        put(offset_of!(Header, flags), &REQUEST.to_ne_bytes());
        let kind = u32::from(self.number());
        put(HEADER + offset_of!(Uevent, kind), &kind.to_ne_bytes());
        let handle = HEADER + offset_of!(Uevent, transport_handle);
        put(handle, &transport_handle.to_ne_bytes());
        put(HEADER + U, &self.union());
        let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
        message[..4].copy_from_slice(&length.to_ne_bytes());
        message
    }

    /// `u` of `struct iscsi_uevent`.
    fn union(&self) -> [u8; 24] {
        let words = |words: [u32; 6]| {
            let mut bytes = [0; 24];
            for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
                place.copy_from_slice(&word.to_ne_bytes());
            }
            bytes
        };
        let length = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        match *self {
            Self::CreateSession {
                initial_cmdsn,
                cmds_max,
                queue_depth,
            } => {
                let mut bytes = words([initial_cmdsn, 0, 0, 0, 0, 0]);
                bytes[4..6].copy_from_slice(&cmds_max.to_ne_bytes());
                bytes[6..8].copy_from_slice(&queue_depth.to_ne_bytes());
                bytes
            }
            Self::DestroySession { sid }
            | Self::DestroySessionAsync { sid }
            | Self::UnbindSession { sid } => words([sid, 0, 0, 0, 0, 0]),
            Self::CreateConnection { sid, cid }
            | Self::DestroyConnection { sid, cid }
            | Self::StartConnection { sid, cid } => words([sid, cid, 0, 0, 0, 0]),
            Self::BindConnection { sid, cid, fd } => {
                let mut bytes = words([sid, cid, 0, 0, 1, 0]);
                // The number of an OwnedFd is never negative.
                let fd = u64::try_from(fd).unwrap_or(u64::MAX);
                bytes[8..16].copy_from_slice(&fd.to_ne_bytes());
                bytes
            }
            Self::SetParam {
                sid,
                cid,
                param,
                value,
            } => words([sid, cid, param as u32, length(value.len() + 1), 0, 0]),
            Self::SetHostParam { host, param, value } => {
                words([host, param as u32, length(value.len() + 1), 0, 0, 0])
            }
            Self::StopConnection { sid, cid, stop } => words([sid, cid, 0, 0, stop as u32, 0]),
            Self::SendPdu { sid, cid, data, .. } => {
                words([sid, cid, length(BHS), length(data.len()), 0, 0])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of a message after its length, in the machine's order.
    fn words(message: &[u8]) -> Vec<u32> {
        let chunks = message.chunks_exact(4);
        chunks
            .map(|word| u32::from_ne_bytes(word.try_into().unwrap_or_default()))
            .collect()
    }

    #[test]
    fn a_message_has_its_number_twice_its_length_and_the_transport() {
        let message = Request::UnbindSession { sid: 5 }.encode(0x0102_0304_0506_0708);
        assert_eq!(message.len(), DATA);
        assert_eq!(words(&message)[0], 72);
        assert_eq!(message[4..8], [27_u16.to_ne_bytes(), [1, 0]].concat());
        assert_eq!(words(&message)[4..6], [27, 0]);
        assert_eq!(message[24..32], 0x0102_0304_0506_0708_u64.to_ne_bytes());
        assert_eq!(words(&message)[8..], [5, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(message.len() - HEADER, super::super::UEVENT);
    }

    #[test]
    fn each_message_has_its_numbers_where_the_kernel_reads_them() {
        let (sid, cid) = (7, 3);
        let of = |down: Request<'_>| words(&down.encode(0))[8..14].to_vec();
        let session = Request::CreateSession {
            initial_cmdsn: 9,
            cmds_max: 128,
            queue_depth: 32,
        };
        assert_eq!(session.encode(0)[36..40], [128, 0, 32, 0]);
        assert_eq!(of(session)[0], 9);
        let bind = Request::BindConnection { sid, cid, fd: 11 };
        assert_eq!(of(bind), [7, 3, 11, 0, 1, 0]);
        let stop = Stop::Recover;
        let stop = Request::StopConnection { sid, cid, stop };
        assert_eq!(of(stop), [7, 3, 0, 0, 3, 0]);
        assert_eq!(
            of(Request::StartConnection { sid, cid }),
            [7, 3, 0, 0, 0, 0]
        );
    }

    #[test]
    fn what_belongs_to_a_message_follows_it_and_is_counted() {
        let (sid, cid) = (7, 3);
        let set = Request::SetParam {
            sid,
            cid,
            param: Param::TargetName,
            value: "iqn.x",
        }
        .encode(0);
        assert_eq!(words(&set[..72])[8..12], [7, 3, 15, 6]);
        assert_eq!(set[72..], *b"iqn.x\0");
        assert_eq!(words(&set[..72])[0], 78);
        let of_host = Request::SetHostParam {
            host: 9,
            param: HostParam::NetworkInterface,
            value: "eth0",
        }
        .encode(0);
        assert_eq!(words(&of_host[..72])[8..12], [9, 2, 5, 0]);
        assert_eq!(of_host[72..], *b"eth0\0");
        let header = [6; BHS];
        let data = b"a=b\0";
        let send = Request::SendPdu {
            sid,
            cid,
            header: &header,
            data,
        }
        .encode(0);
        assert_eq!(words(&send)[8..12], [7, 3, 48, 4]);
        assert_eq!((&send[72..120], &send[120..]), (&header[..], &data[..]));
    }
}
