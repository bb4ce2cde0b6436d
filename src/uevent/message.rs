//! A kernel uevent as it lies in the receive buffer.

/// A uevent whose fields borrow from the receive buffer, so an event without a
/// waiter is not copied.
///
/// Format (`lib/kobject_uevent.c`): `ACTION@DEVPATH` and a NUL, then each
/// `KEY=VALUE` with a NUL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// `add`, `remove`, `change`, `move`, `online`, `offline`, `bind`, `unbind`.
    pub action: &'a str,
    /// The device's path below `/sys`, from the leading slash.
    pub devpath: &'a str,
    /// The kernel's number of this event.
    pub seqnum: u64,
    properties: &'a [u8],
}

/// Why a datagram is not a uevent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It does not begin with `ACTION@DEVPATH` and a NUL. udev's own messages do
    /// not.
    #[error("no ACTION@DEVPATH in front")]
    Header,
    /// The last property has no NUL at its end.
    #[error("the last property has no end")]
    Unterminated,
    /// `ACTION`, `DEVPATH` or `SEQNUM` is missing or not text.
    #[error("no {0}")]
    Missing(&'static str),
}

impl<'a> Message<'a> {
    /// Parses a datagram of the kernel group.
    pub fn parse(datagram: &'a [u8]) -> Result<Self, Malformed> {
        let end = datagram
            .iter()
            .position(|&byte| byte == 0)
            .ok_or(Malformed::Header)?;
        let (header, properties) = datagram.split_at(end);
        if !header.contains(&b'@') {
            return Err(Malformed::Header);
        }
        if properties.last() != Some(&0) {
            return Err(Malformed::Unterminated);
        }
        let mut message = Self {
            action: "",
            devpath: "",
            seqnum: 0,
            properties,
        };
        let required = |key| message.property(key).ok_or(Malformed::Missing(key));
        let (action, devpath, seqnum) = (
            required("ACTION")?,
            required("DEVPATH")?,
            required("SEQNUM")?,
        );
        message.seqnum = seqnum.parse().map_err(|_| Malformed::Missing("SEQNUM"))?;
        message.action = action;
        message.devpath = devpath;
        Ok(message)
    }

    /// The value of a property; `None` if it is missing or not UTF-8.
    #[must_use]
    pub fn property(&self, key: &str) -> Option<&'a str> {
        self.properties
            .split(|&byte| byte == 0)
            .find_map(|pair| pair.strip_prefix(key.as_bytes())?.strip_prefix(b"="))
            .and_then(|value| std::str::from_utf8(value).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADD: &[u8] = b"add@/devices/a/block/sda\0ACTION=add\0DEVPATH=/devices/a/block/sda\0\
        SUBSYSTEM=block\0MAJOR=8\0SEQNUM=4711\0";

    #[test]
    fn the_kernels_message_is_read_without_a_copy() {
        let message = Message::parse(ADD).unwrap();
        assert_eq!(message.action, "add");
        assert_eq!(message.devpath, "/devices/a/block/sda");
        assert_eq!(message.seqnum, 4711);
        assert_eq!(message.property("MAJOR"), Some("8"));
        assert_eq!(message.property("MAJ"), None);
        assert!(ADD.as_ptr_range().contains(&message.devpath.as_ptr()));
    }

    #[test]
    fn a_datagram_that_is_no_uevent_has_its_reason_in_the_error() {
        let whole = ADD.len();
        assert_eq!(Message::parse(b""), Err(Malformed::Header));
        assert_eq!(
            Message::parse(b"libudev\0\xfe\xed\xca\xfe"),
            Err(Malformed::Header)
        );
        assert_eq!(
            Message::parse(&ADD[..whole - 1]),
            Err(Malformed::Unterminated)
        );
        assert_eq!(
            Message::parse(b"add@/x\0ACTION=add\0DEVPATH=/x\0"),
            Err(Malformed::Missing("SEQNUM"))
        );
    }

    proptest::proptest! {
        #[test]
        fn no_datagram_panics(bytes: Vec<u8>) {
            let _ = Message::parse(&bytes);
        }

        #[test]
        fn a_uevent_with_a_byte_changed_does_not_panic(at in 0..ADD.len(), byte: u8) {
            let mut datagram = ADD.to_vec();
            datagram[at] = byte;
            let _ = Message::parse(&datagram);
        }
    }
}
