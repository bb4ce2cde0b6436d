//! What the kernel does not keep of a session.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::iscsi::{Credentials, SessionName};

pub(super) type Ask = dyn Fn(&SessionName) -> Result<Option<Credentials>> + Send + Sync;

/// What is needed to log a session in again that the kernel does not keep.
#[derive(Clone, Default)]
pub struct SessionRecoveryOptions {
    pub(super) ask: Option<Arc<Ask>>,
    pub(super) digests: (bool, bool),
}

impl SessionRecoveryOptions {
    /// Without credentials and digests.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With CHAP: `ask` is asked before each login what to prove to the session's
    /// target. Nothing of it is kept, so a process that takes over the sessions of
    /// one that died finds the secrets where it reads them:
    /// [`Credentials::from_file`] and [`Credentials::from_environment`]. Its time is
    /// the login's: one that takes longer than 10 seconds never logs in.
    #[must_use]
    pub fn credentials(
        mut self,
        ask: impl Fn(&SessionName) -> Result<Option<Credentials>> + Send + Sync + 'static,
    ) -> Self {
        self.ask = Some(Arc::new(ask));
        self
    }

    /// Offers CRC32C over headers, over data or both where lunbd does not know what a
    /// session had. The kernel forgets the digests with the connection, so a session
    /// that was lost before this process saw it has unknown digests.
    #[must_use]
    pub fn digests(mut self, header: bool, data: bool) -> Self {
        self.digests = (header, data);
        self
    }
}

impl fmt::Debug for SessionRecoveryOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeepOptions")
            .field("asks_for_credentials", &self.ask.is_some())
            .field("digests", &self.digests)
            .finish()
    }
}

/// One target's time to answer.
pub(super) const ONE_TRY: Duration = Duration::from_secs(10);
