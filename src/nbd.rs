//! NBD: one server, one device, one attempt, verified by reading back.
//!
//! The protocol is the NBD project's (`doc/proto.md`): the fixed newstyle
//! handshake without TLS, up to the point where the kernel takes the socket
//! over. What the kernel cannot speak is never negotiated: structured replies,
//! metadata contexts, extended headers.
//!
//! # Where the kernel's driver bites, and what is done about it
//!
//! | hazard (`drivers/block/nbd.c`) | here |
//! |---|---|
//! | `RECONFIGURE` drops a socket in silence where no link is dead | the socket itself shows whether it was taken, and a read that comes back is the proof |
//! | it gives a socket that is offered twice to two slots, whose receivers then read one stream | each connection is offered once; what was not taken is closed, and another is dialled |
//! | a resize in the call that reattaches waits for the I/O that waits for it | [`Reconfigure`] carries no size; a device is resized by a command of its own, after it has answered a read |
//! | a command runs inside `sendmsg`, under a lock of all generic netlink | each has a thread of its own and the caller's deadline; the family's id is kept |
//! | `DISCONNECT` says goodbye to a dead peer with a full buffer | our end of the link is shut down first |
//! | `DISCONNECT` looks at neither mounts nor holders | an exclusive open before, held until it has returned |
//! | its return does not mean free while somebody has the node open | `pid`, size, requests in flight and holders are read until they are gone |
//! | the `change` event of a disconnect comes before `pid` goes | the device is looked at again after it |
//! | `STATUS` calls a mere opener, and a dead link, connected | not used to tell life: a read is |
//! | `STATUS` of all devices outgrows its message | devices are listed from sysfs |
//! | a peer that vanished is not noticed on an idle link | keepalive and `TCP_USER_TIMEOUT` on every TCP link, of the request timeout where there is one |
//! | a request timeout or a dead-connection timeout of 0 hangs or loses I/O | both have defaults that heal, and are always sent |
//! | the dead-connection time runs from the first request after the death | the budget that is told is its lower bound |
//! | timeouts overflow in the kernel, and stay from an index's last use | clamped, and always sent |
//! | `DISCONNECT_ON_CLOSE` ends with udev's own probe | never set |
//! | the lowest free index is used again at once, with the same DISKSEQ | the backend id names the device; there is a lease on it and on the index |
//! | `pid` is a marker and not a living process | taken for "configured", and for nothing else |
//! | a backend id has no limit and is printed into a page | [`BackendId`](crate::id::BackendId): 1 to 255 printable characters |
//! | a socket's own timeouts kill an idle link | none is set on a socket that is handed over |
//! | our own open before the connect makes `EBUSY` | the node is opened only after it |
//! | block sizes, and sizes that are no multiple, differ by version | chosen here, and the lost tail is told ([`Geometry`]) |
//! | requests longer than the server takes | `max_sectors_kb` is lowered to its maximum |
//! | requests in flight on a link that dies wait for their timeout | so long I/O may stand still after a heal: [`Timeouts::request`] |

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
mod violation;
mod wait;

pub(crate) use adoption::{Adoption, adoption, timeouts_that_mark, unmark};
pub(crate) use backends::Backends;
pub use block_size::{BlockSizes, Geometry};
pub(crate) use command::set_size;
pub use command::{Connect, NewTimeouts, Reconfigure, Timeouts, disconnect, status};
pub(crate) use content::{
    LENGTH as CONTENT_LENGTH, is_other as is_other_content, names as content_names,
    spelt as spelt_content,
};
pub use device::{Facts, Hints, NbdDevice, State};
pub(crate) use dial::dial_for_device;
pub use dial::{Connection, dial, discover, list_exports};
pub use difference::Difference;
pub use export::{Export, ExportFlags};
pub(crate) use first_bytes::Content;
pub(crate) use known_content::KnownContent;
pub(crate) use link::{Link, LinkState, duplicate};
pub use link_dead::{DeadLinks, LinkNotice, LinkWaker, LinkWatch};
pub use message::{Attribute, ClientFlags, DeviceStatus, MalformedMessage, Message};
pub use refusal::Refusal;
pub(crate) use served::{Slots, page_size};
pub(crate) use tls::ciphers_of_kernel;
pub use tls_info::{ServerCertificate, TlsCipher, TlsInfo, TlsVersion};
pub(crate) use wait::{wait_until_closed, wait_until_free};
