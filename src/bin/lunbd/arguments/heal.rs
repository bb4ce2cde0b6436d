//! The arguments of `lunbd heal`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use lunbd::engine::{NbdOptions, SessionRecoveryOptions};
use lunbd::id::{BackendId, VolumeId};
use lunbd::iscsi::{Credentials, CredentialsFile};
use lunbd::{Error, ErrorKind, Source};

use super::limit::limit;

#[derive(Debug, Args)]
pub(crate) struct Heal {
    /// Heal only the device of this NBD source, or lunbd's sessions that lead to this iSCSI
    /// source. By default, heal every NBD device that was attached by its URI.
    #[arg(group = "one")]
    pub(crate) source: Option<Source>,

    /// Heal only the source of this volume of the journal.
    #[arg(long, value_name = "ID", group = "one", conflicts_with = "backend")]
    pub(crate) volume: Option<VolumeId>,

    /// The journal's directory, by default /run/lunbd/journal.
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub(crate) journal: Option<PathBuf>,

    /// The id that the kernel stores with the device, by default the URI.
    #[arg(long, value_name = "ID", requires = "source", help_heading = "NBD")]
    backend: Option<BackendId>,

    /// How long one request may take from now on before its connection is taken for dead, by
    /// default as at the attach.
    #[arg(long, value_name = "LIMIT", value_parser = limit, requires = "one", help_heading = "NBD")]
    io_timeout: Option<Duration>,

    /// How long requests wait from now on for a server that is gone, before they fail; by
    /// default as at the attach.
    #[arg(long, value_name = "LIMIT", value_parser = limit, requires = "one", help_heading = "NBD")]
    dead_timeout: Option<Duration>,

    /// Accept what the server serves now as the volume, also if its content is that of another
    /// volume.
    #[arg(long, requires = "one", help_heading = "NBD")]
    accept_content: bool,

    /// Run until interrupted: heal links as they die, and log in again to lost iSCSI sessions
    /// that `attach --log-in` made.
    #[arg(long, conflicts_with = "one")]
    pub(crate) watch: bool,

    /// Log in again with CHAP, from a file as for `attach --chap-file`, which is read before
    /// each login; without the file from the same environment variables.
    #[arg(long, value_name = "FILE", help_heading = "iSCSI")]
    chap_file: Option<PathBuf>,

    /// Offer the target checksums (CRC32C) if it is not known whether a session had them,
    /// because it was lost before this command began.
    #[arg(long, help_heading = "iSCSI")]
    digests: bool,

    /// How long to dial servers that are not back yet: 30s, 5m.
    #[arg(long, default_value = "30s", value_parser = limit, conflicts_with = "watch")]
    pub(crate) timeout: Duration,
}

impl Heal {
    /// The options with which the device of one source is healed.
    pub(crate) fn nbd_options(&self, mut options: NbdOptions) -> NbdOptions {
        if let Some(id) = &self.backend {
            options = options.backend(id.clone());
        }
        if let Some(limit) = self.io_timeout {
            options = options.io_timeout(limit);
        }
        if let Some(limit) = self.dead_timeout {
            options = options.dead_connection_timeout(limit);
        }
        if self.accept_content {
            options = options.accept_content();
        }
        options
    }

    /// Refuses options for sessions if no session is logged in again.
    pub(crate) fn refuse_without_sessions(&self) -> lunbd::Result<()> {
        if !self.digests && self.chap_file.is_none() {
            return Ok(());
        }
        let message = "--digests and --chap-file are for iSCSI sessions: name an iSCSI source, or \
                       give --watch";
        Err(Error::new(ErrorKind::InvalidInput, message))
    }

    /// The options with which sessions are logged in again.
    pub(crate) fn recovery_options(&self) -> SessionRecoveryOptions {
        let file = self.chap_file.clone();
        let options = SessionRecoveryOptions::new().digests(self.digests, self.digests);
        options.credentials_within(move |session, deadline| match &file {
            Some(file) => {
                let known = CredentialsFile::read_within(file, deadline)?;
                Ok(known.find(Some(&session.target), &session.portal).cloned())
            }
            None => Credentials::from_environment(),
        })
    }
}
