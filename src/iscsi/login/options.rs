//! The purpose and the offer of a login.

use super::parameters::{Parameters, SessionKind};
use crate::error::{Error, ErrorKind, Result};
use crate::id::Iqn;
use crate::iscsi::PEER;
use crate::iscsi::chap::Credentials;
use crate::iscsi::pdu::Isid;
use crate::kernel::tcp::LocalEnd;

/// The initiator of a login, its purpose and its offer.
#[derive(Debug, Clone)]
pub struct LoginOptions {
    pub(in crate::iscsi) initiator: Iqn,
    pub(in crate::iscsi) kind: SessionKind,
    pub(in crate::iscsi) isid: Isid,
    pub(in crate::iscsi) credentials: Option<Credentials>,
    pub(in crate::iscsi) offer: Parameters,
    pub(super) requires_digests: bool,
    pub(super) local: LocalEnd,
}

impl LoginOptions {
    /// A login of `initiator`, without credentials. No other session of the initiator with
    /// the same portal group may have this `isid`.
    #[must_use]
    pub fn new(initiator: Iqn, kind: SessionKind, isid: Isid) -> Self {
        Self {
            initiator,
            kind,
            isid,
            credentials: None,
            offer: Parameters::offer(),
            requires_digests: false,
            local: LocalEnd::default(),
        }
    }

    /// Uses CHAP. With one-way CHAP a target that does not ask for a proof is accepted;
    /// with mutual CHAP it is refused.
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// Offers these parameters: for each size the most that we accept, and each digest that
    /// is `true`, for the target to choose.
    #[must_use]
    pub fn offer(mut self, offer: Parameters) -> Self {
        self.offer = offer;
        self
    }

    /// Refuses a target that does not accept each offered digest.
    #[must_use]
    pub fn require_digests(mut self) -> Self {
        self.requires_digests = true;
        self
    }

    /// Connects only from this local end, also after a redirect.
    #[must_use]
    pub(in crate::iscsi) fn from(mut self, local: LocalEnd) -> Self {
        self.local = local;
        self
    }

    pub(super) fn check_digests(&self, agreed: &Parameters) -> Result<()> {
        let digests = [
            ("headers", self.offer.header_digest, agreed.header_digest),
            ("data", self.offer.data_digest, agreed.data_digest),
        ];
        let lacks = |(_, offered, agreed): &&(&str, bool, bool)| *offered && !*agreed;
        match digests.iter().find(lacks).filter(|_| self.requires_digests) {
            Some((over, ..)) => {
                let message = format!("{PEER} takes no checksum over {over}, which is required");
                Err(Error::new(ErrorKind::NotSupported, message))
            }
            None => Ok(()),
        }
    }
}
