//! Messages from the kernel.

use std::mem::offset_of;

use super::{DATA, HEADER, Header, R, Uevent, u32_at};

/// `ISCSI_KEVENT_IF_ERROR`: the answer is a refusal.
const IF_ERROR: u32 = 103;

/// The kernel's answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The number of the request.
    pub number: u16,
    /// The errno of a refusal; 0 if the transport accepted the request.
    pub refused: i32,
    /// The words of `r`: the `retcode`, or the numbers of the new object.
    pub result: [u32; 2],
}

impl Answer {
    /// `r.retcode`: 0, or an errno below 0.
    #[must_use]
    pub fn retcode(&self) -> i32 {
        self.result[0].cast_signed()
    }
}

/// An event that the kernel sends on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelEvent<'a> {
    /// `ISCSI_KEVENT_RECV_PDU`: a PDU that the kernel does not handle itself,
    /// such as the answers of a login.
    #[doc(alias = "ISCSI_KEVENT_RECV_PDU")]
    ReceivedPdu {
        /// The session.
        sid: u32,
        /// The connection.
        cid: u32,
        /// Header and data, with any padding. The PDU contains its own length.
        pdu: &'a [u8],
    },
    /// `ISCSI_KEVENT_CONN_ERROR`.
    #[doc(alias = "ISCSI_KEVENT_CONN_ERROR")]
    ConnectionError {
        /// The session.
        sid: u32,
        /// The connection.
        cid: u32,
        /// `enum iscsi_err`: 1020 means closed, 1022 means silent.
        error: u32,
    },
    /// `ISCSI_KEVENT_DESTROY_SESSION`.
    #[doc(alias = "ISCSI_KEVENT_DESTROY_SESSION")]
    SessionDestroyed {
        /// The session.
        sid: u32,
    },
    /// `ISCSI_KEVENT_UNBIND_SESSION`: the session's target and devices are
    /// gone.
    #[doc(alias = "ISCSI_KEVENT_UNBIND_SESSION")]
    SessionUnbound {
        /// The session.
        sid: u32,
    },
    /// `ISCSI_KEVENT_CREATE_SESSION`.
    #[doc(alias = "ISCSI_KEVENT_CREATE_SESSION")]
    SessionCreated {
        /// The session.
        sid: u32,
    },
    /// Another event, by its number.
    Other(u32),
}

/// The messages of a datagram, each with its header. It leaves out a message
/// that is cut short, and all after it.
pub fn messages(datagram: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let length = usize::try_from(u32_at(rest, offset_of!(Header, len))).ok()?;
        if length < HEADER {
            return None;
        }
        let message = rest.get(..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The answer in a message; `None` if the message is none.
#[must_use]
pub fn answer(message: &[u8]) -> Option<Answer> {
    if message.len() < DATA {
        return None;
    }
    let kind = u32_at(message, HEADER + offset_of!(Uevent, kind));
    let number = u32_at(message, offset_of!(Header, kind)).to_ne_bytes();
    let number = u16::from_ne_bytes([number[0], number[1]]);
    let iferror = u32_at(message, HEADER + offset_of!(Uevent, iferror)).cast_signed();
    let refused = match kind {
        // A refusal without an errno is still a refusal.
        IF_ERROR => iferror
            .checked_neg()
            .filter(|errno| *errno > 0)
            .unwrap_or(libc::EIO),
        kind if kind == u32::from(number) => 0,
        _ => return None,
    };
    Some(Answer {
        number,
        refused,
        result: [0, 4].map(|at| u32_at(message, HEADER + R + at)),
    })
}

/// The event in a message of the group; `None` if the message is none.
#[must_use]
pub fn event(message: &[u8]) -> Option<KernelEvent<'_>> {
    let data = message.get(DATA..)?;
    let [first, second, third] = [0, 4, 8].map(|at| u32_at(message, HEADER + R + at));
    Some(match u32_at(message, HEADER + offset_of!(Uevent, kind)) {
        101 => KernelEvent::ReceivedPdu {
            sid: first,
            cid: second,
            pdu: data,
        },
        102 => KernelEvent::ConnectionError {
            sid: first,
            cid: second,
            error: third,
        },
        // struct msg_session_destroyed begins with the host; the other two
        // begin with the session.
        104 => KernelEvent::SessionDestroyed { sid: second },
        105 => KernelEvent::SessionUnbound { sid: first },
        106 => KernelEvent::SessionCreated { sid: first },
        kind => KernelEvent::Other(kind),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::Request;

    fn made(kind: u32, iferror: i32, r: [u32; 3]) -> Vec<u8> {
        let mut message = Request::UnbindSession { sid: 9 }.encode(1);
        message[16..20].copy_from_slice(&kind.to_ne_bytes());
        message[20..24].copy_from_slice(&iferror.to_ne_bytes());
        for (place, word) in message[56..68].chunks_exact_mut(4).zip(r) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        message
    }

    #[test]
    fn an_answer_is_a_result_or_a_refusal_and_nothing_else() {
        let given = answer(&made(27, 0, [3, 4, 0])).map(|answer| (answer.refused, answer.result));
        assert_eq!(given, Some((0, [3, 4])));
        let refused = |iferror| answer(&made(103, iferror, [0; 3])).map(|answer| answer.refused);
        assert_eq!(refused(-16), Some(16));
        assert_eq!(refused(0), Some(libc::EIO));
        assert_eq!(refused(i32::MIN), Some(libc::EIO));
        assert_eq!(answer(&made(102, 0, [0; 3])), None);
        assert_eq!(answer(&made(27, 0, [0; 3])[..71]), None);
        let failed = (-95_i32).cast_unsigned();
        let retcode = answer(&made(27, 0, [failed, 0, 0])).map(|answer| answer.retcode());
        assert_eq!(retcode, Some(-95));
    }

    #[test]
    fn an_event_names_the_session_wherever_the_kernel_puts_it() {
        let of = |kind| made(kind, 0, [1, 2, 3]);
        assert_eq!(
            event(&of(102)),
            Some(KernelEvent::ConnectionError {
                sid: 1,
                cid: 2,
                error: 3
            })
        );
        assert_eq!(
            event(&of(104)),
            Some(KernelEvent::SessionDestroyed { sid: 2 })
        );
        assert_eq!(
            event(&of(105)),
            Some(KernelEvent::SessionUnbound { sid: 1 })
        );
        assert_eq!(
            event(&of(106)),
            Some(KernelEvent::SessionCreated { sid: 1 })
        );
        assert_eq!(event(&of(107)), Some(KernelEvent::Other(107)));
        let mut received = of(101);
        received.extend(b"pdu");
        let (sid, cid) = (1, 2);
        let pdu = &b"pdu"[..];
        assert_eq!(
            event(&received),
            Some(KernelEvent::ReceivedPdu { sid, cid, pdu })
        );
    }

    #[test]
    fn a_datagram_is_read_to_what_is_cut_short_and_no_further() {
        let one = made(27, 0, [0; 3]);
        let mut datagram = [one.clone(), one.clone()].concat();
        assert_eq!(messages(&datagram).count(), 2);
        datagram.pop();
        assert_eq!(messages(&datagram).collect::<Vec<_>>(), [&one[..]]);
        assert_eq!(messages(&[0; 72]).count(), 0);
        assert_eq!(messages(&[]).count(), 0);
    }
}
