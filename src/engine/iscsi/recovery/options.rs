//! The options of a recovery: the session's data that the kernel does not keep.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::Result;
use crate::iscsi::{Credentials, Digests, SessionName};

pub(super) type CredentialsFn =
    dyn Fn(&SessionName, Deadline) -> Result<Option<Credentials>> + Send + Sync;

pub(super) type DigestsFn = dyn Fn(&SessionName) -> Digests + Send + Sync;

/// The data that a re-login needs and that the kernel does not keep.
#[derive(Clone, Default)]
pub struct SessionRecoveryOptions {
    pub(super) credentials: Option<Arc<CredentialsFn>>,
    pub(super) digests: Option<Arc<DigestsFn>>,
}

impl SessionRecoveryOptions {
    /// Options without credentials and digests.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Uses CHAP: calls `ask` before each login for the credentials of the session's
    /// target. lunbd stores none of them, so a process that takes over the sessions of a
    /// dead one reads the secrets from their source: [`Credentials::from_file`] and
    /// [`Credentials::from_environment`]. The call counts as part of the login: with an
    /// `ask` that takes longer than 10 seconds the login never succeeds.
    #[must_use]
    pub fn credentials(
        self,
        ask: impl Fn(&SessionName) -> Result<Option<Credentials>> + Send + Sync + 'static,
    ) -> Self {
        self.credentials_within(move |session, _| ask(session))
    }

    /// As [`credentials`](Self::credentials), for a source that may not answer: `ask` must
    /// return by the deadline that it gets, which is that of the login.
    #[must_use]
    pub fn credentials_within(
        mut self,
        ask: impl Fn(&SessionName, Deadline) -> Result<Option<Credentials>> + Send + Sync + 'static,
    ) -> Self {
        self.credentials = Some(Arc::new(ask));
        self
    }

    /// Offers CRC32C over headers, over data or both, where the digests of a session are
    /// unknown. The kernel forgets the digests with the connection, so they are unknown
    /// for a session that was lost before this process saw it. The digest over data is then
    /// offered only if each disk of the session keeps its pages stable during writes
    /// (`queue/stable_writes`), as all disks do that appeared while the session had it.
    #[must_use]
    pub fn digests(self, header: bool, data: bool) -> Self {
        self.digests_of(move |_| Digests { header, data })
    }

    /// As [`digests`](Self::digests), with those that `ask` returns for a session.
    #[must_use]
    pub(crate) fn digests_of(
        mut self,
        ask: impl Fn(&SessionName) -> Digests + Send + Sync + 'static,
    ) -> Self {
        self.digests = Some(Arc::new(ask));
        self
    }
}

impl fmt::Debug for SessionRecoveryOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionRecoveryOptions")
            .field("asks_for_credentials", &self.credentials.is_some())
            .field("asks_for_digests", &self.digests.is_some())
            .finish()
    }
}

/// The time of one attempt in which the target must answer.
pub(super) const ATTEMPT_LIMIT: Duration = Duration::from_secs(10);
