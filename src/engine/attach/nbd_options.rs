//! How an NBD source is attached.

use std::num::NonZeroU16;
use std::time::Duration;

use crate::id::{BackendId, ContentName, NbdIndex, Source};
use crate::nbd::{NewTimeouts, Timeouts};

/// How an NBD source is attached and healed. With the defaults of an attach, a server that
/// hangs or restarts causes no I/O error for five minutes, with [one exception from Linux 6.14
/// on](crate::guide::nbd#one-request-may-fail-from-linux-614-on). A heal keeps the timeouts of the
/// device, except those that are set here.
#[derive(Debug, Clone)]
pub struct NbdOptions {
    pub(in crate::engine) index: Option<NbdIndex>,
    pub(in crate::engine) backend: Option<BackendId>,
    pub(in crate::engine) connections: NonZeroU16,
    pub(in crate::engine) read_only: bool,
    pub(in crate::engine) block_size: Option<u32>,
    pub(in crate::engine) expected: Option<ContentName>,
    pub(in crate::engine) accepts_content: bool,
    pub(in crate::engine) last_content: Option<Vec<ContentName>>,
    /// The timeouts that were set.
    pub(in crate::engine) timeouts: NewTimeouts,
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self {
            index: None,
            backend: None,
            connections: NonZeroU16::MIN,
            read_only: false,
            block_size: None,
            expected: None,
            accepts_content: false,
            last_content: None,
            timeouts: NewTimeouts::default(),
        }
    }
}

impl NbdOptions {
    /// Attaches this device, which is created if it does not exist. The default is the lowest
    /// free one.
    #[must_use]
    pub fn index(mut self, index: NbdIndex) -> Self {
        self.index = Some(index);
        self
    }

    /// The id that the kernel stores with the device, and by which the device is found again.
    /// The default is the source's URI.
    ///
    /// The kernel does not show whether a device uses TLS. So an attach from `nbds://` under a
    /// given id takes a device that another process attached only if the journal has the
    /// volume; without that it is `InUse`.
    #[must_use]
    pub fn backend(mut self, id: BackendId) -> Self {
        self.backend = Some(id);
        self
    }

    /// How many connections carry I/O, if the server allows several (`CAN_MULTI_CONN`); the
    /// default is 1. The kernel uses no more than it has CPUs (`block/blk-mq.c`,
    /// `blk_mq_alloc_tag_set`).
    #[must_use]
    pub fn connections(mut self, count: NonZeroU16) -> Self {
        self.connections = count;
        self
    }

    /// Makes the kernel refuse writes, even if the server accepts them.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// The logical block size in bytes, a power of two from 512 to a page, for images whose
    /// partition table was made with other sectors than 512 bytes. The default is the
    /// server's minimum, and at least 512, as with nbd-client and qemu-nbd. A device that is
    /// attached with another block size is refused as in use.
    #[must_use]
    pub fn block_size(mut self, bytes: u32) -> Self {
        self.block_size = Some(bytes);
        self
    }

    /// Attaches only if the content of the volume has this name, and heals only with a
    /// server whose volume has it. `fs.UUID` names all devices of a btrfs, and `btrfs.UUID`
    /// one of them.
    #[must_use]
    pub fn expect(mut self, name: ContentName) -> Self {
        self.expected = Some(name);
        self
    }

    /// Accepts the content that the server has now as that of the volume, also if it is other
    /// content than before: for this one heal, or for this one attach of a volume of a
    /// journal, which then keeps the new names. An attach without a journal compares only the
    /// name of [`expect`](Self::expect).
    #[must_use]
    pub fn accept_content(mut self) -> Self {
        self.accepts_content = true;
        self
    }

    /// The names that the content had when they were read last, as a journal keeps them. A
    /// heal that knows nothing newer compares them with those that the server has now. If the
    /// server has none of them, the heal takes it and reports both
    /// ([`Difference::Content`](crate::nbd::Difference::Content)). An attach ignores them.
    #[must_use]
    pub fn last_content(mut self, names: Vec<ContentName>) -> Self {
        self.last_content = Some(names);
        self
    }

    /// How long one request may take before its connection is taken for dead; the default is
    /// 30 s. The request then goes out over another connection of the device, or waits for a
    /// new one if it has no other. The kernel gives up a TCP connection whose peer
    /// acknowledges nothing after the same time (`TCP_USER_TIMEOUT`).
    ///
    /// With zero the kernel never notices a server that hangs over one connection, and
    /// notices it after 30 s over several; see [`Timeouts::request`]. A heal then sets it to
    /// 30 s for the moment in which it offers a connection, so that the kernel shows whether
    /// it took the connection; a heal that ends in between leaves 30 s.
    #[must_use]
    pub fn io_timeout(mut self, limit: Duration) -> Self {
        self.timeouts.request = Some(limit);
        self
    }

    /// How long requests wait for a new connection when the last has died, counted from the
    /// first waiting request; the default is 300 s. After that they fail with `EIO`. With zero
    /// they fail at once, and nothing can heal them.
    #[must_use]
    pub fn dead_connection_timeout(mut self, limit: Duration) -> Self {
        self.timeouts.dead_connection = Some(limit);
        self
    }

    /// The timeouts of an attach.
    pub(in crate::engine) fn timeouts(&self) -> Timeouts {
        const REQUEST: Duration = Duration::from_secs(30);
        const DEAD_CONNECTION: Duration = Duration::from_secs(300);
        let given = self.timeouts;
        Timeouts {
            request: given.request.unwrap_or(REQUEST),
            dead_connection: given.dead_connection.unwrap_or(DEAD_CONNECTION),
        }
    }

    /// What a heal requires of the content.
    pub(in crate::engine) fn content_rule(&self) -> ContentRule {
        ContentRule {
            accepts_any: self.accepts_content,
            expected: self.expected.clone(),
            last_known: self.last_content.clone(),
        }
    }

    /// Whether the caller has chosen the id.
    pub(in crate::engine) fn backend_is_given(&self) -> bool {
        self.backend.is_some()
    }

    /// The backend id of a device of this source.
    pub(in crate::engine) fn backend_of(&self, source: &Source) -> BackendId {
        let derived = || BackendId::derived(&source.to_string());
        self.backend.clone().unwrap_or_else(derived)
    }
}

/// The required content of a device.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct ContentRule {
    /// Whether any content is accepted.
    pub(in crate::engine) accepts_any: bool,
    /// A name that the content must have.
    pub(in crate::engine) expected: Option<ContentName>,
    /// The names that a journal has of it.
    pub(in crate::engine) last_known: Option<Vec<ContentName>>,
}
