//! NBD: the handshake with a server, and the commands to the kernel's driver. Each call
//! makes one attempt, and lunbd verifies the result by reading it back.
//!
//! The protocol is the NBD project's (`doc/proto.md`): the fixed newstyle
//! handshake, with TLS for `nbds://`, up to the point where the kernel takes the socket
//! over. lunbd never negotiates what the kernel cannot speak: structured replies,
//! metadata contexts, extended headers.
//!
//! # Hazards of the kernel's driver, and how lunbd handles them
//!
//! | hazard (`drivers/block/nbd.c`) | handling |
//! |---|---|
//! | `RECONFIGURE` silently drops a socket if no connection is dead | the socket itself shows whether the kernel took it, and an answered read proves it |
//! | it gives a socket that is offered twice to two slots, whose receivers then read one stream | lunbd offers each connection once; it closes a refused one and dials another |
//! | a resize in the call that reattaches waits for the I/O that waits for it | [`Reconfigure`] carries no size; a separate command resizes the device after it has answered a read |
//! | a command runs inside `sendmsg`, under a lock of all generic netlink | each has a thread of its own and the caller's deadline; the family's id is kept |
//! | `DISCONNECT` blocks on its farewell to a dead peer with a full buffer | lunbd shuts down its end of the connection first |
//! | `DISCONNECT` checks neither mounts nor holders | lunbd holds an exclusive open before it and until it returns |
//! | after its return the device is not free while a process has the node open | lunbd reads `pid`, size, requests in flight and holders until they are gone |
//! | the `change` event of a disconnect comes before `pid` goes | lunbd reads the device again after it |
//! | `STATUS` reports a device as connected that is only open, or whose connection is dead | lunbd proves liveness by a read instead |
//! | `STATUS` of all devices outgrows its message | lunbd lists devices from sysfs |
//! | the kernel does not notice that the peer of an idle connection vanished | keepalive and `TCP_USER_TIMEOUT` on every TCP connection, set to the request timeout if there is one |
//! | a request timeout or a dead-connection timeout of 0 hangs or loses I/O | both have defaults that allow a reconnect, and are always sent |
//! | the dead-connection time runs from the first request after the death | the reported time is its lower bound |
//! | timeouts overflow in the kernel, and stay from an index's last use | clamped, and always sent |
//! | `DISCONNECT_ON_CLOSE` disconnects when udev's own probe closes the device | never set |
//! | the lowest free index is used again at once, with the same DISKSEQ | the backend id names the device; lunbd locks it and the index |
//! | `pid` is a marker and not a living process | it only means "configured" |
//! | a backend id has no limit and is printed into a page | [`BackendId`](crate::id::BackendId): 1 to 255 printable characters |
//! | a socket's own timeouts end an idle connection | a socket that is handed over has none |
//! | our own open before the connect causes `EBUSY` | lunbd opens the node only after it |
//! | block sizes, and sizes that are no multiple, differ by version | lunbd chooses them, and reports the lost tail ([`Geometry`]) |
//! | requests longer than the server takes | lunbd lowers `max_sectors_kb` to the server's maximum |
//! | requests in flight on a connection that dies wait for their timeout | I/O may stand still for as long after a reconnect: [`Timeouts::request`] |

mod adoption;
mod backends;
mod block_size;
mod command;
mod content;
mod device;
mod dial;
mod difference;
mod export;
mod first_bytes;
pub mod handshake;
mod held_socket;
mod known_content;
mod link;
mod link_dead;
mod message;
mod refusal;
mod served;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "nbd/tls_missing.rs"]
mod tls;
mod tls_info;
mod unread;
mod violation;
mod wait;

pub(crate) use adoption::{Adoption, adoption, request_timeout_of, timeouts_that_mark, unmark};
pub(crate) use backends::Backends;
pub use block_size::{BlockSizes, Geometry};
pub use command::{Connect, NewTimeouts, Reconfigure, Timeouts, disconnect, status};
pub(crate) use command::{disconnect_under, set_size};
pub(crate) use content::{
    LENGTH as CONTENT_LENGTH, content_names_differ, describe_content_names, names as content_names,
};
pub use device::{Facts, Hints, NbdDevice, State};
pub use dial::{Connection, dial, discover, list_exports};
pub(crate) use dial::{dial_for_device, give_up_after};
pub use difference::Difference;
pub use export::{Export, ExportFlags};
pub(crate) use first_bytes::{Content, FirstBytes};
pub(crate) use held_socket::duplicate;
pub(crate) use known_content::KnownContent;
pub(crate) use link::{Link, LinkState};
pub use link_dead::{DeadLinks, LinkNotice, LinkWaker, LinkWatch};
pub use message::{Attribute, ClientFlags, DeviceStatus, MalformedMessage, Message};
pub use refusal::Refusal;
#[cfg(test)]
pub(crate) use served::tests::connected;
pub(crate) use served::{QueueFacts, Slots, page_size};
pub(crate) use tls::ciphers_of_kernel;
pub use tls_info::{ServerCertificate, TlsCipher, TlsInfo, TlsVersion};
pub(crate) use wait::{wait_until_closed, wait_until_free};
