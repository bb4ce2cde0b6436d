//! The arguments of `lunbd discover`.

use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use lunbd::id::{NbdServer, NbdUri, Portal};

use super::iscsi::{Initiator, LocalEnd};
use super::limit::limit;

#[derive(Debug, Args)]
pub(crate) struct Discover {
    /// An iSCSI portal, HOST or HOST:PORT, with an IPv6 address in brackets; or an NBD server,
    /// nbd://HOST[:PORT], nbds://HOST[:PORT] or nbd+unix:///?socket=PATH.
    #[arg(value_name = "PORTAL|NBD-URI")]
    pub(crate) at: DiscoverAt,

    #[command(flatten)]
    pub(crate) who: Initiator,

    #[command(flatten)]
    pub(crate) local: LocalEnd,

    /// How long the command may take: 500ms, 30s, 2m.
    #[arg(long, default_value = "30s", value_parser = limit)]
    pub(crate) timeout: Duration,
}

/// The server that is asked for what it serves.
#[derive(Debug, Clone)]
pub(crate) enum DiscoverAt {
    Iscsi(Portal),
    Nbd(NbdServer),
}

impl FromStr for DiscoverAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.starts_with("nbd") || !text.contains("://") {
            let portal = text.parse::<Portal>();
            return portal.map(Self::Iscsi).map_err(|error| error.to_string());
        }
        let uri = text.parse::<NbdUri>().map_err(|error| error.to_string())?;
        if !uri.export().is_empty() {
            return Err("expected an NBD server without an export".to_owned());
        }
        Ok(Self::Nbd(uri.server().clone()))
    }
}
