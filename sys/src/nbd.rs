//! NBD's generic netlink family (`include/uapi/linux/nbd-netlink.h`) and its
//! client flags (`include/uapi/linux/nbd.h`). Numbers are in the machine's byte
//! order, and nested attributes carry no `NLA_F_NESTED`.

/// `NBD_GENL_FAMILY_NAME`.
#[doc(alias = "NBD_GENL_FAMILY_NAME")]
pub const FAMILY_NAME: &str = "nbd";
/// `NBD_GENL_VERSION`.
#[doc(alias = "NBD_GENL_VERSION")]
pub const FAMILY_VERSION: u8 = 1;
/// `NBD_GENL_MCAST_GROUP_NAME`: the group of [`CMD_LINK_DEAD`].
#[doc(alias = "NBD_GENL_MCAST_GROUP_NAME")]
pub const MULTICAST_GROUP: &str = "nbd_mc_group";

/// `NBD_CMD_CONNECT`: needs [`ATTR_SOCKETS`] and [`ATTR_SIZE_BYTES`].
#[doc(alias = "NBD_CMD_CONNECT")]
pub const CMD_CONNECT: u8 = 1;
/// `NBD_CMD_DISCONNECT`: needs [`ATTR_INDEX`].
#[doc(alias = "NBD_CMD_DISCONNECT")]
pub const CMD_DISCONNECT: u8 = 2;
/// `NBD_CMD_RECONFIGURE`: needs [`ATTR_INDEX`].
#[doc(alias = "NBD_CMD_RECONFIGURE")]
pub const CMD_RECONFIGURE: u8 = 3;
/// `NBD_CMD_LINK_DEAD`: a message from the kernel, with [`ATTR_INDEX`].
#[doc(alias = "NBD_CMD_LINK_DEAD")]
pub const CMD_LINK_DEAD: u8 = 4;
/// `NBD_CMD_STATUS`.
#[doc(alias = "NBD_CMD_STATUS")]
pub const CMD_STATUS: u8 = 5;

/// `NBD_ATTR_INDEX`, `u32`.
#[doc(alias = "NBD_ATTR_INDEX")]
pub const ATTR_INDEX: u16 = 1;
/// `NBD_ATTR_SIZE_BYTES`, `u64`.
#[doc(alias = "NBD_ATTR_SIZE_BYTES")]
pub const ATTR_SIZE_BYTES: u16 = 2;
/// `NBD_ATTR_BLOCK_SIZE_BYTES`, `u64`.
#[doc(alias = "NBD_ATTR_BLOCK_SIZE_BYTES")]
pub const ATTR_BLOCK_SIZE_BYTES: u16 = 3;
/// `NBD_ATTR_TIMEOUT`, `u64` in seconds.
#[doc(alias = "NBD_ATTR_TIMEOUT")]
pub const ATTR_TIMEOUT: u16 = 4;
/// `NBD_ATTR_SERVER_FLAGS`, `u64`: the protocol's transmission flags.
#[doc(alias = "NBD_ATTR_SERVER_FLAGS")]
pub const ATTR_SERVER_FLAGS: u16 = 5;
/// `NBD_ATTR_CLIENT_FLAGS`, `u64`: [`ClientFlags`].
#[doc(alias = "NBD_ATTR_CLIENT_FLAGS")]
pub const ATTR_CLIENT_FLAGS: u16 = 6;
/// `NBD_ATTR_SOCKETS`, a nest of [`SOCK_ITEM`].
#[doc(alias = "NBD_ATTR_SOCKETS")]
pub const ATTR_SOCKETS: u16 = 7;
/// `NBD_ATTR_DEAD_CONN_TIMEOUT`, `u64` in seconds.
#[doc(alias = "NBD_ATTR_DEAD_CONN_TIMEOUT")]
pub const ATTR_DEAD_CONN_TIMEOUT: u16 = 8;
/// `NBD_ATTR_DEVICE_LIST`, a nest of [`DEVICE_ITEM`].
#[doc(alias = "NBD_ATTR_DEVICE_LIST")]
pub const ATTR_DEVICE_LIST: u16 = 9;
/// `NBD_ATTR_BACKEND_IDENTIFIER`, a string. Linux 5.14.
#[doc(alias = "NBD_ATTR_BACKEND_IDENTIFIER")]
pub const ATTR_BACKEND_IDENTIFIER: u16 = 10;

/// `NBD_SOCK_ITEM`, a nest.
#[doc(alias = "NBD_SOCK_ITEM")]
pub const SOCK_ITEM: u16 = 1;
/// `NBD_SOCK_FD`, `u32`: a descriptor of the sending process.
#[doc(alias = "NBD_SOCK_FD")]
pub const SOCK_FD: u16 = 1;

/// `NBD_DEVICE_ITEM`, a nest.
#[doc(alias = "NBD_DEVICE_ITEM")]
pub const DEVICE_ITEM: u16 = 1;
/// `NBD_DEVICE_INDEX`, `u32`.
#[doc(alias = "NBD_DEVICE_INDEX")]
pub const DEVICE_INDEX: u16 = 1;
/// `NBD_DEVICE_CONNECTED`, `u8`.
#[doc(alias = "NBD_DEVICE_CONNECTED")]
pub const DEVICE_CONNECTED: u16 = 2;

bitflags::bitflags! {
    /// What the kernel does when the device is disconnected or closed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct ClientFlags: u64 {
        /// `NBD_CFLAG_DESTROY_ON_DISCONNECT`: a disconnect also removes the
        /// device and its index.
        #[doc(alias = "NBD_CFLAG_DESTROY_ON_DISCONNECT")]
        const DESTROY_ON_DISCONNECT = 1 << 0;
        /// `NBD_CFLAG_DISCONNECT_ON_CLOSE`: the last close disconnects, even a
        /// close by udev.
        #[doc(alias = "NBD_CFLAG_DISCONNECT_ON_CLOSE")]
        const DISCONNECT_ON_CLOSE = 1 << 1;
    }
}
