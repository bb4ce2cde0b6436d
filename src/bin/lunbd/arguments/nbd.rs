//! The arguments of an attach of an NBD source.

use std::num::NonZeroU16;
use std::time::Duration;

use clap::Args;
use lunbd::engine::NbdOptions;
use lunbd::id::{BackendId, NbdIndex};

use super::limit::limit;

// How an NBD source is attached.
#[derive(Debug, Args)]
#[command(next_help_heading = "NBD")]
pub(crate) struct Nbd {
    /// The device /dev/nbdN, by default the lowest free one.
    #[arg(long, value_name = "N")]
    index: Option<NbdIndex>,

    /// The id that the kernel stores with the device, by default the URI.
    #[arg(long, value_name = "ID")]
    pub(crate) backend: Option<BackendId>,

    /// How many connections carry I/O, if the server allows several.
    #[arg(long, value_name = "COUNT", default_value = "1")]
    connections: NonZeroU16,

    /// Have the kernel refuse writes.
    #[arg(long)]
    read_only: bool,

    /// The logical block size, for images whose partition table was not made with 512-byte
    /// sectors. The default is the server's minimum, and at least 512.
    #[arg(long, value_name = "BYTES")]
    block_size: Option<u32>,

    /// Attach also if the volume's content has other names than the journal's record of it,
    /// and record the new ones.
    #[arg(long, requires = "volume")]
    accept_content: bool,

    /// How long one request may take before its connection is taken for dead.
    #[arg(long, value_name = "LIMIT", default_value = "30s", value_parser = limit)]
    io_timeout: Duration,

    /// How long requests wait for a server that is gone, before they fail.
    #[arg(long, value_name = "LIMIT", default_value = "5m", value_parser = limit)]
    dead_timeout: Duration,
}

impl Nbd {
    pub(crate) fn options(self) -> NbdOptions {
        let mut options = NbdOptions::default()
            .connections(self.connections)
            .io_timeout(self.io_timeout)
            .dead_connection_timeout(self.dead_timeout);
        if let Some(index) = self.index {
            options = options.index(index);
        }
        if let Some(id) = self.backend {
            options = options.backend(id);
        }
        if self.read_only {
            options = options.read_only();
        }
        if let Some(bytes) = self.block_size {
            options = options.block_size(bytes);
        }
        if self.accept_content {
            options = options.accept_content();
        }
        options
    }
}
