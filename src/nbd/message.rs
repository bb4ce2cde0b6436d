//! Encodes and decodes messages of NBD's netlink family.

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, Nla, NlaBuffer, NlasIterator, parse_string, parse_u8,
    parse_u32, parse_u64,
};

use lunbd_sys::nbd as abi;
pub use lunbd_sys::nbd::ClientFlags;

/// One message of the family, to the kernel or from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// `NBD_CMD_*`.
    pub command: u8,
    /// The attributes, in their order in the message.
    pub attributes: Vec<Attribute>,
}

/// One attribute. Unknown flags and kinds are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attribute {
    /// The device.
    Index(u32),
    /// The export's size in bytes.
    Size(u64),
    /// The device's logical block size in bytes.
    BlockSize(u64),
    /// How long one request may take, in seconds; 0 sets no limit.
    Timeout(u64),
    /// The transmission flags that the server announced for the export.
    ServerFlags(u64),
    /// What the kernel does when the device is disconnected or closed.
    ClientFlags(ClientFlags),
    /// The sender's file descriptors.
    Sockets(Vec<u32>),
    /// How long requests wait for a new connection, in seconds; with 0 they do
    /// not wait.
    DeadConnTimeout(u64),
    /// The answer to a status request.
    Devices(Vec<DeviceStatus>),
    /// The device's name, which survives restarts.
    BackendId(String),
    /// Any other attribute: its kind and its value.
    Other(u16, Vec<u8>),
}

/// The kernel's answer to a status request about one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceStatus {
    /// The device.
    pub index: u32,
    /// Whether it is configured. This does not mean that it works: it is also
    /// true of a device that a process merely has open, and of one whose
    /// connections are all dead (`drivers/block/nbd.c`, `populate_nbd_status`).
    pub connected: bool,
}

/// The error for bytes that are no message of the family.
#[derive(Debug, thiserror::Error)]
#[error("no message of the NBD family: {0}")]
pub struct MalformedMessage(DecodeError);

impl Message {
    /// The attributes, as they follow the generic netlink header. None of them
    /// may be longer than 64 KiB, which is the limit of an attribute's length
    /// field.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let attributes = self.attributes.as_slice();
        let mut bytes = vec![0; attributes.buffer_len()];
        attributes.emit(&mut bytes);
        bytes
    }

    /// Decodes what [`encode`](Self::encode) or the kernel encodes.
    ///
    /// # Errors
    /// [`MalformedMessage`] if a length is false, or an attribute is too short
    /// for its kind.
    pub fn decode(command: u8, bytes: &[u8]) -> Result<Self, MalformedMessage> {
        let attributes = NlasIterator::new(bytes)
            .map(|attribute| Attribute::decode(&attribute?))
            .collect::<Result<_, _>>();
        Ok(Self {
            command,
            attributes: attributes.map_err(MalformedMessage)?,
        })
    }
}

/// The length of a nested item with one attribute of four bytes.
const SOCKET_ITEM: usize = 12;
/// The length of an item with two attributes. The second's single byte is
/// padded.
const DEVICE_ITEM: usize = 20;

impl Attribute {
    fn decode(attribute: &NlaBuffer<&[u8]>) -> Result<Self, DecodeError> {
        let value = attribute.value();
        Ok(match attribute.kind() {
            abi::ATTR_INDEX => Self::Index(parse_u32(value)?),
            abi::ATTR_SIZE_BYTES => Self::Size(parse_u64(value)?),
            abi::ATTR_BLOCK_SIZE_BYTES => Self::BlockSize(parse_u64(value)?),
            abi::ATTR_TIMEOUT => Self::Timeout(parse_u64(value)?),
            abi::ATTR_SERVER_FLAGS => Self::ServerFlags(parse_u64(value)?),
            abi::ATTR_CLIENT_FLAGS => {
                Self::ClientFlags(ClientFlags::from_bits_retain(parse_u64(value)?))
            }
            abi::ATTR_SOCKETS => Self::Sockets(decode_items(value, decode_socket)?),
            abi::ATTR_DEAD_CONN_TIMEOUT => Self::DeadConnTimeout(parse_u64(value)?),
            abi::ATTR_DEVICE_LIST => Self::Devices(decode_items(value, decode_device)?),
            abi::ATTR_BACKEND_IDENTIFIER => Self::BackendId(parse_string(value)?),
            kind => Self::Other(kind, value.to_vec()),
        })
    }
}

impl Nla for Attribute {
    fn kind(&self) -> u16 {
        match self {
            Self::Index(_) => abi::ATTR_INDEX,
            Self::Size(_) => abi::ATTR_SIZE_BYTES,
            Self::BlockSize(_) => abi::ATTR_BLOCK_SIZE_BYTES,
            Self::Timeout(_) => abi::ATTR_TIMEOUT,
            Self::ServerFlags(_) => abi::ATTR_SERVER_FLAGS,
            Self::ClientFlags(_) => abi::ATTR_CLIENT_FLAGS,
            Self::Sockets(_) => abi::ATTR_SOCKETS,
            Self::DeadConnTimeout(_) => abi::ATTR_DEAD_CONN_TIMEOUT,
            Self::Devices(_) => abi::ATTR_DEVICE_LIST,
            Self::BackendId(_) => abi::ATTR_BACKEND_IDENTIFIER,
            Self::Other(kind, _) => *kind,
        }
    }

    fn value_len(&self) -> usize {
        match self {
            Self::Index(_) => size_of::<u32>(),
            Self::Size(_)
            | Self::BlockSize(_)
            | Self::Timeout(_)
            | Self::ServerFlags(_)
            | Self::ClientFlags(_)
            | Self::DeadConnTimeout(_) => size_of::<u64>(),
            Self::Sockets(sockets) => sockets.len() * SOCKET_ITEM,
            Self::Devices(devices) => devices.len() * DEVICE_ITEM,
            // This counts the NUL at the end.
            Self::BackendId(id) => id.len() + 1,
            Self::Other(_, value) => value.len(),
        }
    }

    fn emit_value(&self, buffer: &mut [u8]) {
        match self {
            Self::Index(number) => buffer.copy_from_slice(&number.to_ne_bytes()),
            Self::Size(number)
            | Self::BlockSize(number)
            | Self::Timeout(number)
            | Self::ServerFlags(number)
            | Self::DeadConnTimeout(number) => buffer.copy_from_slice(&number.to_ne_bytes()),
            Self::ClientFlags(flags) => buffer.copy_from_slice(&flags.bits().to_ne_bytes()),
            Self::Sockets(sockets) => {
                let places = buffer.chunks_exact_mut(SOCKET_ITEM);
                for (place, socket) in places.zip(sockets) {
                    let fd = [DefaultNla::new(abi::SOCK_FD, socket.to_ne_bytes().to_vec())];
                    emit_item(abi::SOCK_ITEM, &fd, place);
                }
            }
            Self::Devices(devices) => {
                let places = buffer.chunks_exact_mut(DEVICE_ITEM);
                for (place, device) in places.zip(devices) {
                    let index = device.index.to_ne_bytes().to_vec();
                    let connected = vec![u8::from(device.connected)];
                    let fields = [
                        DefaultNla::new(abi::DEVICE_INDEX, index),
                        DefaultNla::new(abi::DEVICE_CONNECTED, connected),
                    ];
                    emit_item(abi::DEVICE_ITEM, &fields, place);
                }
            }
            Self::BackendId(id) => {
                let (text, end) = buffer.split_at_mut(id.len());
                text.copy_from_slice(id.as_bytes());
                end.fill(0);
            }
            Self::Other(_, value) => buffer.copy_from_slice(value),
        }
    }
}

fn emit_item(kind: u16, fields: &[DefaultNla], place: &mut [u8]) {
    let mut nest = vec![0; fields.buffer_len()];
    fields.emit(&mut nest);
    DefaultNla::new(kind, nest).emit(place);
}

fn decode_items<T>(
    nest: &[u8],
    decode: impl Fn(&[u8]) -> Result<T, DecodeError>,
) -> Result<Vec<T>, DecodeError> {
    NlasIterator::new(nest)
        .map(|item| decode(item?.value()))
        .collect()
}

fn decode_socket(item: &[u8]) -> Result<u32, DecodeError> {
    let mut socket = None;
    for field in NlasIterator::new(item) {
        let field = field?;
        if field.kind() == abi::SOCK_FD {
            socket = Some(parse_u32(field.value())?);
        }
    }
    socket.ok_or_else(|| "a socket without its descriptor".into())
}

fn decode_device(item: &[u8]) -> Result<DeviceStatus, DecodeError> {
    let (mut index, mut connected) = (None, false);
    for field in NlasIterator::new(item) {
        let field = field?;
        match field.kind() {
            abi::DEVICE_INDEX => index = Some(parse_u32(field.value())?),
            abi::DEVICE_CONNECTED => connected = parse_u8(field.value())? != 0,
            _ => {}
        }
    }
    let index = index.ok_or("a device without its index")?;
    Ok(DeviceStatus { index, connected })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attribute() -> impl Strategy<Value = Attribute> {
        let device = (any::<u32>(), any::<bool>())
            .prop_map(|(index, connected)| DeviceStatus { index, connected });
        prop_oneof![
            any::<u32>().prop_map(Attribute::Index),
            any::<u64>().prop_map(Attribute::Size),
            any::<u64>().prop_map(Attribute::BlockSize),
            any::<u64>().prop_map(Attribute::Timeout),
            any::<u64>().prop_map(Attribute::ServerFlags),
            any::<u64>().prop_map(|f| Attribute::ClientFlags(ClientFlags::from_bits_retain(f))),
            proptest::collection::vec(any::<u32>(), 0..9).prop_map(Attribute::Sockets),
            any::<u64>().prop_map(Attribute::DeadConnTimeout),
            proptest::collection::vec(device, 0..9).prop_map(Attribute::Devices),
            "[ -~]{0,255}".prop_map(Attribute::BackendId),
            (
                11_u16..0x4000,
                proptest::collection::vec(any::<u8>(), 0..20)
            )
                .prop_map(|(kind, value)| Attribute::Other(kind, value)),
        ]
    }

    /// The expected bytes are what the kernel's own macros produce on a
    /// little-endian machine.
    #[cfg(target_endian = "little")]
    #[test]
    fn a_connect_has_the_kernels_layout() {
        let message = Message {
            command: abi::CMD_CONNECT,
            attributes: vec![Attribute::Size(4096), Attribute::Sockets(vec![5, 6])],
        };
        let expected = [
            &[12, 0, 2, 0][..],
            &[0, 16, 0, 0, 0, 0, 0, 0],
            &[28, 0, 7, 0],
            &[12, 0, 1, 0, 8, 0, 1, 0, 5, 0, 0, 0],
            &[12, 0, 1, 0, 8, 0, 1, 0, 6, 0, 0, 0],
        ]
        .concat();
        assert_eq!(message.encode(), expected);
    }

    #[test]
    fn an_attribute_too_short_for_its_kind_is_an_error() {
        for bytes in [
            &[6, 0, 1, 0, 9, 9, 0, 0][..],
            &[8, 0, 1, 0, 9],
            &[3, 0, 1, 0],
        ] {
            assert!(
                Message::decode(abi::CMD_STATUS, bytes).is_err(),
                "{bytes:?}"
            );
        }
        let nest = [12, 0, 7, 0, 8, 0, 1, 0, 4, 0, 9, 0];
        assert!(Message::decode(abi::CMD_CONNECT, &nest).is_err());
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes_to_itself(
            command: u8,
            attributes in proptest::collection::vec(attribute(), 0..12),
        ) {
            let message = Message { command, attributes };
            let decoded = Message::decode(command, &message.encode()).unwrap();
            prop_assert_eq!(decoded, message);
        }

        #[test]
        fn no_bytes_make_it_panic(
            command: u8,
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = Message::decode(command, &bytes);
        }

        #[test]
        fn no_change_to_a_message_makes_it_panic(
            attributes in proptest::collection::vec(attribute(), 1..6),
            place: proptest::sample::Index,
            byte: u8,
        ) {
            let mut bytes = Message { command: 1, attributes }.encode();
            let place = place.index(bytes.len());
            bytes[place] = byte;
            let _ = Message::decode(1, &bytes);
        }
    }
}
