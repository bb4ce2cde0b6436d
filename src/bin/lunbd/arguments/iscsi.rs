//! The arguments of a login at an iSCSI portal.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use lunbd::id::{InterfaceName, Iqn};
use lunbd::iscsi::{
    Credentials, CredentialsSource, INITIATOR_NAME_FILE, SessionOptions, Tunable, Tunables,
    initiator_name,
};
use lunbd::{Error, ErrorKind};

use super::limit::limit;

// How the command logs in to an iSCSI source.
#[derive(Debug, Args)]
#[command(next_help_heading = "iSCSI")]
pub(crate) struct Iscsi {
    /// Log in through each portal without a session, all at once. No daemon is needed. The
    /// detach of the last device on such a session logs it out.
    #[arg(long)]
    log_in: bool,

    /// Offer the target checksums over headers and data (CRC32C), or require them, also of an
    /// existing session: --digests=require.
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "offer", requires = "log_in")]
    digests: Option<Digests>,

    /// How long I/O waits for a lost session before it fails, in whole seconds. The default
    /// is 5s if a multipath map with other paths is wanted, and else 2m.
    #[arg(long, value_name = "LIMIT", value_parser = limit, requires = "log_in")]
    recovery_timeout: Option<Duration>,

    /// Set one of: nop_interval and nop_timeout (seconds; 0 never pings), queue_depth,
    /// commands_max, abort_timeout, lu_reset_timeout, target_reset_timeout (seconds),
    /// first_burst, max_burst, receive_segment, send_segment (bytes). This is for new
    /// sessions: an existing one keeps its own settings, and those that differ are printed.
    #[arg(long, value_name = "NAME=VALUE", value_parser = tunable, requires = "log_in")]
    tune: Vec<(Tunable, u32)>,

    #[command(flatten)]
    local: LocalEnd,

    #[command(flatten)]
    who: Initiator,
}

// The local end of a login's connection.
#[derive(Debug, Args)]
pub(crate) struct LocalEnd {
    /// Connect through this network interface alone.
    #[arg(long, value_name = "NAME")]
    pub(crate) interface: Option<InterfaceName>,

    /// Connect from this address of this machine.
    #[arg(long, value_name = "IP")]
    pub(crate) source_address: Option<IpAddr>,
}

impl LocalEnd {
    pub(crate) fn is_given(&self) -> bool {
        self.interface.is_some() || self.source_address.is_some()
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Digests {
    /// The target chooses.
    Offer,
    /// A target that does not take them is refused.
    Require,
}

impl Iscsi {
    /// The options of the login; `None` if no login is wanted.
    pub(crate) fn options(&self) -> lunbd::Result<Option<SessionOptions>> {
        if !self.log_in {
            if self.local.is_given() {
                let message = "--interface and --source-address need --log-in";
                return Err(Error::new(ErrorKind::InvalidInput, message));
            }
            return Ok(None);
        }
        let initiator = self.who.initiator()?;
        let mut options = SessionOptions::new(initiator);
        options = match self.digests {
            None => options,
            Some(Digests::Offer) => options.digests(true, true),
            Some(Digests::Require) => options.require_digests(),
        };
        // The journal stores where the credentials are, and not what they are.
        if let Some(source) = self.who.credentials()? {
            options = options.credentials_from(source);
        }
        if let Some(limit) = self.recovery_timeout {
            options = options.recovery_timeout(limit);
        }
        let mut tunables = Tunables::default();
        for (tunable, value) in &self.tune {
            tunables.set(*tunable, *value)?;
        }
        options = options.tunables(tunables);
        if let Some(name) = &self.local.interface {
            options = options.interface(name.clone());
        }
        if let Some(address) = self.local.source_address {
            options = options.source_address(address);
        }
        Ok(Some(options))
    }
}

// The name and the credentials of a login at an iSCSI portal.
#[derive(Debug, Args)]
pub(crate) struct Initiator {
    /// The name with which to log in, by default this machine's in
    /// /etc/iscsi/initiatorname.iscsi.
    #[arg(long, value_name = "NAME")]
    initiator: Option<Iqn>,

    /// Log in with CHAP: a file of lines user=NAME and secret=SECRET; for mutual CHAP also
    /// target_secret=SECRET, and target_user=NAME to check the target's name; and
    /// algorithms=SHA3-256,SHA1,MD5,SHA256 to offer these instead of all, the most wanted
    /// first. Without the file, LUNBD_CHAP_USER, LUNBD_CHAP_SECRET,
    /// LUNBD_CHAP_TARGET_SECRET, LUNBD_CHAP_TARGET_USER and LUNBD_CHAP_ALGORITHMS give the
    /// same if they are set. A line [IQN] or [PORTAL] begins a section for that target or
    /// portal alone. Only its owner should be able to read the file (chmod 0600).
    #[arg(long, value_name = "FILE")]
    chap_file: Option<PathBuf>,
}

impl Initiator {
    pub(crate) fn initiator(&self) -> lunbd::Result<Iqn> {
        match &self.initiator {
            Some(name) => Ok(name.clone()),
            None => initiator_name(Path::new(INITIATOR_NAME_FILE)),
        }
    }

    /// Where the credentials are, if there are any.
    pub(crate) fn credentials(&self) -> lunbd::Result<Option<CredentialsSource>> {
        let Some(file) = &self.chap_file else {
            let source = CredentialsSource::Environment(CredentialsSource::VARIABLES.to_owned());
            return Ok(Credentials::from_environment()?.map(|_| source));
        };
        let path = std::path::absolute(file).unwrap_or(file.clone());
        Ok(Some(CredentialsSource::File(path)))
    }
}

fn tunable(text: &str) -> Result<(Tunable, u32), String> {
    let (name, value) = text
        .split_once('=')
        .ok_or("expected NAME=VALUE, as in queue_depth=64")?;
    let tunable: Tunable = name.parse().map_err(|error: Error| error.to_string())?;
    let value = value
        .parse()
        .map_err(|_| format!("{value:?} is no whole number of 32 bits"))?;
    let mut alone = Tunables::default();
    alone
        .set(tunable, value)
        .map_err(|error| error.to_string())?;
    Ok((tunable, value))
}
