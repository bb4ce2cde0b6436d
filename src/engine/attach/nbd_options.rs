//! How an NBD source is attached.

use std::num::NonZeroU16;
use std::time::Duration;

use crate::id::{BackendId, ContentName, NbdIndex, Source};
use crate::nbd::{NewTimeouts, Timeouts};

/// How an NBD source is attached and healed. The defaults of an attach heal: a
/// server that hangs or restarts causes no I/O error for five minutes. A heal leaves
/// the device the timeouts that it has, but for those that are said here.
#[derive(Debug, Clone)]
pub struct NbdOptions {
    pub(in crate::engine) index: Option<NbdIndex>,
    pub(in crate::engine) backend: Option<BackendId>,
    pub(in crate::engine) connections: NonZeroU16,
    pub(in crate::engine) read_only: bool,
    pub(in crate::engine) block_size: Option<u32>,
    pub(in crate::engine) expected: Option<ContentName>,
    pub(in crate::engine) accepts_content: bool,
    /// Those that were said.
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
            timeouts: NewTimeouts::default(),
        }
    }
}

impl NbdOptions {
    /// This device, made if it does not exist; without it the lowest that is
    /// free.
    #[must_use]
    pub fn index(mut self, index: NbdIndex) -> Self {
        self.index = Some(index);
        self
    }

    /// The id under which the kernel keeps the device, by which it is found
    /// again; without it the source's URI.
    #[must_use]
    pub fn backend(mut self, id: BackendId) -> Self {
        self.backend = Some(id);
        self
    }

    /// How many connections carry I/O, where the server allows several
    /// (`CAN_MULTI_CONN`); 1 without it. The kernel uses no more than it has
    /// CPUs (`block/blk-mq.c`, `blk_mq_alloc_tag_set`).
    #[must_use]
    pub fn connections(mut self, count: NonZeroU16) -> Self {
        self.connections = count;
        self
    }

    /// Has the kernel refuse writes, whatever the server says.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// The logical block size in bytes, a power of two from 512 to a page, for images
    /// whose partition table was made with other sectors than 512 bytes. Without it the
    /// server's minimum, and at least 512, as nbd-client and qemu-nbd have it. A device
    /// that is attached with another block size is refused as in use.
    #[must_use]
    pub fn block_size(mut self, bytes: u32) -> Self {
        self.block_size = Some(bytes);
        self
    }

    /// Attaches only if the content of the volume has this name, and heals only with a
    /// server whose volume has it.
    #[must_use]
    pub fn expect(mut self, name: ContentName) -> Self {
        self.expected = Some(name);
        self
    }

    /// Takes whatever content the server has now for that of the volume, also where it is
    /// another than before: for this one heal, or for this one attach of a volume of a
    /// journal, which keeps the new names. An attach without a journal compares nothing but
    /// what [`expect`](Self::expect) names.
    #[must_use]
    pub fn accept_content(mut self) -> Self {
        self.accepts_content = true;
        self
    }

    /// How long one request may take before its connection is taken for dead; 30 s
    /// without it. The request then goes out over another connection of the device, or
    /// waits for a new one where it has no other. A TCP connection whose peer
    /// acknowledges nothing is given up after the same time (`TCP_USER_TIMEOUT`).
    ///
    /// With zero a server that hangs is never noticed over one connection, and after
    /// 30 s over several; see [`Timeouts::request`]. Each connection that a heal offers
    /// sets it to 30 s for the moment of the offer, so that the kernel shows whether it
    /// took the connection; a heal that ends in between leaves 30 s.
    #[must_use]
    pub fn io_timeout(mut self, limit: Duration) -> Self {
        self.timeouts.request = Some(limit);
        self
    }

    /// How long requests wait for a new connection when the last has died,
    /// counted from the first that waits; 300 s without it. After that they
    /// fail with `EIO`. With zero they fail at once and nothing can heal them.
    #[must_use]
    pub fn dead_connection_timeout(mut self, limit: Duration) -> Self {
        self.timeouts.dead_connection = Some(limit);
        self
    }

    /// Those of an attach.
    pub(in crate::engine) fn timeouts(&self) -> Timeouts {
        const REQUEST: Duration = Duration::from_secs(30);
        const DEAD_CONNECTION: Duration = Duration::from_secs(300);
        let said = self.timeouts;
        Timeouts {
            request: said.request.unwrap_or(REQUEST),
            dead_connection: said.dead_connection.unwrap_or(DEAD_CONNECTION),
        }
    }

    /// What a heal requires of the content.
    pub(in crate::engine) fn content_rule(&self) -> ContentRule {
        ContentRule {
            accepts_any: self.accepts_content,
            expected: self.expected.clone(),
        }
    }

    /// Whether the caller has chosen the id.
    pub(in crate::engine) fn backend_is_given(&self) -> bool {
        self.backend.is_some()
    }

    /// The id of a device of this source.
    pub(in crate::engine) fn backend_of(&self, source: &Source) -> BackendId {
        let derived = || BackendId::derived(&source.to_string());
        self.backend.clone().unwrap_or_else(derived)
    }
}

/// What the content of a device is to be.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct ContentRule {
    /// Whatever is served.
    pub(in crate::engine) accepts_any: bool,
    /// A name that it must have.
    pub(in crate::engine) expected: Option<ContentName>,
}
