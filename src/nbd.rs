//! One NBD server, one attempt: connect, shake hands, compare what it serves.
//!
//! The protocol is the NBD project's (`doc/proto.md`): the fixed newstyle
//! handshake without TLS, up to the point where the kernel takes the socket
//! over. What the kernel cannot speak is never negotiated: structured replies,
//! metadata contexts, extended headers.

mod block_size;
mod command;
mod device;
mod dial;
mod difference;
mod export;
pub mod handshake;
mod link;
mod link_dead;
mod message;
mod refusal;
mod served;
mod wait;

pub use block_size::{BlockSizes, Geometry};
pub use command::{Connect, Reconfigure, Timeouts, disconnect, status};
pub use device::{Facts, Knowledge, NbdDevice, State};
pub use dial::{Connection, dial, list_exports};
pub use difference::Difference;
pub use export::{Export, ExportFlags};
pub(crate) use link::{Link, duplicate};
pub use link_dead::{DeadLinks, LinkNotice, LinkWatch};
pub use message::{Attribute, ClientFlags, DeviceStatus, MalformedMessage, Message};
pub use refusal::Refusal;
pub(crate) use served::page_size;
pub(crate) use wait::{wait_until_closed, wait_until_free};
