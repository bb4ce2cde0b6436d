//! Parses the messages that come back for one request.

use netlink_packet_core::{
    DecodeError, Emitable, ErrorMessage, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLMSG_ALIGNTO,
    NetlinkBuffer, NetlinkHeader, NetlinkMessage, NetlinkPayload, NlasIterator,
    ParseableParametrized,
};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};
use nix::errno::Errno;

use crate::error::{Error, ErrorKind, Result};

/// The generic part of a message, its attributes still encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Payload {
    pub(crate) command: u8,
    pub(crate) version: u8,
    pub(crate) attributes: Vec<u8>,
}

impl GenlFamily for Payload {
    // Each request has the name beside it: this type serves every family.
    fn family_name() -> &'static str {
        ""
    }

    fn command(&self) -> u8 {
        self.command
    }

    fn version(&self) -> u8 {
        self.version
    }
}

impl Emitable for Payload {
    fn buffer_len(&self) -> usize {
        self.attributes.len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.attributes);
    }
}

impl ParseableParametrized<[u8], GenlHeader> for Payload {
    fn parse_with_param(bytes: &[u8], header: GenlHeader) -> Result<Self, DecodeError> {
        Ok(Self {
            command: header.cmd,
            version: header.version,
            attributes: bytes.to_vec(),
        })
    }
}

/// One request that is not answered yet.
pub(super) struct Conversation {
    family: u16,
    sequence: u32,
    answers: Vec<Payload>,
    foreign_messages: u32,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The acknowledgement is still to come.
    Open,
    /// The kernel has acknowledged.
    Done(Vec<Payload>),
}

impl Conversation {
    pub(super) fn new(family: u16, sequence: u32) -> Self {
        Self {
            family,
            sequence,
            answers: Vec::new(),
            foreign_messages: 0,
        }
    }

    /// Reads one datagram, which may hold several messages.
    ///
    /// # Errors
    /// The kernel's refusal; `Io` if the bytes are no netlink messages.
    pub(super) fn take(&mut self, datagram: &[u8]) -> Result<Progress> {
        let mut rest = datagram;
        while !rest.is_empty() {
            let message = NetlinkBuffer::new_checked(rest).map_err(malformed)?;
            let sequence = message.sequence_number();
            let length = usize::try_from(message.length()).unwrap_or(usize::MAX);
            let Some(bytes) = rest.get(..length) else {
                return Err(Error::new(
                    ErrorKind::Io,
                    "a netlink message of false length",
                ));
            };
            // The last message's padding may be missing.
            let padded = length.next_multiple_of(usize::from(NLMSG_ALIGNTO));
            rest = rest.get(padded..).unwrap_or_default();
            if sequence != self.sequence {
                self.pass_over();
                continue;
            }
            let message = NetlinkMessage::<GenlMessage<Payload>>::deserialize(bytes);
            let (header, payload) = message.map_err(malformed)?.into_parts();
            match payload {
                NetlinkPayload::InnerMessage(answer) if header.message_type == self.family => {
                    self.answers.push(answer.into_parts().1);
                }
                NetlinkPayload::Error(answer) => {
                    let answers = std::mem::take(&mut self.answers);
                    return acknowledged(header, &answer).map(|()| Progress::Done(answers));
                }
                NetlinkPayload::Overrun(_) => {
                    return Err(Error::new(ErrorKind::Io, "the kernel's answer was lost"));
                }
                _ => self.pass_over(),
            }
        }
        Ok(Progress::Open)
    }

    fn pass_over(&mut self) {
        self.foreign_messages += 1;
        let foreign_messages = self.foreign_messages;
        tracing::debug!(
            foreign_messages,
            "a netlink message that answers another request"
        );
    }
}

fn malformed(error: DecodeError) -> Error {
    Error::new(ErrorKind::Io, "the kernel's answer cannot be read").caused_by(error)
}

fn acknowledged(header: NetlinkHeader, answer: &ErrorMessage) -> Result<()> {
    let Some(code) = answer.code else {
        return Ok(());
    };
    let errno = Errno::from_raw(code.get().saturating_neg());
    let words = explanation(header.flags, &answer.header);
    let words = words.map_or_else(String::new, |words| format!(" (in its words: {words})"));
    Err(Error::of_errno(
        &format!("the kernel refused{words}"),
        errno,
    ))
}

/// The text of the extended acknowledgement (`include/uapi/linux/netlink.h`,
/// `enum nlmsgerr_attrs`). `echo` holds our request, whole or only its header,
/// and then the attributes.
fn explanation(flags: u16, echo: &[u8]) -> Option<String> {
    /// `NLMSGERR_ATTR_MSG`.
    const MESSAGE: u16 = 1;
    const HEADER: usize = 16;
    if flags & NLM_F_ACK_TLVS == 0 {
        return None;
    }
    let request = if flags & NLM_F_CAPPED == 0 {
        let length = echo.first_chunk().copied().map(u32::from_ne_bytes)?;
        usize::try_from(length)
            .ok()?
            .checked_next_multiple_of(usize::from(NLMSG_ALIGNTO))?
    } else {
        HEADER
    };
    let attributes = echo.get(request..)?;
    let text = NlasIterator::new(attributes)
        .map_while(Result::ok)
        .find(|attribute| attribute.kind() == MESSAGE)
        .map(|attribute| String::from_utf8_lossy(attribute.value()).into_owned())?;
    let printable: String = text.chars().filter(|c| !c.is_control()).collect();
    (!printable.is_empty()).then_some(printable)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FAMILY: u16 = 28;

    fn message(kind: u16, flags: u16, sequence: u32, content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(16 + content.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend(77_u32.to_ne_bytes());
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn ack(flags: u16, sequence: u32, code: i32, rest: &[u8]) -> Vec<u8> {
        let content = [&code.to_ne_bytes(), rest].concat();
        message(2, flags, sequence, &content)
    }

    #[test]
    fn answers_are_collected_up_to_the_acknowledgement() {
        let mut conversation = Conversation::new(FAMILY, 5);
        let answer = message(FAMILY, 0, 5, &[1, 1, 0, 0, 8, 0, 1, 0, 3, 0, 0, 0]);
        assert_eq!(conversation.take(&answer).unwrap(), Progress::Open);
        let done = conversation.take(&ack(0, 5, 0, &[0; 16])).unwrap();
        let payload = Payload {
            command: 1,
            version: 1,
            attributes: vec![8, 0, 1, 0, 3, 0, 0, 0],
        };
        assert_eq!(done, Progress::Done(vec![payload]));
    }

    #[test]
    fn both_may_come_in_one_datagram() {
        let both = [message(FAMILY, 0, 5, &[1, 1, 0, 0]), ack(0, 5, 0, &[0; 16])].concat();
        let done = Conversation::new(FAMILY, 5).take(&both).unwrap();
        assert!(matches!(done, Progress::Done(answers) if answers.len() == 1));
    }

    #[test]
    fn what_answers_another_request_is_passed_over() {
        let mut conversation = Conversation::new(FAMILY, 5);
        // Another sequence number, also on an error and on a meaningless
        // message; another family under our sequence number.
        for stranger in [
            message(FAMILY, 0, 4, &[1, 1, 0, 0]),
            ack(0, 4, -22, &[0; 16]),
            message(FAMILY, 0, 4, &[1]),
            message(FAMILY + 1, 0, 5, &[1, 1, 0, 0]),
            message(1, 0, 5, &[]),
        ] {
            assert_eq!(conversation.take(&stranger).unwrap(), Progress::Open);
        }
        let done = conversation.take(&ack(0, 5, 0, &[0; 16])).unwrap();
        assert_eq!(done, Progress::Done(Vec::new()));
        assert_eq!(conversation.foreign_messages, 5);
    }

    #[test]
    fn a_refusal_carries_the_errno_and_the_kernels_own_words() {
        let words = attribute(1, b"Unsupported attribute\0");
        let capped = [vec![0; 16], attribute(2, &[20, 0, 0, 0]), words.clone()].concat();
        let mut request = message(FAMILY, 0, 5, &[9; 24]);
        request.extend(words);
        for (flags, rest) in [
            (NLM_F_CAPPED | NLM_F_ACK_TLVS, capped),
            (NLM_F_ACK_TLVS, request),
        ] {
            let refusal = ack(flags, 5, -22, &rest);
            let error = Conversation::new(FAMILY, 5).take(&refusal).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused);
            assert_eq!(error.errno(), Some(22));
            assert!(
                error.to_string().contains("Unsupported attribute"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_length_beyond_the_datagram_is_an_error() {
        let mut short = message(FAMILY, 0, 5, &[1, 1, 0, 0]);
        short.truncate(18);
        let error = Conversation::new(FAMILY, 5).take(&short).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Conversation::new(FAMILY, 5).take(&bytes);
        }

        #[test]
        fn no_refusal_makes_it_panic(
            flags: u16,
            code: i32,
            rest in proptest::collection::vec(any::<u8>(), 0..80),
        ) {
            let _ = Conversation::new(FAMILY, 5).take(&ack(flags, 5, code, &rest));
        }
    }
}
