//! Our own sessions in the kernel: from a login on our socket to SCSI devices, and back.
//!
//! The kernel gets a session only when its login has succeeded, so that a failed login leaves
//! nothing behind. The session needs no process: the kernel answers the target's pings and
//! carries the I/O when the process that made it is gone.
//!
//! The kernel stores what identifies the session. Its `creator` is no process: it is -1, so
//! that an iscsid that starts leaves the session alone, or another negative number if some
//! process had that port. Its interface is called `lunbd`. By these two
//! [`IscsiSession::is_lunbd_owned`] knows that lunbd made it. It is found again by its names
//! and its portal.

mod facts;
#[cfg(test)]
pub(crate) mod fake;
mod hand_over;
mod incomplete;
mod iscsi_session;
mod kept;
pub(super) mod logout;
pub(super) mod settings;
mod unmet;

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

pub use facts::SessionFacts;
pub use hand_over::hand_over;
pub(crate) use incomplete::has_incomplete;
pub use incomplete::{destroy_incomplete, lock_creation};
pub use iscsi_session::{ConnectionStatus, Digests, IscsiSession};
pub use logout::log_out;
pub use unmet::UnmetSetting;

use super::chap::{Credentials, CredentialsSource};
use super::login::{Connection, LoginOptions, Parameters, SessionKind, log_in};
use super::pdu::Isid;
use super::tunables::{Tunable, Tunables};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{HostNo, InterfaceName, Iqn, Portal, SessionId};
pub use crate::kernel::iscsi_netlink::CreateGuard;
use crate::kernel::tcp::LocalEnd;
use crate::kernel::{Roots, iscsi_netlink};

/// How a session is logged in, for any target and portal.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    pub(crate) initiator: Iqn,
    pub(crate) proof: Option<Proof>,
    pub(crate) header_digest: bool,
    pub(crate) data_digest: bool,
    pub(crate) requires_digests: bool,
    pub(crate) recovery_timeout: Option<Duration>,
    pub(crate) tunables: Tunables,
    pub(crate) local: LocalEnd,
}

/// The CHAP credentials, or where they are.
#[derive(Debug, Clone)]
pub(crate) enum Proof {
    Known(Credentials),
    At(CredentialsSource),
}

impl SessionOptions {
    /// Logs in as `initiator` (see [`initiator_name`](super::initiator_name)), without
    /// credentials and digests.
    #[must_use]
    pub fn new(initiator: Iqn) -> Self {
        Self {
            initiator,
            proof: None,
            header_digest: false,
            data_digest: false,
            requires_digests: false,
            recovery_timeout: None,
            tunables: Tunables::default(),
            local: LocalEnd::default(),
        }
    }

    /// Uses CHAP: see [`LoginOptions::credentials`]. With mutual CHAP an existing session that
    /// lunbd made without it is refused.
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.proof = Some(Proof::Known(credentials));
        self
    }

    /// Uses CHAP, with the credentials that `source` holds at the time of each login. A
    /// journal can store the source.
    #[must_use]
    pub fn credentials_from(mut self, source: CredentialsSource) -> Self {
        self.proof = Some(Proof::At(source));
        self
    }

    /// Offers CRC32C over headers, over data or both, for the target to choose.
    #[must_use]
    pub fn digests(mut self, header: bool, data: bool) -> Self {
        (self.header_digest, self.data_digest) = (header, data);
        self
    }

    /// Requires CRC32C over headers and over data: a target that does not take both is
    /// refused, also when the session is logged in again. An existing session without both is
    /// refused too.
    #[must_use]
    pub fn require_digests(mut self) -> Self {
        self.requires_digests = true;
        self.digests(true, true)
    }

    /// How long I/O waits for a lost connection to come back before it fails, in whole
    /// seconds: an attach refuses a fraction of a second. The default is 120 s. It is 5 s if
    /// I/O has other paths: a multipath map is required, or is preferred over several portals
    /// while multipathd runs. An existing session keeps its own, and
    /// [`IscsiSession::unmet`] says whether it differs.
    #[must_use]
    pub fn recovery_timeout(mut self, limit: Duration) -> Self {
        self.recovery_timeout = Some(limit);
        self
    }

    /// Sets the recovery timeout to `limit` if none was chosen.
    #[must_use]
    pub fn recovery_timeout_or(mut self, limit: Duration) -> Self {
        self.recovery_timeout.get_or_insert(limit);
        self
    }

    /// The settings of a new session. An existing session keeps its own, and
    /// [`IscsiSession::unmet`] says which differ.
    #[must_use]
    pub fn tunables(mut self, tunables: Tunables) -> Self {
        self.tunables = tunables;
        self
    }

    /// Logs in through this network interface alone (`SO_BINDTODEVICE`), also again after a
    /// loss, since the kernel stores the name with the session. An existing session stays as
    /// it is.
    #[must_use]
    pub fn interface(mut self, name: InterfaceName) -> Self {
        self.local.interface = Some(name);
        self
    }

    /// Logs in from this address of this machine, also again after a loss. An existing
    /// session stays as it is.
    #[must_use]
    pub fn source_address(mut self, address: IpAddr) -> Self {
        self.local.address = Some(address);
        self
    }

    /// # Errors
    /// `InvalidInput` if the kernel cannot store the recovery timeout: it counts whole
    /// seconds, and 500 ms would become 0. `InvalidInput` for settings that contradict each
    /// other.
    pub(crate) fn require_valid(&self) -> Result<()> {
        self.tunables.require_valid()?;
        let Some(limit) = self.recovery_timeout else {
            return Ok(());
        };
        if limit.subsec_nanos() == 0 && i32::try_from(limit.as_secs()).is_ok() {
            return Ok(());
        }
        let message = format!(
            "a recovery timeout of {limit:?} is refused: the kernel counts whole seconds, at \
             most {}",
            i32::MAX
        );
        Err(Error::new(ErrorKind::InvalidInput, message))
    }

    /// Limits the data in one PDU to the chosen length, even if the target takes more.
    pub(super) fn cap(&self, mut connection: Connection) -> Connection {
        let agreed = &mut connection.session.parameters.max_xmit_data_segment_length;
        *agreed = (*agreed).min(self.tunables.value(Tunable::SendSegment));
        connection
    }

    /// The initiator's name.
    #[must_use]
    pub fn initiator(&self) -> &Iqn {
        &self.initiator
    }
}

/// The name of a session of ours. There is one session of each name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionName {
    /// The initiator that has logged in.
    pub initiator: Iqn,
    /// The target.
    pub target: Iqn,
    /// The portal, as the caller named it.
    pub portal: Portal,
}

impl SessionName {
    /// The ISID, which the kernel does not store. It is made from the name, so that each
    /// process that finds the session knows it, that two processes cannot make the session
    /// twice, and that a login after a crash ends what the target still has of the session
    /// (RFC 7143, 6.3.5 and 10.1.1). It is of the random kind (11.12.5), which iscsid does
    /// not use.
    #[must_use]
    pub fn isid(&self) -> Isid {
        // No name has a blank. All spellings of a name mean one session.
        let (initiator, target) = (self.initiator.to_lowercase(), self.target.to_lowercase());
        let text = format!("{initiator} {target} {}", self.portal);
        let digest = Sha256::digest(text);
        Isid([0x80, digest[0], digest[1], digest[2], digest[3], digest[4]])
    }
}

impl fmt::Display for SessionName {
    /// `with IQN through PORTAL as IQN`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "with {} through {} as {}",
            self.target, self.portal, self.initiator
        )
    }
}

/// A session of ours in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelSession {
    /// Its number.
    pub id: SessionId,
    /// Its SCSI host; no other session has it.
    pub host: HostNo,
}

/// Logs in on a socket of our own: the first half of making a session. See [`log_in`].
///
/// # Errors
/// As of [`log_in`].
pub fn connect(
    name: &SessionName,
    options: &SessionOptions,
    deadline: Deadline,
) -> Result<Connection> {
    let login = login_options(name, options, deadline)?;
    let connection = log_in(&name.portal, &login, deadline)?;
    Ok(options.cap(connection))
}

/// The options with which a session of this name is logged in.
pub(super) fn login_options(
    name: &SessionName,
    options: &SessionOptions,
    deadline: Deadline,
) -> Result<LoginOptions> {
    let value = |tunable| options.tunables.value(tunable);
    let offer = Parameters {
        header_digest: options.header_digest,
        data_digest: options.data_digest,
        first_burst_length: value(Tunable::FirstBurst),
        max_burst_length: value(Tunable::MaxBurst),
        max_recv_data_segment_length: value(Tunable::ReceiveSegment),
        ..Parameters::offer()
    };
    let kind = SessionKind::Normal(name.target.clone());
    let login = LoginOptions::new(name.initiator.clone(), kind, name.isid());
    let login = login.offer(offer).from(options.local.clone());
    let login = if options.requires_digests {
        login.require_digests()
    } else {
        login
    };
    Ok(match &options.proof {
        Some(Proof::Known(credentials)) => login.credentials(credentials.clone()),
        Some(Proof::At(source)) => {
            let credentials = source.read(Some(&name.target), &name.portal, deadline);
            login.credentials(credentials.map_err(|error| error.at(Stage::Login))?)
        }
        None => login,
    })
}

/// Whether this machine's kernel can have sessions of ours: the module `iscsi_tcp` is loaded.
#[must_use]
pub fn has_driver(roots: &Roots) -> bool {
    iscsi_netlink::has_driver(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(portal: &str) -> SessionName {
        SessionName {
            initiator: "iqn.2026-01.example:host".parse().unwrap(),
            target: "iqn.2026-01.example:array".parse().unwrap(),
            portal: portal.parse().unwrap(),
        }
    }

    /// If the result changed, a session that is found again would be given up for a new one.
    #[test]
    fn the_isid_of_a_name_is_the_same_in_every_version() {
        let isid = name("10.0.0.1").isid();
        assert_eq!(format!("{isid:?}"), "8031b28f8524");
        assert_eq!(name("10.0.0.1:3260").isid(), isid);
        assert_ne!(name("10.0.0.2").isid(), isid);
        let in_capitals = SessionName {
            initiator: "iqn.2026-01.Example:HOST".parse().unwrap(),
            target: "iqn.2026-01.example:Array".parse().unwrap(),
            ..name("10.0.0.1")
        };
        assert_eq!(in_capitals.isid(), isid);
    }

    #[test]
    fn a_recovery_timeout_is_a_number_of_seconds_that_the_kernel_can_keep() {
        let options = SessionOptions::new("iqn.2026-01.example:host".parse().unwrap());
        let refused = |limit| {
            options
                .clone()
                .recovery_timeout(limit)
                .require_valid()
                .is_err()
        };
        let most = Duration::from_secs(i32::MAX.unsigned_abs().into());
        let second = Duration::from_secs(1);
        assert!(![Duration::ZERO, second, most].into_iter().any(refused));
        let none = [
            Duration::from_millis(500),
            Duration::from_millis(1500),
            most + second,
        ];
        assert!(none.into_iter().all(refused));
        assert!(options.require_valid().is_ok());
    }

    #[test]
    fn a_recovery_timeout_that_was_chosen_stays() {
        let options = SessionOptions::new("iqn.2026-01.example:host".parse().unwrap());
        let [short, long] = [5, 120].map(Duration::from_secs);
        let chosen = options.clone().recovery_timeout(short);
        assert_eq!(
            chosen.recovery_timeout_or(long).recovery_timeout,
            Some(short)
        );
        assert_eq!(
            options.recovery_timeout_or(long).recovery_timeout,
            Some(long)
        );
    }
}
